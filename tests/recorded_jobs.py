"""The jobs of the recorded steps (tests/data/oracle/steps), rebuilt from their descriptions.

Each function returns a workload; `JOBS` says which trace it is, at which batch, on which GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchfit.estimator import Workload

from .recorded_models import (
    Attention,
    CS336Adam,
    LanguageModel,
    Tables,
    XAdam,
    cs336_loss,
    last,
    x_loss,
    x_model,
)  # fmt: skip


def forward_only(context: int) -> Workload:
    """Trace 23: the graph is built and dropped."""

    def build(device: torch.device) -> Any:
        model, data = x_model(context), None

        def step(batch: int) -> None:
            nonlocal data
            if data is None:
                data = torch.randint(0, 10000, (batch, context)).to(device)
            model(data)

        return step

    return Workload.from_step(build, name="XTransformerLM, forward")


def x_training(context: int, bf16: bool = False) -> Workload:
    """Traces 44, 62 and 63: autocast, where it is on, lies around the whole loop."""

    def build(device: torch.device) -> Any:
        model = x_model(context)
        optimizer = XAdam(model.parameters())
        kept: dict[str, Any] = {}
        around: AbstractContextManager[Any] = nullcontext()
        if bf16:
            around = torch.autocast("cuda", torch.bfloat16)
            around.__enter__()

        def step(batch: int) -> None:
            if not kept:
                kept["data"] = torch.randint(0, 10000, (batch, context)).to(device)
                kept["labels"] = torch.randint(0, 10000, (batch,)).to(device)
            optimizer.zero_grad()
            kept["logits"] = model(kept["data"])
            kept["predict"] = last(kept["logits"])
            kept["loss"] = x_loss(kept["predict"], kept["labels"])
            kept["loss"].backward()
            optimizer.step()

        return step

    return Workload.from_step(build, name="XTransformerLM")


def cs336() -> Workload:
    """Trace 58."""

    def build(device: torch.device) -> Any:
        tables = Tables(128, 64)
        model = LanguageModel(768, 3072, 12, lambda: Attention(768, 12, tables), rsqrt=True)
        optimizer = CS336Adam(model.parameters())
        kept: dict[str, Any] = {}

        def step(batch: int) -> None:
            if not kept:
                for name in ("x", "y"):
                    kept[name] = torch.randint(0, 10000, (batch, 128), device=device)
            optimizer.zero_grad()
            kept["logits"] = model(kept["x"])
            kept["loss"] = cs336_loss(kept["logits"], kept["y"])
            kept["loss"].backward()
            optimizer.step()

        return step

    return Workload.from_step(build, name="BasicsTransformerLM")


def resnet() -> Workload:
    """Trace 35."""

    def build(device: torch.device) -> Any:
        import torchvision

        model = torchvision.models.resnet50().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        kept: dict[str, Any] = {}

        def step(batch: int) -> None:
            if not kept:
                kept["x"] = torch.randn(batch, 3, 224, 224, device=device)
                kept["y"] = torch.rand(batch, 1000, device=device)
            output = model(kept["x"])
            loss = F.cross_entropy(output, kept["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return Workload.from_step(build, name="resnet50")


def lone_softmax(x: Tensor) -> Tensor:
    top = x.max(dim=-1, keepdim=True).values
    grown = torch.exp(x - top)
    return grown / torch.sum(grown, -1, keepdim=True)


def lone_attention() -> Workload:
    """Trace 68: no model."""

    def build(device: torch.device) -> Any:
        kept: list[Tensor] = []

        def step(batch: int) -> None:
            kept.clear()
            q, k, v = (
                torch.randn(batch, 4096, 16, device=device, requires_grad=True) for _ in range(3)
            )
            scores = torch.einsum("...qd,...kd->...qk", q, k)
            scores = scores / 16**0.5
            weights = lone_softmax(scores)
            out = torch.einsum("...qk,...kd->...qd", weights, v)
            loss = out.sum()
            del scores, weights
            loss.backward()
            kept.extend([q, k, v, out, loss])

        return step

    return Workload.from_step(build, name="attention")


def lone_linear() -> Workload:
    """Trace 76: inputs and outputs go only when the next ones are there."""

    def build(device: torch.device) -> Any:
        model = nn.Linear(10000, 50000, device=device)
        kept: dict[str, Tensor] = {}

        def step(batch: int) -> None:
            inputs = torch.randn(batch, 10000, device=device)
            outputs = model(inputs)
            kept.update(inputs=inputs, outputs=outputs)

        return step

    return Workload.from_step(build, name="linear")


JOBS: dict[str, tuple[Callable[[], Workload], int, str]] = {
    "trace-023": (lambda: forward_only(100), 10, "RTX 3090"),
    "trace-035": (resnet, 1, "A100 80GB"),
    "trace-044": (lambda: x_training(100), 10, "RTX 3090"),
    "trace-058": (cs336, 4, "RTX 3090"),
    "trace-062": (lambda: x_training(200, bf16=True), 10, "RTX 3090"),
    "trace-063": (lambda: x_training(200), 10, "RTX 3090"),
    "trace-068": (lone_attention, 8, "A100 80GB"),
    "trace-076": (lone_linear, 5000, "H100"),
}
