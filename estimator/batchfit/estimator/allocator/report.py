"""What the caching allocator's twin hands back: its table of blocks, and how it ran out."""

from __future__ import annotations

from dataclasses import dataclass

from batchfit.estimator.errors import OutOfMemory
from batchfit.estimator.units import GIB, KIB, MIB

__all__ = ["AllocatorOutOfMemory", "BlockInfo", "OomReport", "SegmentInfo"]


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block of a segment.

    Attributes:
        address, size: bytes.
        requested: bytes asked for; 0 if the block is free.
        allocated: handed out, as opposed to free.
        storage: the index of the storage that owns it; None if free or not given.
    """

    address: int
    size: int
    requested: int
    allocated: bool
    storage: int | None = None


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment (or, if `expandable`, one unbroken mapped stretch of a range) and its blocks."""

    address: int
    stream: int
    small: bool
    expandable: bool
    blocks: tuple[BlockInfo, ...]

    @property
    def size(self) -> int:
        """Return the bytes of the segment."""
        return sum(block.size for block in self.blocks)

    @property
    def allocated(self) -> int:
        """Return the bytes of its blocks that are handed out."""
        return sum(block.size for block in self.blocks if block.allocated)


@dataclass(frozen=True, slots=True)
class OomReport:
    """Where and why a request could not be served. All sizes in bytes.

    Attributes:
        requested: what was asked for.
        rounded: the block it needed.
        segment: what the driver was asked for in vain ("Tried to allocate").
        allocated, reserved: after everything that was wholly free had been given back.
        budget: what the allocator may reserve at most.
        largest_free: the largest free block of the pool that was searched.
        event: index of the event in the replay; None outside one.
        storage: index of the storage; None outside a replay.
    """

    requested: int
    rounded: int
    segment: int
    allocated: int
    reserved: int
    budget: int
    largest_free: int
    event: int | None = None
    storage: int | None = None

    def message(self, where: str = "") -> str:
        """Return a text that reads like PyTorch's; `where` names operator, module and phase.

        >>> OomReport(5 << 20, 5 << 20, 20 << 20, 5 << 28, 3 << 29, 3 << 29, 4 << 20).message()
        'CUDA out of memory. Tried to allocate 20.00 MiB. The budget is 1.50 GiB of which 0 bytes \
is free. Of the reserved memory 1.25 GiB is allocated by PyTorch, and 256.00 MiB is reserved by \
PyTorch but unallocated (largest free block 4.00 MiB).'
        """
        text = (
            f"CUDA out of memory. Tried to allocate {_pytorch_size(self.segment)}. "
            f"The budget is {_pytorch_size(self.budget)} of which "
            f"{_pytorch_size(self.budget - self.reserved)} is free. Of the reserved memory "
            f"{_pytorch_size(self.allocated)} is allocated by PyTorch, and "
            f"{_pytorch_size(self.reserved - self.allocated)} is reserved by PyTorch but "
            f"unallocated (largest free block {_pytorch_size(self.largest_free)})."
        )
        return f"{text} Asked for {_pytorch_size(self.requested)} by {where}." if where else text


class AllocatorOutOfMemory(OutOfMemory):
    """The twin ran out of memory; the fields of `report` are attributes of the error, too."""

    def __init__(self, report: OomReport) -> None:
        super().__init__(report.message())
        self.report = report
        self.requested = report.requested
        self.rounded = report.rounded
        self.segment = report.segment
        self.allocated = report.allocated
        self.reserved = report.reserved
        self.budget = report.budget
        self.largest_free = report.largest_free


def _pytorch_size(size: int) -> str:
    """Print bytes as PyTorch does (format_size in CUDACachingAllocator.cpp).

    It differs from `units.format_bytes`, which changes units at the unit and not above it.
    """
    for limit, unit, name in ((MIB, KIB, "KiB"), (GIB, MIB, "MiB")):
        if size <= KIB:
            return f"{size} bytes"
        if size <= limit:
            return f"{size / unit:.2f} {name}"
    return f"{size / GIB:.2f} GiB"
