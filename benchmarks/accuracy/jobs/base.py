"""What a job is, and what its parts are for tools that take a module instead of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from batchfit.estimator import Estimate, Phase, Workload, estimate
from batchfit.estimator.gpus import GPU
from batchfit.estimator.tracing import WORKSPACES

Measure = Callable[[Estimate, int], int]
Step = Callable[[int], None]


@dataclass(frozen=True)
class Parts:
    """A job as other tools take it.

    Attributes:
        model: makes the model, on the device that is current.
        inputs: host tensors of a batch: positional ones, or keywords.
        optimizer: "none", "sgd", "momentum" or "adam" (for tools that only know these).
        dtype: of the weights.
        autocast: the dtype of autocast, if it is on.
        trainable: share of the parameters that get gradients.
        checkpointing: whether activations are recomputed.
        hub_name: the model's name on the Hugging Face hub, if it has one.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, ...] | dict[str, torch.Tensor]]
    optimizer: str = "none"
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    trainable: float = 1.0
    checkpointing: bool = False
    hub_name: str = ""


@dataclass(frozen=True)
class Job:
    """One row's job.

    Attributes:
        workload: builds it.
        batch: what to ask the estimate for.
        gpu: the catalogue's name of the row's GPU, or a GPU.
        measure: what the row measured, in bytes; None takes the peak of allocated bytes.
        before_2: the row's torch was older than 2.0: it did not count the cuBLAS workspace, and
            asked cuDNN for convolutions through the interface of version 7, which chooses other
            algorithms than the plans that batchfit knows.
        environment: libraries of the time, of ``environments.toml``; "" for the installed ones.
        parts: for tools that take a module; None where the job is not one module's training.
    """

    workload: Callable[[], Workload]
    batch: int
    gpu: str | GPU
    measure: Measure | None = None
    before_2: bool = False
    environment: str = ""
    parts: Callable[[], Parts] | None = None

    def estimate(self) -> Estimate:
        later = ("cublas", "convolutions") if self.before_2 else ()
        kinds = [kind for kind in WORKSPACES if kind not in later]
        return estimate(self.workload(), gpu=self.gpu, workspaces=kinds, allocator="")


def allocated_at(phase: Phase, step: int) -> Measure:
    """Allocated bytes at the moment that a phase begins."""

    def measure(e: Estimate, batch: int) -> int:
        curve = e.timeline(batch)
        position = next(p for p, ph, st in curve.marks if (ph, st) == (phase, step))
        return int(curve.allocated[position - 1])

    return measure


def once(trial: Callable[[torch.device, int], None], name: str) -> Workload:
    """A trial that makes everything anew and runs once, with an empty cache before it."""

    def build(device: torch.device) -> Step:
        ran: list[int] = []

        def step(batch: int) -> None:
            if not ran:
                ran.append(batch)
                trial(device, batch)

        return step

    return Workload.from_step(build, name=name)
