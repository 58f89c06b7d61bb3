"""Expandable segments: ranges of addresses that memory is mapped into page by page.

The rules of the second half of c10/cuda/CUDACachingAllocator.cpp (Note [Expandable Segments]),
confirmed by the expandable traces in tests/data/oracle: map, best fit, split, unmap and OOM.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator

from .blocks import MIN_BLOCK, SMALL_SEGMENT, Block, Device
from .segments import Pool
from .settings import AllocatorSettings

__all__ = ["RangePool"]

UNLIMITED_RANGE = 1 << 40
"""Bytes of a range when there is no budget: more than any device has, and the 2**47 addresses
still hold 64 streams."""


class RangePool(Pool):
    """A pool that maps memory into ranges of addresses, by pages of 2 MiB (small) or 20 MiB."""

    expandable = True

    def __init__(
        self, settings: AllocatorSettings, device: Device, *, small: bool, stream: int
    ) -> None:
        super().__init__(settings, device, small=small, stream=stream)
        self.min_rest = MIN_BLOCK  # in both pools, unlike segments
        self.page = SMALL_SEGMENT if small else settings.large_segment_size
        self._heads: dict[int, Block] = {}  # first block of each range, by its address
        self._starts: list[int] = []  # addresses of the ranges, sorted
        self._unmapped: dict[int, Block] = {}
        self._gaps: list[int] = []  # addresses of the unmapped blocks, sorted

    def heads(self) -> Iterator[Block]:
        return iter([self._heads[start] for start in self._starts])

    def splits(self, size: int, rest: int) -> bool:
        return rest >= self.min_rest

    def best_fit(self, size: int) -> int:
        """Return the place of the block for a request: here a block counts with what it can become.

        A block in front of unmapped addresses could grow into them, so it counts as that large
        and the next larger free block is preferred (get_free_block).
        """
        index = super().best_fit(size)
        if index < len(self._keys):
            reach = self._reach(index)
            while index + 1 < len(self._keys):
                further = self._reach(index + 1)
                if further >= reach:
                    break
                index, reach = index + 1, further
        return index

    def _reach(self, index: int) -> int:
        block = self._blocks[self._keys[index]]
        following = block.next
        return block.size if following is None or following.mapped else block.size + following.size

    def grow(self, size: int) -> Block | None:
        """Map enough pages for a rounded request at the lowest address that has room for it.

        Pages count against the budget one by one, as physical memory does. PyTorch from 2.10 on
        also refuses when the *device's* total is below reserved + request; that bound is weaker
        than the budget, which leaves out the context.
        """
        block = self._room_for(size) or self._new_range(size)
        if block is None:
            return None
        if not block.mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:  # a free block with unmapped addresses behind it
            behind = block.next
            assert behind is not None and not behind.mapped
            mapped = self._map(behind, min(size - block.size, behind.size))
            if mapped is None:
                return None
            block = mapped
        self.discard(block)
        return block

    def _room_for(self, size: int) -> Block | None:
        """Find the lowest stretch of free and unmapped blocks with `size` bytes in a range."""
        for address in self._gaps:
            start: Block = self._unmapped[address]
            if start.previous is not None and start.previous.free:
                start = start.previous
            room, block = 0, start
            while room < size and (block.free or not block.mapped):
                room += block.size
                if block.next is None:
                    break
                block = block.next
            if room >= size:
                return start
        return None

    def _new_range(self, size: int) -> Block | None:
        """Reserve addresses for 9/8 of the memory, in whole pages (find_expandable_block)."""
        length = self.range_size
        if length < size:
            return None
        block = Block(self, self.device.new_address(length), length)
        self.adopt(block)
        self.adopt_gap(block)
        return block

    @property
    def range_size(self) -> int:
        """Return the bytes of addresses of a new range."""
        budget = self.device.budget
        length = UNLIMITED_RANGE if budget is None else budget + budget // 8
        return -(-length // self.page) * self.page

    def adopt(self, head: Block) -> None:
        self._heads[head.address] = head
        insort(self._starts, head.address)

    def adopt_gap(self, block: Block) -> None:
        """Mark a block of an adopted range as addresses without memory."""
        block.mapped = False
        self._add_gap(block)

    def _add_gap(self, block: Block) -> None:
        self._unmapped[block.address] = block
        insort(self._gaps, block.address)

    def _drop_gap(self, block: Block) -> None:
        del self._unmapped[block.address]
        del self._gaps[bisect_left(self._gaps, block.address)]

    def _map(self, block: Block, size: int) -> Block | None:
        """Back the front of an unmapped block with whole pages; return the free block."""
        length = -(-size // self.page) * self.page
        if not self.device.take(length):
            return None
        self.device.tell("segment_map", block.address, length, self.stream)
        self._drop_gap(block)
        if length < block.size:
            self._add_gap(block.cut(length))
        block.mapped = True
        return self._merge(block, lambda other: other.free, self.discard, self.add)

    def release(self) -> None:
        """Unmap the whole pages of the free blocks, smallest block first (release_blocks)."""
        for block in self:
            self._unmap(block)

    def _unmap(self, block: Block) -> None:
        """Take the memory out of the whole pages of a free block (unmap_block)."""
        start = self._starts[bisect_right(self._starts, block.address) - 1]
        first = start + -(-(block.address - start) // self.page) * self.page
        end = start + (block.address + block.size - start) // self.page * self.page
        if first >= end:
            return
        self.discard(block)
        if first > block.address:
            front, block = block, block.cut(first - block.address)
            self.add(front)
        if end < block.address + block.size:
            self.add(block.cut(end - block.address))
        block.mapped = False
        self.device.reserved -= block.size
        self.device.tell("segment_unmap", block.address, block.size, self.stream)
        block = self._merge(block, lambda other: not other.mapped, self._drop_gap, self._add_gap)
        if block.whole:  # nothing of the range is left
            self._drop_gap(block)
            del self._heads[block.address]
            self._starts.remove(block.address)

    @staticmethod
    def _merge(
        block: Block,
        alike: Callable[[Block], bool],
        remove: Callable[[Block], None],
        insert: Callable[[Block], None],
    ) -> Block:
        """Merge a block with neighbours of its kind and list the result; return it."""
        following, previous = block.next, block.previous
        if following is not None and alike(following):
            remove(following)
            block.absorb_next()
        if previous is not None and alike(previous):
            remove(previous)
            previous.absorb_next()
            block = previous
        insert(block)
        return block
