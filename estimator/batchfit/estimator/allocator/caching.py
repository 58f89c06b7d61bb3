"""The allocator itself: rounding, the pools of each stream, what is done when memory is short."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from batchfit.estimator.errors import TraceError

from . import table
from .blocks import MIN_BLOCK, SMALL_LIMIT, Block, Device, segment_size
from .ranges import RangePool
from .report import AllocatorOutOfMemory, OomReport, SegmentInfo
from .segments import Pool, SegmentPool
from .settings import AllocatorSettings

__all__ = ["CachingAllocator"]


class CachingAllocator:
    """The caching allocator of one device.

    Args:
        settings: what ``PYTORCH_CUDA_ALLOC_CONF`` says; None: PyTorch's defaults.
        budget: bytes it may reserve; None: no limit.
        new_address: answers a request of the allocator for that many bytes with an address.
        observer: is told (action, address, bytes, stream) of every segment that comes and goes,
            with the actions of PyTorch's own trace entries.

    Attributes:
        allocated, peak_allocated: bytes of the blocks handed out, as
            torch.cuda.memory_allocated and max_memory_allocated count them.
        retries: how often everything unused was given back because a request had failed
            (num_alloc_retries).
        device: the budget and what of it is reserved.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        budget: int | None = None,
        *,
        new_address: Callable[[int], int] | None = None,
        observer: Callable[[str, int, int, int], None] | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.device = Device(budget, new_address, observer)
        self.allocated = 0
        self.peak_allocated = 0
        self.retries = 0
        self._divisions = self.settings.roundup_power2_divisions or None
        self._collects = budget is not None and self.settings.garbage_collection_threshold > 0.0
        self._pools: dict[int, tuple[Pool, Pool]] = {}  # by stream: (large, small)

    @property
    def reserved(self) -> int:
        """Return the bytes of all segments, as torch.cuda.memory_reserved counts them."""
        return self.device.reserved

    @property
    def peak_reserved(self) -> int:
        """Return the most bytes reserved so far (torch.cuda.max_memory_reserved)."""
        return self.device.peak_reserved

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Hand out a block for `size` bytes, at least 1.

        Raises:
            AllocatorOutOfMemory: the budget has no room, even after everything that is wholly
                unused was given back. The allocator can be used on.
            TraceError: `size` is not positive.
        """
        rounded = self.round(size)
        pools = self._pools.get(stream) or self._open(stream)
        pool = pools[rounded <= SMALL_LIMIT]
        if self._collects:
            self._count_search(pool.small)
        block = pool.find(rounded) or self._grow(pool, size, rounded)
        if pool.splits(rounded, block.size - rounded):
            pool.add(block.cut(rounded))
        block.requested = size
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Take a block back into the cache.

        Raises:
            TraceError: it is not handed out.
        """
        if not block.requested:
            raise TraceError(f"the block at address {block.address:#x} is freed twice")
        self.allocated -= block.size
        block.requested = 0
        block.storage = -1
        block.pool.recycle(block)

    def empty_cache(self) -> None:
        """Give back what holds no block, large pools first (release_cached_blocks)."""
        for small in (False, True):
            for stream in sorted(self._pools):
                self._pools[stream][small].release()

    def segments(self) -> tuple[SegmentInfo, ...]:
        """Return the table of all segments and their blocks, by address."""
        return table.read(chain.from_iterable(self._pools.values()))

    def load(self, segments: Iterable[SegmentInfo]) -> dict[int, Block]:
        """Start from a table of segments, as `segments` returns it; only before the first malloc.

        Returns:
            the blocks that are handed out, by address.
        """
        infos = sorted(segments, key=lambda segment: segment.address)
        blocks = {}
        for stream, small in sorted({(segment.stream, segment.small) for segment in infos}):
            own = [s for s in infos if (s.stream, s.small) == (stream, small)]
            above = [s.address for s in infos if s.address > own[-1].address]
            pool = (self._pools.get(stream) or self._open(stream))[small]
            for block in table.load(pool, own, min(above, default=None)):
                blocks[block.address] = block
                self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return blocks

    def round(self, size: int) -> int:
        """Return the bytes of the block a request needs (round_size): a multiple of 512.

        ``roundup_power2_divisions`` rounds to a fraction of the power of two below instead;
        *not confirmed by a trace*.
        """
        if size < 1:
            raise TraceError(f"a block of {size} bytes cannot be asked for")
        if self._divisions is not None:
            # sizes below 2 MiB use the first entry, those from 32 GiB the last
            power = size.bit_length() - 1
            divisions = self._divisions[min(max(power - 20, 0), len(self._divisions) - 1)]
            if divisions > 1 and size > MIN_BLOCK * divisions:
                step = (1 << power) // divisions
                return -(-size // step) * step
        return (size + MIN_BLOCK - 1) & -MIN_BLOCK

    def _open(self, stream: int) -> tuple[Pool, Pool]:
        kind = RangePool if self.settings.expandable_segments else SegmentPool
        large = kind(self.settings, self.device, small=False, stream=stream)
        small = kind(self.settings, self.device, small=True, stream=stream)
        self._pools[stream] = large, small
        return large, small

    def _grow(self, pool: Pool, size: int, rounded: int) -> Block:
        """Get memory from the device: at once, or after giving some or all unused memory back."""
        if self._collects:
            self._collect_garbage()
        block = pool.grow(rounded)
        if block is None and pool.release_oversize(rounded):
            block = pool.grow(rounded)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = pool.grow(rounded)
        if block is None:
            assert self.device.budget is not None  # without one the device always gives
            raise AllocatorOutOfMemory(
                OomReport(
                    requested=size,
                    rounded=rounded,
                    segment=segment_size(rounded, self.settings),
                    allocated=self.allocated,
                    reserved=self.reserved,
                    budget=self.device.budget,
                    largest_free=pool.largest_free,
                )
            )
        return block

    def _count_search(self, small: bool) -> None:
        for pools in self._pools.values():  # PyTorch counts per size class, not per stream
            pools[small].searches += 1

    def _collect_garbage(self) -> None:
        """Give back large segments not reused for long (garbage_collect_cached_blocks).

        *Not confirmed by a trace.* PyTorch measures the threshold against the device's memory
        times ``per_process_memory_fraction`` (always, from 2.10 on); the twin against its budget.
        """
        assert self.device.budget is not None
        excess = self.reserved - int(
            self.settings.garbage_collection_threshold * self.device.budget
        )
        idle = [
            (pool.searches - block.born, block, pool)
            for _, (pool, _) in sorted(self._pools.items())
            if isinstance(pool, SegmentPool)
            for block in pool
            if block.whole
        ]
        while excess > 0 and idle:
            mean = sum(age for age, _, _ in idle) / len(idle)
            for age, block, pool in idle:
                if age >= mean:
                    excess -= block.size
                    pool.release_block(block)
            idle = [entry for entry in idle if entry[0] < mean]
