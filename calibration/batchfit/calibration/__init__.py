"""Measured calibration: two or three short probes on a real device correct an estimate.

>>> import torch
>>> from batchfit.estimator import Workload
>>> w = Workload(model=lambda: torch.nn.Linear(64, 10), inputs=lambda b: torch.randn(b, 64))
>>> c = calibrate(w, device="cpu", budget="1MiB", power_of_two=True)
>>> c.largest_batch() in (512, 1024, 2048)
True
"""

from .answer import Answer, Conditions, Plan
from .budget import DeviceBudget
from .calibrate import calibrate
from .calibration import Calibration
from .errors import CalibrationError, StaleCalibration
from .meters import Memory, Meter, find_meter
from .oom import is_out_of_memory
from .probe import Probe
from .probes import ProbeOptions
from .second import BatchTable, Longest, batch_table, longest
from .throughput import Efficient, Speed

__all__ = [
    "Answer",
    "BatchTable",
    "Calibration",
    "CalibrationError",
    "Conditions",
    "DeviceBudget",
    "Efficient",
    "Longest",
    "Memory",
    "Meter",
    "Plan",
    "Probe",
    "ProbeOptions",
    "Speed",
    "StaleCalibration",
    "batch_table",
    "calibrate",
    "find_meter",
    "is_out_of_memory",
    "longest",
]
