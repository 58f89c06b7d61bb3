"""Pools of free blocks, and those that take memory by cudaMalloc, a segment at a time.

The rules are those of c10/cuda/CUDACachingAllocator.cpp; the function that holds each is named in
the docstrings. All are confirmed by the traces in tests/data/oracle unless a docstring says not.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from .blocks import MIN_BLOCK, SMALL_LIMIT, Block, Device, segment_size
from .settings import AllocatorSettings

__all__ = ["Pool", "SegmentPool"]

# The sort key of a free block holds its size above its address, so that one int compares as
# (size, address) does, which is PyTorch's order (BlockComparatorSize). 57 bits are the widest
# virtual address of any CUDA platform.
ADDRESS_BITS = 57


class Pool:
    """The free blocks of one stream, small or large, in the order of best fit (BlockPool).

    The list `_keys` is sorted; a search, an insertion or a removal is a bisection in C and a
    move of pointers, which beats any tree written in Python at the few thousand free blocks of
    a training step.
    """

    expandable = False

    def __init__(
        self, settings: AllocatorSettings, device: Device, *, small: bool, stream: int
    ) -> None:
        self.settings = settings
        self.device = device
        self.small = small
        self.stream = stream
        self.searches = 0
        self.min_rest = MIN_BLOCK if small else SMALL_LIMIT + 1
        self.max_split = settings.max_split_size
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}

    def __iter__(self) -> Iterator[Block]:
        """Iterate over the free blocks, smallest first; safe while they are released."""
        return iter([self._blocks[key] for key in self._keys])

    @property
    def largest_free(self) -> int:
        """Return the bytes of the largest free block."""
        return self._keys[-1] >> ADDRESS_BITS if self._keys else 0

    def add(self, block: Block) -> None:
        """Put a block into the free list."""
        key = block.size << ADDRESS_BITS | block.address
        block.free = True
        block.born = self.searches
        self._blocks[key] = block
        insort(self._keys, key)

    def discard(self, block: Block) -> None:
        """Take a block out of the free list."""
        key = block.size << ADDRESS_BITS | block.address
        block.free = False
        del self._blocks[key]
        del self._keys[bisect_left(self._keys, key)]

    def best_fit(self, size: int) -> int:
        """Return the place in the free list of the block for a request; its length if none."""
        return bisect_left(self._keys, size << ADDRESS_BITS)

    def find(self, size: int) -> Block | None:
        """Take the best free block for a rounded request out of the list (get_free_block)."""
        index = self.best_fit(size)
        if index == len(self._keys):
            return None
        if self.max_split is not None:
            found = self._keys[index] >> ADDRESS_BITS
            if size < self.max_split <= found:
                return None  # an oversize block is for oversize requests
            if size >= self.max_split and found >= size + self.settings.max_non_split_rounding:
                return None  # and not for much smaller ones, since it will not be split
        block = self._blocks.pop(self._keys.pop(index))
        block.free = False
        return block

    def splits(self, size: int, rest: int) -> bool:
        """Return whether a found block is cut when `rest` bytes exceed the request (should_split).

        A rest that is not cut off is handed out too and counts as allocated.
        """
        return rest >= self.min_rest and (
            self.small or self.max_split is None or size < self.max_split
        )

    def recycle(self, block: Block) -> None:
        """Merge a block that is free now with its free neighbours (free_block)."""
        following = block.next
        if following is not None and following.free:
            self.discard(following)
            block.absorb_next()
        previous = block.previous
        if previous is not None and previous.free:
            self.discard(previous)
            previous.absorb_next()
            block = previous
        self.add(block)

    def grow(self, size: int) -> Block | None:
        """Get memory for a rounded request from the device; None if it has not enough."""
        raise NotImplementedError

    def release(self) -> None:
        """Give back to the device what holds no block that is handed out."""
        raise NotImplementedError

    def release_oversize(self, size: int) -> bool:
        """Give back just enough oversize segments for a request; False if there are not enough."""
        return False

    def adopt(self, head: Block) -> None:
        """Count the segment or range that begins with this block among the pool's."""
        raise NotImplementedError

    def heads(self) -> Iterator[Block]:
        """Iterate over the first blocks of the segments, by address."""
        raise NotImplementedError


class SegmentPool(Pool):
    """A pool that takes memory by cudaMalloc, one segment at a time."""

    def __init__(
        self, settings: AllocatorSettings, device: Device, *, small: bool, stream: int
    ) -> None:
        super().__init__(settings, device, small=small, stream=stream)
        self._heads: dict[int, Block] = {}

    def heads(self) -> Iterator[Block]:
        return iter([head for _, head in sorted(self._heads.items())])

    def grow(self, size: int) -> Block | None:
        """Get a new segment (alloc_block)."""
        segment = segment_size(size, self.settings)
        if not self.device.take(segment):
            return None
        block = Block(self, self.device.new_address(segment), segment)
        self.adopt(block)
        self.device.tell("segment_alloc", block.address, segment, self.stream)
        return block

    def adopt(self, head: Block) -> None:
        self._heads[head.address] = head

    def release(self) -> None:
        """Free every segment that is one free block, smallest first (release_blocks)."""
        for block in self:
            if block.whole:
                self.release_block(block)

    def release_block(self, block: Block) -> None:
        """Free one whole segment (release_block)."""
        self.discard(block)
        del self._heads[block.address]
        self.device.reserved -= block.size
        self.device.tell("segment_free", block.address, block.size, self.stream)

    def release_oversize(self, size: int) -> bool:
        """Free just enough oversize segments for a request (release_available_cached_blocks).

        The smallest that is large enough, else the largest ones until their sum is. Happens only
        under ``max_split_size_mb``; *not confirmed by a trace*.
        """
        if self.max_split is None:
            return False
        target = max(size, self.max_split)
        index = bisect_left(self._keys, target << ADDRESS_BITS)
        if index < len(self._keys):
            self.release_block(self._blocks[self._keys[index]])
            return True
        released = 0
        while released < target and self.largest_free >= self.max_split:
            block = self._blocks[self._keys[-1]]
            released += block.size
            self.release_block(block)
        return released >= target
