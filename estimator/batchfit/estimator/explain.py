"""Why one number is not the other: from what was asked for to what nvidia-smi shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .timeline import BLOCK
from .tracing import Category
from .units import format_bytes

if TYPE_CHECKING:
    from .estimate import Estimate


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """One batch size's memory, step by step, in bytes.

    ``requested + rounding + unsplit == allocated``, ``allocated + cached == reserved`` and
    ``reserved + context == process``.

    Attributes:
        batch: the batch size.
        requested: of all tensors and workspaces alive at the peak ("Requested memory" in
            ``torch.cuda.memory_summary``).
        rounding: each block is a multiple of 512 bytes.
        unsplit: rests of blocks that the allocator hands out whole, as they are at most 1 MiB.
        allocated: ``torch.cuda.max_memory_allocated`` ("Allocated memory, Peak Usage").
        workspace: the part of it that libraries and kernels take for themselves.
        cached: the most that the allocator holds beyond that, for later requests.
        reserved: ``torch.cuda.max_memory_reserved`` ("GPU reserved memory, Peak Usage").
        context: what the process takes outside PyTorch's allocator: CUDA's context and kernels.
        process: what nvidia-smi shows for the process once the step has run.
        torchinfo: what torchinfo adds up, or None where there is no one model.
    """

    batch: int
    requested: int
    rounding: int
    unsplit: int
    allocated: int
    workspace: int
    cached: int
    reserved: int
    context: int
    process: int
    torchinfo: int | None

    def rows(self) -> list[tuple[str, int, str]]:
        """Name, bytes and meaning of each line, in order."""
        rows = [
            ("requested", self.requested, "all tensors and workspaces alive at the peak"),
            ("+ rounding", self.rounding, "blocks are multiples of 512 bytes"),
            ("+ unsplit rests", self.unsplit, "up to 1 MiB of a block is not split off"),
            ("= allocated", self.allocated, "torch.cuda.max_memory_allocated()"),
            ("+ cached", self.cached, "free blocks that PyTorch keeps for later requests"),
            ("= reserved", self.reserved, "torch.cuda.max_memory_reserved()"),
            ("+ context", self.context, "CUDA's context and loaded kernels"),
            ("= process", self.process, "what nvidia-smi shows"),
        ]
        if self.torchinfo is not None:
            rows.append((
                "torchinfo says", self.torchinfo,
                "weights and twice each layer's output; nothing else",
            ))  # fmt: skip
        return rows

    def __str__(self) -> str:
        width = max(len(name) for name, _, _ in self.rows())
        return "\n".join(
            f"{name:<{width}}  {format_bytes(size):>12}  {meaning}"
            for name, size, meaning in self.rows()
        )


def explain(estimate: Estimate, batch: int) -> Reconciliation:
    """Line up what is called memory: see :class:`Reconciliation`.

    >>> import torch
    >>> from batchfit.estimator import estimate
    >>> e = estimate(torch.nn.Linear(1000, 1000), torch.empty(8, 1000), loss="mse", gpu="T4")
    >>> r = explain(e, 64)
    >>> r.requested + r.rounding + r.unsplit == r.allocated == e.peak(64)
    True
    """
    timeline, run = estimate.timeline_at(batch), estimate.replay(batch)
    sizes = timeline.sizes(batch)
    alive = [i for i in timeline.alive_at(run.peak_allocated_event) if run.block_sizes[i]]
    requested = sum(int(sizes[i]) for i in alive)
    rounded = sum(-(-int(sizes[i]) // BLOCK) * BLOCK for i in alive)
    workspace = estimate.breakdown(batch).get(Category.WORKSPACE, 0)
    layers = estimate.layers
    context = estimate.gpu.context_bytes
    return Reconciliation(
        batch=batch, requested=requested, rounding=rounded - requested,
        unsplit=run.peak_allocated - rounded, allocated=run.peak_allocated, workspace=workspace,
        cached=run.peak_reserved - run.peak_allocated, reserved=run.peak_reserved, context=context,
        process=run.peak_reserved + context,
        torchinfo=None if layers is None else layers.torchinfo_total(batch),
    )  # fmt: skip
