"""Run a job on the GPU from nothing, and say how far its memory went."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from batchfit.estimator import Workload

from .device import Device

#: Whole steps of a run, as in the prediction: optimizer state is born in the first.
STEPS = 2
#: GradScaler skips steps whose gradients overflow, and halves its scale; so many are waited for.
MOST_STEPS = 14

# cuDNN and cuBLAS have errors of their own for "no memory".
_NO_MEMORY = ("out of memory", "ALLOC_FAILED")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job from an empty allocator. Bytes and seconds.

    Attributes:
        batch: the batch size.
        allocated, reserved: peaks over the whole run, the making of the model included.
        after: (allocated, reserved) peaks after each step.
        seconds: of each step.
        optimizer_steps: steps that optimizers took; two networks with one each take two at a time.
        left: (allocated, reserved) before the run: not (0, 0) where a library keeps a buffer for
            the life of the process, such as cuDNN's dropout state of RNNs.
        oom: the message of the allocator where it ran out of memory, else "".
    """

    batch: int
    allocated: int
    reserved: int
    after: tuple[tuple[int, int], ...]
    seconds: tuple[float, ...]
    optimizer_steps: int
    left: tuple[int, int]
    oom: str

    def as_json(self) -> dict[str, Any]:
        """The run as plain values."""
        return asdict(self)


def run(
    device: Device, workload: Workload, batch: int, *,
    around: AbstractContextManager[Any] | None = None, at_end: Callable[[], None] | None = None,
) -> Run:  # fmt: skip
    """Make the job and take two steps, from an empty allocator, and leave it empty.

    Args:
        device: where to.
        workload: what.
        batch: its size.
        around: entered for each step; it must allow that more than once.
        at_end: called while everything of the last step is still alive.

    Raises:
        Exception: whatever the job raises, other than for want of memory.
    """
    left = device.fresh()
    after: list[tuple[int, int]] = []
    seconds: list[float] = []
    taken = [0]
    message = ""
    try:
        with _counted(taken):
            _take_steps(device, workload, batch, around or nullcontext(), after, seconds, taken)
            if at_end is not None:
                at_end()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message = (str(error).splitlines() or ["out of memory"])[0]
        # The traceback's frames hold the job's tensors.
        error.__traceback__ = error.__context__ = error.__cause__ = None
    allocated, reserved = device.peaks()
    device.fresh()
    return Run(
        batch, allocated, reserved, tuple(after), tuple(seconds), taken[0], left, message
    )  # fmt: skip


def _take_steps(
    device: Device, workload: Workload, batch: int, around: AbstractContextManager[Any],
    after: list[tuple[int, int]], seconds: list[float], taken: list[int],
) -> None:  # fmt: skip
    step = workload.start(device.torch_device)
    scaled = workload.precision == "amp-fp16" and not workload.inference
    stepped = 0
    while len(after) < STEPS or (scaled and stepped < STEPS and len(after) < MOST_STEPS):
        before, began = taken[0], time.perf_counter()
        with around:
            step(batch)
        device.synchronize()
        seconds.append(round(time.perf_counter() - began, 4))
        stepped += taken[0] > before
        after.append(device.peaks())


@contextmanager
def _counted(taken: list[int]) -> Iterator[None]:
    """Count the calls of optimizers' steps: GradScaler leaves out those that would overflow."""

    def count(*_: Any) -> None:
        taken[0] += 1

    handle = register_optimizer_step_post_hook(count)
    try:
        yield
    finally:
        handle.remove()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the GPU had no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _NO_MEMORY)


def with_weights_at_hand(workload: Workload) -> Workload:
    """The same job, whose model is copied on the host instead of being initialised anew.

    A dozen runs of one job would spend most of their time in random numbers. What is on the GPU is
    the same: the copy is moved there as the original would be.
    """
    if workload.model is None or isinstance(workload.model, nn.Module):
        return workload
    made = workload.model()
    return workload.with_(model=lambda: copy.deepcopy(made))
