"""timm 0.6's benchmark.py --bench train, as the data's README (item 8) describes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchfit.estimator import Workload

from .base import Job, Parts, Step
from .notebooks import images

GPU = "RTX 3090"
ENVIRONMENT = "timm-0.6.7"


def make(name: str, size: int) -> nn.Module:
    """The timm model for images of this side; some models must be told it."""
    import timm

    model: Any = timm.create_model(name)
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", {})
    if config.get("input_size", (3, size, size))[-1] != size:
        try:
            model = timm.create_model(name, img_size=size)
        except TypeError:
            return model.train()  # type: ignore[no-any-return]  # takes any size
    return model.train()  # type: ignore[no-any-return]


def training(name: str, size: int, channels_last: bool) -> Workload:
    """fp16 autocast around forward, loss and backward; SGD; zero_grad that zeroes."""

    def build(device: torch.device) -> Step:
        torch.backends.cudnn.benchmark = True
        model: Any = make(name, size).to(device)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
        classes = model.num_classes
        loss = nn.CrossEntropyLoss().to(device)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, foreach=False
        )
        example: torch.Tensor | None = None

        def step(batch: int) -> None:
            nonlocal example
            if example is None:
                example = torch.randn(batch, 3, size, size, device=device)
                if channels_last:
                    example = example.contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad(set_to_none=False)
            with torch.autocast("cuda", dtype=torch.float16):
                output = model(example)
                if isinstance(output, tuple):
                    output = output[0]
                target = torch.empty(batch, device=device, dtype=torch.long).random_(classes)
                loss(output, target).backward()
            optimizer.step()

        return step

    return Workload.from_step(build, name=name)


def job(name: str, size: int, channels_last: bool) -> Job:
    return Job(
        lambda: training(name, size, channels_last), 0, GPU, before_2=True,
        environment=ENVIRONMENT,
        parts=lambda: Parts(
            lambda: make(name, size), images(size), optimizer="momentum", autocast=torch.float16
        ),
    )  # fmt: skip
