"""Record births and deaths of storages while a workload runs without a GPU."""

from .recorder import Category, Log, Phase, Recorder
from .run import Trace, TraceOptions, record_cpu, trace

__all__ = ["Category", "Log", "Phase", "Recorder", "Trace", "TraceOptions", "record_cpu", "trace"]
