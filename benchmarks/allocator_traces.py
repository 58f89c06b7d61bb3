"""Replay recorded allocator traces through the twin (format: tests/data/oracle/README.md).

`exact` gives the twin every segment's real address and the moments at which memory was given back;
it must then predict every address, every new segment, every release, the end table and the peaks.
`blind` gives it the moments of release only: the twin invents the addresses.
"""

from __future__ import annotations

import gzip
import json
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allocator_start import MIN_BLOCK, UNSEEN, start_state

from batchfit.estimator.allocator import AllocatorOutOfMemory, AllocatorSettings, CachingAllocator

RELEASES = ("segment_free", "segment_unmap")
GROWTHS = ("segment_alloc", "segment_map")
MOST_STEPS = 300


class Miss(Exception):
    """The twin did something else than the GPU's allocator.

    `opens` is what would explain it on a trace with a rebuilt start: so many bytes at an address
    that no event touches were free.
    """

    opens: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one replay predicted. Bytes; `miss` is the first difference, "" if there is none."""

    allocations: int
    peak_allocated: int
    peak_reserved: int
    end_reserved: int
    miss: str = ""
    opens: tuple[int, int] | None = None


def read(path: Path) -> dict[str, Any]:
    """Read one trace."""
    with gzip.open(path, "rt") as file:
        return prepare(json.load(file))


def prepare(trace: dict[str, Any]) -> dict[str, Any]:
    """Add the parsed settings and the state at the start to a trace."""
    trace["settings"] = settings_of(trace)
    trace["opened"] = {}
    trace["start"] = start_state(trace)
    if trace["initial_segments"] is None:
        _open_up(trace)
    return trace


def _open_up(trace: dict[str, Any]) -> None:
    """Find free bytes of a rebuilt start that no event touches.

    Where the GPU passed over a free block for a larger one, the block was in truth at least that
    large. Each step takes the least that explains one such choice, so the result is never above
    the truth, and it is reached in finitely many steps.
    """
    start = trace["start"]
    for _ in range(MOST_STEPS):
        outcome = exact(trace)
        if outcome.opens is None:
            return
        address, size = outcome.opens
        trace["opened"][address] = size
        trace["start"] = start_state(trace, trace["opened"])
    trace["opened"], trace["start"] = {}, start  # it explains nothing


def settings_of(trace: dict[str, Any]) -> AllocatorSettings:
    """Return the recorded settings of the allocator."""
    recorded = trace["allocator_settings"] or {}
    divisions = recorded.get("roundup_power2_divisions") or {}
    limit = recorded.get("max_split_size", -1)
    return AllocatorSettings(
        expandable_segments=bool(trace["expandable_segments"]),
        max_split_size=None if limit < 0 else limit,
        garbage_collection_threshold=recorded.get("garbage_collection_threshold", 0.0),
        roundup_power2_divisions=tuple(divisions[key] for key in sorted(divisions, key=int)),
    )


def exact(trace: dict[str, Any], twin_class: type[CachingAllocator] = CachingAllocator) -> Outcome:
    """Replay with the real addresses and check everything the trace says."""
    run = _Exact(trace, twin_class)
    try:
        run.all()
        run.check_end()
    except Miss as miss:
        return replace(run.outcome(str(miss)), opens=miss.opens)
    return run.outcome()


def blind(trace: dict[str, Any], twin_class: type[CachingAllocator] = CachingAllocator) -> Outcome:
    """Replay with invented addresses; the caller compares the peaks."""
    run = _Run(trace, twin_class(trace["settings"]))
    try:
        run.all()
    except Miss as miss:
        return run.outcome(str(miss))
    return run.outcome()


class _Run:
    """One pass over a trace's events."""

    def __init__(self, trace: dict[str, Any], twin: CachingAllocator) -> None:
        self.trace = trace
        self.events: list[tuple[str, int, int, int]] = trace["events"]
        self.twin = twin
        self.live = twin.load(trace["start"].segments)
        # Blocks of the start that are never touched: reserved or allocated, but where is unknown.
        twin.allocated += trace["start"].extra_allocated
        twin.device.reserved += trace["start"].extra_reserved
        twin.peak_allocated, twin.device.peak_reserved = twin.allocated, twin.reserved
        self.dying: dict[int, Any] = {}
        self.index = 0
        self.allocations = 0

    def all(self) -> None:
        """Replay every event."""
        events, count = self.events, len(self.events)
        while self.index < count:
            action, address, size, stream = events[self.index]
            self.index += 1
            if action == "alloc":
                self.allocations += 1
                self.live[address] = self.allocate(address, size, stream)
            elif action == "free_requested":
                # From here on the bytes do not count as allocated; free_completed (later, if
                # another stream used the block) makes them available.
                self.dying[address] = block = self.known(address)
                self.twin.allocated -= block.size
            elif action == "free_completed":
                block = self.dying.pop(address, None)
                if block is None:
                    block = self.known(address)
                else:
                    self.twin.allocated += block.size
                self.twin.free(block)
            elif action in RELEASES:
                self.release(action)
            elif action in GROWTHS:
                self.announce(address, size)
            elif action == "oom":
                self.run_out(size, stream)

    def known(self, address: int) -> Any:
        """Return the block that dies."""
        if address not in self.live:
            raise self.miss("no block was handed out there")
        return self.live.pop(address)

    def miss(self, text: str) -> Miss:
        return Miss(f"event {self.index - 1} {self.events[self.index - 1]}: {text}")

    def outcome(self, miss: str = "") -> Outcome:
        twin = self.twin
        return Outcome(
            self.allocations, twin.peak_allocated, twin.peak_reserved, twin.reserved, miss
        )

    def allocate(self, address: int, size: int, stream: int) -> Any:
        return self.twin.malloc(size, stream)

    def announce(self, address: int, size: int) -> None:
        """A segment that the trace says comes now."""

    def run_out(self, size: int, stream: int) -> None:
        """The GPU had no memory for this request."""

    def release(self, action: str) -> list[tuple[int, int]]:
        """Give memory back where the trace does; return what the trace gave back."""
        group = [self.events[self.index - 1][1:3]]
        while self.index < len(self.events) and self.events[self.index][0] == action:
            group.append(self.events[self.index][1:3])
            self.index += 1
        self.twin.empty_cache()
        return [(address, size) for address, size in group]


class _Exact(_Run):
    """A pass that compares every step."""

    def __init__(self, trace: dict[str, Any], twin_class: type[CachingAllocator]) -> None:
        self.announced: deque[tuple[int, int]] = deque()
        self.released: list[tuple[int, int]] = []
        self.grown = self.given_back = 0
        twin = twin_class(trace["settings"], new_address=self.answer, observer=self.watch)
        super().__init__(trace, twin)
        self.segments = {s.address: s.size for s in trace["start"].segments}

    def answer(self, size: int) -> int:
        if not self.announced:
            raise self.miss(f"the twin takes a new segment of {size}")
        return self.announced[0][0]

    def watch(self, action: str, address: int, size: int, stream: int) -> None:
        if action in RELEASES:
            self.released.append((address, size))
        elif not self.announced or self.announced[0] != (address, size):
            expected = self.announced[0] if self.announced else "nothing"
            raise self.miss(f"the twin takes {(address, size)}, the GPU {expected}")
        else:
            self.announced.popleft()

    def announce(self, address: int, size: int) -> None:
        self.announced.append((address, size))
        self.segments[address] = size
        self.grown += 1

    def allocate(self, address: int, size: int, stream: int) -> Any:
        block = self.twin.malloc(size, stream)
        if block.address != address:
            miss = self.miss(f"the twin answers {block.address}")
            miss.opens = self.explanation(block, address)
            raise miss
        if self.announced:
            raise self.miss("the twin needs no new segment")
        if self.released:
            raise self.miss("the twin gives memory back")
        return block

    def explanation(self, block: Any, address: int) -> tuple[int, int] | None:
        """Return bytes around the twin's block that were free if the GPU passed over it."""
        last = block.next if block.next is not None and block.next.free else block
        end, before, behind = last.address + last.size, block.previous, last.next
        for chosen in block.pool:
            if chosen.address <= address < chosen.address + chosen.size:
                missing = chosen.size - (end - block.address)
                missing += MIN_BLOCK if block.address < chosen.address else 0
                if missing > 0 and behind is not None and behind.storage == UNSEEN:
                    return end, min(missing, behind.size)
                if missing > 0 and before is not None and before.storage == UNSEEN:
                    missing = min(missing, before.size)
                    return block.address - missing, missing
        return None

    def release(self, action: str) -> list[tuple[int, int]]:
        group = super().release(action)
        self.given_back += len(group)
        predicted, self.released = self.released, []
        if self.index == len(self.events):  # the recording may have stopped in the middle
            predicted = predicted[: len(group)]
        if sorted(predicted) != sorted(group):
            raise self.miss(f"the twin gives back {len(predicted)} segments, not {len(group)}")
        for address, _ in group:
            self.segments.pop(address, None)
        return group

    def run_out(self, size: int, stream: int) -> None:
        self.twin.device.budget = self.twin.reserved
        try:
            self.twin.malloc(size, stream)
        except AllocatorOutOfMemory:
            return
        finally:
            self.twin.device.budget = None
        raise self.miss("the twin finds memory")

    def check_end(self) -> None:
        """Compare the end table, the counts and the peaks."""
        table = self.twin.segments()
        handed_out = {b.address: b.requested for s in table for b in s.blocks if b.allocated}
        alive = {address: block.requested for address, block in self.live.items()}
        alive |= {address: block.requested for address, block in self.dying.items()}
        if handed_out != alive:
            raise Miss("end: other blocks are handed out")
        left = {s.address: s.size for s in table}
        if not self.trace["expandable_segments"] and left != self.segments:
            raise Miss("end: other segments are left")
        real = self.trace["real"]
        for name, value in (
            ("allocations", self.allocations),
            ("new_segments", self.grown),
            ("segments_released", self.given_back),
            ("end_reserved", self.twin.reserved),
            ("peak_reserved", self.twin.peak_reserved),
            ("peak_allocated", self.twin.peak_allocated),
        ):
            if value != real[name]:
                raise Miss(f"end: {name} {value}, real {real[name]}")
