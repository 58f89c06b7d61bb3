"""The table of an allocator's segments and blocks: read it off, or start from one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .blocks import Block
from .ranges import RangePool
from .report import BlockInfo, SegmentInfo
from .segments import Pool

__all__ = ["load", "read"]


def read(pools: Iterable[Pool]) -> tuple[SegmentInfo, ...]:
    """Return the segments of some pools by address (as the snapshot function orders them)."""
    found = [
        SegmentInfo(run[0].address, pool.stream, pool.small, pool.expandable, run)
        for pool in pools
        for head in pool.heads()
        for run in _mapped_runs(head)
    ]
    return tuple(sorted(found, key=lambda segment: segment.address))


def _mapped_runs(head: Block) -> Iterator[tuple[BlockInfo, ...]]:
    """Yield the unbroken stretches with memory behind them, which is one for a classic segment."""
    run: list[BlockInfo] = []
    block: Block | None = head
    while block is not None:
        if block.mapped:
            storage = block.storage if block.storage >= 0 else None
            run.append(
                BlockInfo(block.address, block.size, block.requested, not block.free, storage)
            )
        elif run:
            yield tuple(run)
            run = []
        block = block.next
    if run:
        yield tuple(run)


def load(pool: Pool, segments: Sequence[SegmentInfo], limit: int | None) -> Iterator[Block]:
    """Fill an empty pool with segments; yield the blocks that are handed out.

    Args:
        pool: of the segments' stream and size class.
        segments: in the order of their addresses.
        limit: address at which something that is not the pool's begins, if known; the last range
            of an expandable pool ends there.
    """
    for segment in segments:
        pool.device.stay_below(segment.address)
    if not isinstance(pool, RangePool):
        for segment in segments:
            blocks = _chain(pool, None, segment.blocks)
            pool.adopt(blocks[0])
            yield from _sort_in(pool, blocks)
        return
    # One range holds them all: the gaps between mapped stretches are unmapped addresses.
    last: Block | None = None
    for segment in segments:
        if last is not None and segment.address > last.address + last.size:
            end = last.address + last.size
            (last,) = _chain(pool, last, [BlockInfo(end, segment.address - end, 0, False)])
            pool.adopt_gap(last)
        blocks = _chain(pool, last, segment.blocks)
        if last is None:
            pool.adopt(blocks[0])
        yield from _sort_in(pool, blocks)
        last = blocks[-1]
    if last is not None:
        end = last.address + last.size
        behind = pool.range_size if limit is None else min(pool.range_size, limit - end)
        if behind >= pool.page:
            behind -= behind % pool.page
            pool.adopt_gap(_chain(pool, last, [BlockInfo(end, behind, 0, False)])[0])


def _chain(pool: Pool, last: Block | None, infos: Sequence[BlockInfo]) -> list[Block]:
    """Make blocks of their descriptions and hang them behind `last`."""
    blocks = []
    for info in infos:
        block = Block(pool, info.address, info.size)
        block.requested = info.requested if info.allocated else 0
        block.storage = -1 if info.storage is None else info.storage
        block.previous = last
        if last is not None:
            last.next = block
        blocks.append(block)
        last = block
    return blocks


def _sort_in(pool: Pool, blocks: Sequence[Block]) -> Iterator[Block]:
    """Put free blocks into the pool's list and yield the others; count them all as reserved."""
    for block in blocks:
        pool.device.reserved += block.size
        if block.requested:
            yield block
        else:
            pool.add(block)
    pool.device.peak_reserved = max(pool.device.peak_reserved, pool.device.reserved)
