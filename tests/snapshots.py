"""What the tests of snapshots share: a small job and its predicted snapshot."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from batchfit.estimator import Estimate, estimate
from batchfit.estimator.snapshot import predicted_snapshot

BATCH = 32
Snapshot = dict[str, Any]


@cache
def small(allocator: str = "") -> Estimate:
    """A perceptron with AdamW, on an A100."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 1000))
    return estimate(
        model, torch.empty(2, 512), gpu="A100 80GB", optimizer="adamw", loss="cross_entropy",
        allocator=allocator,
    )  # fmt: skip


@cache
def snapshot_of(batch: int = BATCH, allocator: str = "") -> Snapshot:
    """Its predicted snapshot, made once; copy it before changing it."""
    return predicted_snapshot(small(allocator), batch)
