"""What a real snapshot says about time: the blocks that lived at the peak, and how large it was.

A snapshot holds the table of segments at its end and the events before it (the last ones, if the
ring buffer was short). Going back from the end through the events gives the state at the start;
going forward from there gives allocated and reserved bytes after each event.

An event tells the requested size, the block may be larger. How much follows from the allocator's
rules (c10/cuda/CUDACachingAllocator.cpp, should_split) and the address of the next block: in a
classic segment of the large pool a rest of up to 1 MiB is never split off, everywhere else the
block is the rounded size. On the real traces in tests/data/oracle this gives both peaks exactly.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .allocator import AllocatorSettings, CachingAllocator
from .errors import WorkloadError
from .snapshot_file import SnapshotError, check_snapshot
from .units import MIB

_LARGE_REST = 1 * MIB  # kSmallSize: a rest of the large pool is split off if it is larger


_MOST_FRAMES = 64  # of a block; one stack can be shared by millions of entries


def _frames(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The stack of an entry; a recording without stacks, or with odd ones, has none."""
    frames = entry.get("frames")
    if not isinstance(frames, (list, tuple)):
        return []
    return [frame for frame in frames if isinstance(frame, dict)]


@dataclass(slots=True)
class LiveBlock:
    """A block that was handed out. All sizes in bytes.

    Attributes:
        address, requested: as recorded.
        size: of the block; 0 where it is not known yet.
        entry: the event or block it was read from: that of the allocation, or, if only that was
            recorded, of the release.
    """

    address: int
    requested: int
    size: int
    entry: dict[str, Any] = field(repr=False)

    @property
    def frames(self) -> tuple[str, ...]:
        """Where it was allocated, as "file:line:function", innermost first."""
        frames = _frames(self.entry)[:_MOST_FRAMES]
        return tuple(
            f"{f.get('filename', '?')}:{f.get('line', '?')}:{f.get('name', '?')}" for f in frames
        )

    @property
    def category(self) -> str:
        """What a snapshot that this library predicted says; "" for a real one."""
        frames = _frames(self.entry)
        return str(frames[0].get("category", "")) if frames else ""


@dataclass(frozen=True, slots=True)
class RealPeak:
    """The peak of a snapshot. All sizes in bytes.

    Attributes:
        allocated: as max_memory_allocated since the record began.
        reserved: as max_memory_reserved since then; it may be reached at another moment.
        live: the blocks alive when ``allocated`` was reached: first those older than the record, by
            address, then the others in the order of their allocation.
        older: how many of ``live`` are older than the record.
        events: recorded events.
        device: whose trace it is.
    """

    allocated: int
    reserved: int
    live: tuple[LiveBlock, ...]
    older: int
    events: int
    device: int


def real_peak(snapshot: dict[str, Any]) -> RealPeak:
    """Find the peak of a snapshot: of its device with the most events.

    Raises:
        SnapshotError: it is not a snapshot, or contradicts itself.
    """
    check_snapshot(snapshot)
    traces = snapshot["device_traces"]
    device = max(range(len(traces)), key=lambda d: len(traces[d]), default=0)
    events = traces[device] if traces else []
    try:
        memory = _Memory(_settings(snapshot), snapshot["segments"], device)
        memory.rewind(events)
        return memory.replay(events, device)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise SnapshotError(
            f"the snapshot is not complete ({type(error).__name__}: {error})"
        ) from error


def _settings(snapshot: dict[str, Any]) -> AllocatorSettings:
    found = snapshot.get("allocator_settings") or {}
    divisions = found.get("roundup_power2_divisions") or {}
    limit = found.get("max_split_size")
    try:
        return AllocatorSettings(
            max_split_size=limit if isinstance(limit, int) and 0 < limit < 2**62 else None,
            roundup_power2_divisions=tuple(divisions[k] for k in sorted(divisions, key=int)),
        )
    except WorkloadError:
        return AllocatorSettings()  # of a version with other limits; they seldom matter


def _check(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise SnapshotError(f"the snapshot is damaged: {value!r} where a size or address should be")
    return value


class _Memory:
    """Segments and blocks of one device, by address."""

    def __init__(self, settings: AllocatorSettings, segments: list[Any], device: int) -> None:
        self._rules = CachingAllocator(settings)
        self._max_split = settings.max_split_size
        self._mapped = 0  # bytes of expandable segments
        self._segments: dict[int, int] = {}  # classic ones: address -> bytes
        self._live: dict[int, LiveBlock] = {}
        self._pending: set[int] = set()  # free_requested, not yet completed
        seen: set[int] = set()
        for segment in segments:
            if segment.get("device", device) != device:
                continue
            address, size = _check(segment["address"]), _check(segment["total_size"])
            if address in seen:
                raise SnapshotError("the snapshot is damaged: two segments at one address")
            seen.add(address)
            if segment.get("is_expandable"):
                self._mapped += size
            else:
                self._segments[address] = size
            for block in segment["blocks"]:
                if block["state"].startswith("active"):
                    found = self._read(block, block.get("address", address), block["size"])
                    found.requested = _check(block.get("requested_size", block["size"]))
                    self._live[found.address] = found
                    if block["state"] != "active_allocated":
                        self._pending.add(found.address)
                address += _check(block["size"])

    @staticmethod
    def _read(entry: dict[str, Any], address: Any, size: int) -> LiveBlock:
        requested = _check(entry["size"])
        return LiveBlock(_check(address), requested, _check(size), entry)

    def rewind(self, events: list[Any]) -> None:
        """Go back to the state before the first event."""
        for event in reversed(events):
            action, address = event["action"], event.get("addr", 0)
            if action == "alloc":
                self._live.pop(address, None)
                self._pending.discard(address)
            elif action == "free_completed":
                self._live[address] = self._read(event, address, 0)
                self._pending.add(address)
            elif action == "free_requested":
                if address not in self._live:
                    self._live[address] = self._read(event, address, 0)
                self._pending.discard(address)
            elif action == "segment_alloc":
                self._segments.pop(address, None)
            elif action == "segment_free":
                self._segments[address] = _check(event["size"])
            elif action == "segment_map":
                self._mapped -= _check(event["size"])
            elif action == "segment_unmap":
                self._mapped += _check(event["size"])

    def replay(self, events: list[Any], device: int) -> RealPeak:
        """Go forward and find the peaks."""
        heads, addresses = sorted(self._segments), sorted(self._live)
        for address in addresses:
            block = self._live[address]
            block.size = block.size or self._size(block, heads, addresses)
        born = [self._live[address] for address in addresses]
        number = {block.address: index for index, block in enumerate(born)}
        story: list[int] = list(range(len(born)))  # index: born, ~index: dead
        held = {index for index, block in enumerate(born) if block.address not in self._pending}
        allocated = sum(born[index].size for index in held)
        reserved = self._mapped + sum(self._segments.values())
        older, peak, peak_at, peak_reserved = len(born), allocated, len(story), reserved
        story += [~index for index in range(older) if index not in held]
        if len(story) > older:
            peak_at = len(story)
        for event in events:
            action, address = event["action"], event.get("addr", 0)
            if action == "alloc":
                block = self._read(event, address, 0)
                insort(addresses, address)
                block.size = self._size(block, heads, addresses)
                number[address] = len(born)
                held.add(len(born))
                story.append(len(born))
                born.append(block)
                allocated += block.size
                if allocated > peak:
                    peak, peak_at = allocated, len(story)
            elif action in ("free_requested", "free_completed") and address in number:
                index = number[address]
                if index in held:
                    held.remove(index)
                    allocated -= born[index].size
                    story.append(~index)
                if action == "free_completed":
                    del number[address]
                    del addresses[bisect_left(addresses, address)]
            elif action == "segment_alloc":
                insort(heads, address)
                self._segments[address] = _check(event["size"])
                reserved += event["size"]
            elif action == "segment_free" and address in self._segments:
                heads.remove(address)
                reserved -= self._segments.pop(address)
            elif action in ("segment_map", "segment_unmap"):
                reserved += _check(event["size"]) * (1 if action == "segment_map" else -1)
            peak_reserved = max(peak_reserved, reserved)
        live = tuple(_alive(story[:peak_at]))
        return RealPeak(
            allocated=peak, reserved=peak_reserved, live=tuple(born[i] for i in live),
            older=sum(i < older for i in live), events=len(events), device=device,
        )  # fmt: skip

    def _size(self, block: LiveBlock, heads: list[int], addresses: list[int]) -> int:
        """Bytes of a block, from its requested size and what lies behind it."""
        size = self._rules.round(max(block.requested, 1))
        place = bisect_right(heads, block.address) - 1
        end = heads[place] + self._segments[heads[place]] if place >= 0 else 0
        if block.address >= end or size <= _LARGE_REST:
            return size  # expandable, or of the small pool: always split
        following = bisect_right(addresses, block.address)
        if following < len(addresses):
            end = min(end, addresses[following])
        rest = end - block.address - size
        whole = rest <= _LARGE_REST or (self._max_split is not None and size >= self._max_split)
        return size + max(rest, 0) if whole else size


def _alive(story: list[int]) -> Iterator[int]:
    """Those that are born and not dead at the end, in order of birth."""
    alive: dict[int, None] = {}
    for event in story:
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(~event, None)
    yield from alive
