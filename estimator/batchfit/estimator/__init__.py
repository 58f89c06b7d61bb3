"""Predict the GPU memory of a PyTorch training step, without a GPU.

>>> import torch
>>> w = Workload(
...     model=lambda: torch.nn.Linear(256, 10),
...     inputs=lambda b: torch.empty(b, 256),
...     loss="cross_entropy",
...     optimizer="adamw",
... )
>>> e = estimate(w, gpu="T4")
>>> e.fits(32)
True
"""

from .answer import BatchAnswer
from .budget import Budget
from .errors import (
    BatchfitError,
    BudgetError,
    DataDependentError,
    OutOfMemory,
    TargetError,
    TraceError,
    WorkloadError,
)
from .estimate import Estimate, MemoryCurve
from .explain import Reconciliation
from .gpus import GPU, all_gpus, find_gpu
from .layers import LayerSums
from .predict import estimate
from .solve import Outcome
from .timeline import Moment, Timeline
from .tracing import WORKSPACES, Category, Phase
from .workload import Workload

__all__ = [
    "GPU",
    "WORKSPACES",
    "BatchAnswer",
    "BatchfitError",
    "Budget",
    "BudgetError",
    "Category",
    "DataDependentError",
    "Estimate",
    "LayerSums",
    "MemoryCurve",
    "Moment",
    "OutOfMemory",
    "Outcome",
    "Phase",
    "Reconciliation",
    "TargetError",
    "Timeline",
    "TraceError",
    "Workload",
    "WorkloadError",
    "all_gpus",
    "estimate",
    "find_gpu",
]
