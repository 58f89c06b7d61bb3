"""Record births and deaths of storages while a workload runs without a GPU."""

from .ledger import Category, Log, Phase
from .recorder import Recorder
from .run import Trace, TraceOptions, record_cpu, trace
from .workspaces import WORKSPACES

__all__ = [
    "WORKSPACES",
    "Category",
    "Log",
    "Phase",
    "Recorder",
    "Trace",
    "TraceOptions",
    "record_cpu",
    "trace",
]
