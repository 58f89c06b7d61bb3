"""Run a timeline of storages through the allocator."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_fields

import numpy as np
import numpy.typing as npt

from batchfit.estimator.errors import TraceError

from .blocks import Block
from .caching import CachingAllocator
from .report import AllocatorOutOfMemory, OomReport, SegmentInfo
from .settings import AllocatorSettings

__all__ = ["Replay", "replay"]

IntSequence = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Replay:
    """What the allocator did with a timeline. All sizes in bytes.

    Attributes:
        events: how many events were replayed (up to, and without, the one that ran out).
        peak_allocated, peak_allocated_event: torch.cuda.max_memory_allocated, and the index of
            the event that reached it (-1: nothing was allocated).
        peak_reserved, peak_reserved_event: torch.cuda.max_memory_reserved, and its event.
        end_allocated, end_reserved: at the end.
        block_sizes: bytes of the block that each storage got (0: none): the requested size rounded
            up, plus a rest too small to split off.
        retries: how often unused memory was given back to serve a request.
        skipped: how many optional storages did not fit.
        oom: the request that could not be served, if there was one.
    """

    events: int
    peak_allocated: int
    peak_allocated_event: int
    peak_reserved: int
    peak_reserved_event: int
    end_allocated: int
    end_reserved: int
    block_sizes: list[int] = field(repr=False)
    retries: int
    skipped: int
    oom: OomReport | None
    _allocator: CachingAllocator = field(repr=False, compare=False)

    @property
    def fragmentation(self) -> float:
        """Return the share of the reserved peak that the allocated peak did not need."""
        return 1.0 - self.peak_allocated / self.peak_reserved if self.peak_reserved else 0.0

    def segments(self) -> tuple[SegmentInfo, ...]:
        """Return the table of segments and blocks at the end; blocks name their storage."""
        return self._allocator.segments()


def replay(
    events: IntSequence,
    sizes: IntSequence,
    *,
    settings: AllocatorSettings | None = None,
    budget: int | None = None,
    until: int | None = None,
    optional: Collection[int] = (),
) -> Replay:
    """Run a timeline of storages through the allocator.

    Args:
        events: i >= 0: storage i is born; ~i (negative): storage i dies.
        sizes: requested bytes of each storage. Those of 0 bytes allocate nothing.
        settings: None: PyTorch's defaults.
        budget: bytes the allocator may reserve; None: no limit. A request that does not fit ends
            the replay and is reported in `Replay.oom`; nothing is raised.
        until: replay only this many events, to see the table of blocks at that moment.
        optional: storages that are left out where they do not fit, after all unused memory was
            given back, as cuDNN's plans are tried in turn (cudnn/Conv_v8.cpp, try_plans).

    Raises:
        TraceError: a storage is born twice or dies without living, or a size is negative.

    >>> run = replay([0, 1, ~0], [25 * 2**20, 100])
    >>> run.peak_allocated, run.peak_reserved  # 25 MiB fill a segment of 26 MiB, 100 bytes 512
    (27263488, 29360128)
    """
    order = list(events[:until]) if not isinstance(events, np.ndarray) else events[:until].tolist()
    lengths = sizes.tolist() if isinstance(sizes, np.ndarray) else sizes
    allocator = CachingAllocator(settings, budget)
    device, malloc, free = allocator.device, allocator.malloc, allocator.free
    blocks: list[Block | None] = [None] * len(lengths)
    taken = [0] * len(lengths)
    peak_allocated = peak_reserved = 0
    peak_allocated_event = peak_reserved_event = -1
    oom = None
    skipped: set[int] = set()
    index = event = 0
    try:
        for index, event in enumerate(order):  # both are read after an OOM
            if event < 0:
                block = blocks[~event]
                if block is not None:
                    blocks[~event] = None
                    free(block)
                elif lengths[~event] and ~event not in skipped:
                    raise TraceError(f"event {index}: storage {~event} dies but is not alive")
            elif lengths[event]:
                if blocks[event] is not None:
                    raise TraceError(f"event {index}: storage {event} is born twice")
                try:
                    blocks[event] = block = malloc(lengths[event])
                except AllocatorOutOfMemory:
                    if event not in optional:
                        raise
                    skipped.add(event)
                    continue
                block.storage = event
                taken[event] = block.size
                if allocator.peak_allocated > peak_allocated:
                    peak_allocated, peak_allocated_event = allocator.peak_allocated, index
                if device.peak_reserved > peak_reserved:
                    peak_reserved, peak_reserved_event = device.peak_reserved, index
        index = len(order)
    except AllocatorOutOfMemory as error:
        oom = with_fields(error.report, event=index, storage=event)
    return Replay(
        events=index,
        peak_allocated=allocator.peak_allocated,
        peak_allocated_event=peak_allocated_event,
        peak_reserved=device.peak_reserved,
        peak_reserved_event=peak_reserved_event,
        end_allocated=allocator.allocated,
        end_reserved=device.reserved,
        block_sizes=taken,
        retries=allocator.retries,
        skipped=len(skipped),
        oom=oom,
        _allocator=allocator,
    )
