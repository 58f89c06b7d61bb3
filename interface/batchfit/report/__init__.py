"""Pictures and a page of an estimate or a calibration. Needs matplotlib: ``batchfit[plot]``."""

from .figures import feasibility, memory_over_batch, memory_over_step
from .measured import calibration_curve, throughput_curve

__all__ = [
    "calibration_curve",
    "feasibility",
    "memory_over_batch",
    "memory_over_step",
    "throughput_curve",
]
