"""mmaction2's TSN on ResNet-50."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchfit.estimator import Workload

from .base import Job, Parts, Step
from .notebooks import resnet50

JOBS: dict[str, Job] = {}


def backbone(classes: int) -> nn.Module:
    model = resnet50(classes=classes)
    model.fc = nn.Sequential(nn.Dropout(0.4), nn.Linear(2048, classes))
    return model


def tsn_resnet50(classes: int, segments: int) -> Workload:
    """ResNet-50 on every frame, dropout, mean over segments; DDP; clip 40.

    DDP of torch 1.x (no bucket views) copies gradients into flat buckets, which stay.
    """

    def build(device: torch.device) -> Step:
        model = backbone(classes).to(device)
        bucket = torch.zeros(sum(p.numel() for p in model.parameters()), device=device)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, foreach=False
        )
        held: dict[str, Any] = {"bucket": bucket}

        def step(batch: int) -> None:
            frames = torch.empty(batch * segments, 3, 224, 224).to(device)
            target = torch.zeros(batch, dtype=torch.long).to(device)
            logits = model(frames).view(batch, segments, classes).mean(1)
            loss = nn.functional.cross_entropy(logits, target)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 40, foreach=False)
            optimizer.step()
            held["loss"] = loss.detach()

        return step

    return Workload.from_step(build, name="TSN ResNet-50")


def _frames(segments: int) -> Any:
    return lambda batch: (torch.empty(batch * segments, 3, 224, 224),)


for _row, _classes, _segments, _batch in (
    ("mmaction_tsn_r50_dense_1x1x5_50e_kinetics400_rgb", 400, 5, 16),
    ("mmaction_tsn_r50_1x1x3_100e_kinetics400_rgb", 400, 3, 32),
    ("mmaction_tsn_r50_1x1x3_75e_ucf101_rgb", 101, 3, 32),
):
    JOBS[_row] = Job(
        lambda c=_classes, s=_segments: tsn_resnet50(c, s), _batch, "V100 32GB", before_2=True,
        parts=lambda c=_classes, s=_segments: Parts(
            lambda: backbone(c), _frames(s), optimizer="momentum"
        ),
    )  # fmt: skip
