"""The state of the allocator before a recorded trace begins.

Classic traces come with it. Expandable ones do not, and it is rebuilt from the events: bytes whose
first event is an alloc were free, bytes whose first event is a free were handed out, bytes that a
segment_map brings were not there. What no event touches is taken as handed out, unless `opened`
says otherwise (allocator_traces.py finds out: the GPU passed over a block, so it was larger). How
many such bytes there are follows from the recorded peaks, so on a trace that does not begin empty,
peak allocated is no independent check; every address still is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchfit.estimator.allocator import BlockInfo, CachingAllocator, SegmentInfo

PAGE_SMALL = 2 << 20
SMALL_LIMIT = 1 << 20
MIN_BLOCK = 512
UNTOUCHED, FREE, TAKEN, MAPPED = range(4)
UNSEEN = 0  # the "storage" of blocks that no event touches

PoolKey = tuple[int, bool]  # stream, small


@dataclass(frozen=True, slots=True)
class Start:
    """Segments at the start, and bytes that were there without a known address."""

    segments: tuple[SegmentInfo, ...]
    extra_allocated: int = 0
    extra_reserved: int = 0


def start_state(trace: dict[str, Any], opened: dict[int, int] | None = None) -> Start:
    """Return the state before the first event; the trace's `settings` are already parsed.

    `opened` are stretches, address and bytes, that no event touches and that were free.
    """
    if trace["initial_segments"] is not None:
        return Start(tuple(_classic(segment) for segment in trace["initial_segments"]))
    return _Rebuild(trace, opened or {}).start()


def _classic(segment: dict[str, Any]) -> SegmentInfo:
    address, blocks = segment["address"], []
    for size, requested in segment["blocks"]:
        blocks.append(BlockInfo(address, size, requested or 0, requested is not None))
        address += size
    small = segment["pool"] == "small"
    return SegmentInfo(segment["address"], segment["stream"], small, False, tuple(blocks))


class _Rebuild:
    """The start of an expandable trace, from first touches."""

    def __init__(self, trace: dict[str, Any], opened: dict[int, int]) -> None:
        self.trace = trace
        self.opened = opened
        self.events = trace["events"]
        self.page = trace["settings"].large_segment_size
        self.round = CachingAllocator(trace["settings"]).round
        self.pools: dict[PoolKey, dict[int, tuple[int, int, int]]] = defaultdict(dict)
        self.aligned: dict[PoolKey, int] = {}  # an address at which a page begins

    def start(self) -> Start:
        self.touch()
        for key in [key for key, pool in self.pools.items() if not _present(pool)]:
            del self.pools[key]
        if not self.pools:
            return Start(())
        allocated, reserved, unseen_free = self.totals()
        segments: list[SegmentInfo] = []
        # Small ranges end on a multiple of 2 MiB; what is left over ends the large one.
        for key in sorted(self.pools, key=lambda key: not key[1]):
            stretches, open_end = self.stretches(key)
            if open_end:
                last = stretches[-1][-1]
                end = last.address + last.size
                size = min(-end % PAGE_SMALL, unseen_free) if key[1] else unseen_free
                unseen_free -= size
                _add(stretches[-1], BlockInfo(end, size, 0, False))
            segments += [
                SegmentInfo(blocks[0].address, key[0], key[1], True, tuple(blocks))
                for blocks in stretches
            ]
        return Start(
            tuple(segments),
            allocated - sum(segment.allocated for segment in segments),
            reserved - sum(segment.size for segment in segments),
        )

    def touch(self) -> None:
        """Find what every touched byte was at the start, per pool."""
        codes = {
            "alloc": FREE,
            "segment_unmap": FREE,
            "free_requested": TAKEN,
            "free_completed": TAKEN,
            "segment_map": MAPPED,
            "opened": FREE,
        }
        spans = [
            (action, address, self.round(size) if action[0] in "af" else size, stream)
            for action, address, size, stream in self.events
            if action in codes
        ]
        spans += [("opened", address, size, 0) for address, size in self.opened.items()]
        points = sorted({p for _, address, size, _ in spans for p in (address, address + size)})
        place = {point: index for index, point in enumerate(points)}
        state = np.zeros(len(points), dtype=np.int8)
        pool_of: dict[int, PoolKey] = {}  # of the first and last bytes of every block
        for action, address, size, stream in spans:
            first, last = place[address], place[address + size]
            key = (stream, size <= SMALL_LIMIT)
            fresh = np.flatnonzero(state[first:last] == UNTOUCHED) + first
            state[fresh] = codes[action]
            if action[0] in "af":
                pool_of[address] = pool_of[address + size - MIN_BLOCK] = key
            if codes[action] == TAKEN and len(fresh):
                # one block, however many later events divide it
                self.pools[key][address] = (TAKEN, size, size)
        known = sorted(pool_of.items())
        for action, address, size, _ in spans:
            if action[0] == "s":
                self.aligned[self._nearest(known, address)] = address
            if action == "segment_unmap":
                # Pages went out of a free block; less than a page of it was left on either side.
                for gap in (place[address] - 1, place[address + size]):
                    around = state[max(gap - 1, 0) : gap + 2].tolist()
                    length = points[gap + 1] - points[gap] if gap + 1 < len(points) else self.page
                    if around == [FREE, UNTOUCHED, FREE] and length < self.page:
                        state[gap] = FREE
        for index in np.flatnonzero((state == FREE) | (state == MAPPED)).tolist():
            address, size = points[index], points[index + 1] - points[index]
            self.pools[self._nearest(known, address)][address] = (int(state[index]), size, 0)

    @staticmethod
    def _nearest(known: list[tuple[int, PoolKey]], address: int) -> PoolKey:
        """Return the pool of the nearest address whose pool an alloc or a free tells."""
        place = bisect_left(known, (address, (0, False)))
        return min(known[max(place - 1, 0) : place + 1], key=lambda one: abs(one[0] - address))[1]

    def totals(self) -> tuple[int, int, int]:
        """Return the bytes allocated and reserved at the start, and the free ones never touched."""
        real, current, peak, reserved = self.trace["real"], 0, 0, self.trace["real"]["end_reserved"]
        for action, _, size, _ in self.events:
            if action == "alloc":
                current += self.round(size)
                peak = max(peak, current)
            elif action == "free_requested":
                current -= self.round(size)
            elif action == "segment_map":
                reserved -= size
            elif action == "segment_unmap":
                reserved += size
        allocated = real["peak_allocated"] - peak
        touched = sum(
            size for pool in self.pools.values() for code, size, _ in pool.values() if code == FREE
        )
        return allocated, reserved, max(reserved - allocated - touched, 0)

    def stretches(self, key: PoolKey) -> tuple[list[list[BlockInfo]], bool]:
        """Return a pool's mapped stretches without gaps, and whether the end of the last is unseen.

        Untouched bytes were handed out. A stretch ends where a segment_map later begins.
        """
        page = PAGE_SMALL if key[1] else self.page
        stretches: list[list[BlockInfo]] = []
        blocks: list[BlockInfo] | None = None  # of the stretch that is being filled
        end = 0
        for address, (code, size, requested) in sorted(self.pools[key].items()):
            if blocks is None and code != MAPPED:
                # Pages begin where the real ones do, as far as the trace tells.
                end = address - (address - self.aligned.get(key, address)) % page
                blocks = []
                stretches.append(blocks)
            if blocks is not None:
                _add(blocks, BlockInfo(end, address - end, address - end, True, UNSEEN))
                if code == MAPPED:
                    blocks = None
                else:
                    _add(blocks, BlockInfo(address, size, requested, code == TAKEN))
                    end = address + size
        return stretches, blocks is not None


def _present(pool: dict[int, tuple[int, int, int]]) -> bool:
    return any(code != MAPPED for code, _, _ in pool.values())


def _add(blocks: list[BlockInfo], block: BlockInfo) -> None:
    """Append a block that is not empty; a free one joins a free one before it."""
    if not block.size:
        return
    if blocks and not block.allocated and not blocks[-1].allocated:
        last = blocks.pop()
        block = BlockInfo(last.address, last.size + block.size, 0, False)
    blocks.append(block)
