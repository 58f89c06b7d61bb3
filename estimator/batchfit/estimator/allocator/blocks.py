"""Sizes, blocks and the device: what the pools are made of.

The sizes are the constants of c10/core/AllocatorConfig.h (before torch 2.9 of
c10/cuda/CUDACachingAllocator.cpp), all confirmed by the traces in tests/data/oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from batchfit.estimator.units import MIB

from .settings import AllocatorSettings

if TYPE_CHECKING:
    from .segments import Pool

__all__ = [
    "LARGE_REQUEST",
    "MIN_BLOCK",
    "ROUND_LARGE",
    "SMALL_LIMIT",
    "SMALL_SEGMENT",
    "Block",
    "Device",
    "segment_size",
]

MIN_BLOCK = 512
"""Bytes: every block is a multiple of it (kMinBlockSize)."""
SMALL_LIMIT = 1 * MIB
"""Bytes: the largest block of the small pool (kSmallSize)."""
SMALL_SEGMENT = 2 * MIB
"""Bytes of a segment of the small pool, and of a page of a small range (kSmallBuffer)."""
LARGE_REQUEST = 10 * MIB
"""Bytes: from here on a request gets a segment of its own size (kMinLargeAlloc)."""
ROUND_LARGE = 2 * MIB
"""Bytes: such a segment is a multiple of it (kRoundLarge)."""

Observer = Callable[[str, int, int, int], None]
"""Is told (action, address, bytes, stream); the actions are those of PyTorch's trace entries:
segment_alloc, segment_free, segment_map, segment_unmap."""


def segment_size(size: int, settings: AllocatorSettings) -> int:
    """Return the bytes cudaMalloc is asked for to serve a rounded request (get_allocation_size)."""
    if size <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if size < LARGE_REQUEST:
        return settings.large_segment_size
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class Block:
    """A stretch of a segment: handed out, free, or (in a range) not backed by memory.

    Attributes:
        address, size: bytes.
        requested: bytes the caller asked for; above 0 exactly while the block is handed out.
        previous, next: the neighbours in the segment, None at its ends.
        free: in the free list of its pool, ready to be handed out or merged.
        mapped: backed by memory; False only in expandable ranges. Such a block is not `free`.
        storage: whatever the caller wants to remember of the owner; -1 is nothing.
        born: the pool's count of searches when the block was last freed (garbage collection).
    """

    __slots__ = (
        "address",
        "born",
        "free",
        "mapped",
        "next",
        "pool",
        "previous",
        "requested",
        "size",
        "storage",
    )

    def __init__(self, pool: Pool, address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.requested = 0
        self.previous: Block | None = None
        self.next: Block | None = None
        self.free = False
        self.mapped = True
        self.storage = -1
        self.born = 0

    @property
    def whole(self) -> bool:
        """Return whether the block is its whole segment (not is_split)."""
        return self.previous is None and self.next is None

    def cut(self, size: int) -> Block:
        """Shorten the block to `size` bytes and return the rest as a new neighbour."""
        rest = Block(self.pool, self.address + size, self.size - size)
        rest.mapped = self.mapped
        rest.previous = self
        rest.next = self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        """Take over the next block's bytes; that block is then no part of the segment."""
        absorbed = self.next
        assert absorbed is not None
        self.size += absorbed.size
        self.next = absorbed.next
        if self.next is not None:
            self.next.previous = self


class Device:
    """What the driver can still give: the budget, and the addresses it answers with.

    Args:
        budget: bytes the allocator may hold; None: no limit.
        new_address: answers a request for that many bytes with an address. The default goes down
            from 2**47, as cudaMalloc does in 70 % of the steps of the traces (in four of them it
            goes up). The order matters only between free blocks of one size: blind replays of
            all 40 classic traces reserve what the GPU did either way, and allocate it in all but
            one going down (0.18 % too much).
        observer: is told of every segment that comes and goes.
    """

    def __init__(
        self,
        budget: int | None,
        new_address: Callable[[int], int] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.budget = budget
        self.reserved = 0
        self.peak_reserved = 0
        self.new_address = new_address or self._below
        self.observer = observer
        self._lowest = 1 << 47

    def _below(self, size: int) -> int:
        self._lowest -= size
        return self._lowest

    def stay_below(self, address: int) -> None:
        """Keep the addresses to come below one that is in use, if it is in the same area."""
        if (1 << 46) < address < self._lowest:
            self._lowest = address

    def take(self, size: int) -> bool:
        """Account for `size` more bytes if the budget has room for them."""
        if self.budget is not None and self.reserved + size > self.budget:
            return False
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        return True

    def tell(self, action: str, address: int, size: int, stream: int) -> None:
        if self.observer is not None:
            self.observer(action, address, size, stream)
