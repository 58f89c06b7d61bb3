"""The errors of batchfit.

::

    BatchfitError
    ├── WorkloadError           the description of the job cannot be used as it is
    │   └── TargetError         the named model, file, optimizer or GPU does not exist
    ├── TraceError              the job was understood, but its step could not be traced
    │   └── DataDependentError  the step asks for a value that only real data can give
    ├── BudgetError             the memory budget is not one a job can be given
    ├── SnapshotError           a memory snapshot cannot be read or written (see snapshot.py)
    └── OutOfMemory             the simulated allocator ran out: what was asked, what was there

Each message says what was asked, what was found and what to do. Nothing else is raised on purpose.
"""

from __future__ import annotations

__all__ = [
    "BatchfitError",
    "BudgetError",
    "DataDependentError",
    "OutOfMemory",
    "TargetError",
    "TraceError",
    "WorkloadError",
]


class BatchfitError(Exception):
    """Base of every error that batchfit raises on purpose."""


class WorkloadError(BatchfitError):
    """The description of the job cannot be used: inputs, loss, optimizer, precision, options."""


class TargetError(WorkloadError):
    """A name does not lead to anything: model, file, optimizer, GPU."""


class TraceError(BatchfitError):
    """The step could not be traced on meta tensors; names the operator or line that stopped it."""


class DataDependentError(TraceError):
    """The step needs the value of a tensor that exists only on a real device."""


class BudgetError(BatchfitError):
    """The memory budget cannot be used: negative, unreadable, or smaller than the CUDA context."""


class OutOfMemory(BatchfitError):
    """The simulated caching allocator could not serve a request within its budget."""
