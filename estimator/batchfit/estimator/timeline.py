"""One timeline for every batch size: each storage's bytes are fixed + per_sample x batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .tracing import Category, Phase, Trace
from .tracing.workspaces import SizeRule

Ints = npt.NDArray[np.int64]

# c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize: every block is a multiple of 512 bytes.
BLOCK = 512

# (storages, formula, fixed part and slope of each number that it is asked with)
Rules = tuple[tuple[list[int], SizeRule, tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """An instant of the timeline: the event at ``position`` and what was going on."""

    position: int
    bytes: int
    phase: Phase
    step: int
    operator: str
    module: str


@dataclass(frozen=True)
class Timeline:
    """Births and deaths of storages, with sizes that depend on the batch.

    Attributes:
        events: i >= 0 is the birth of storage i, ~i its death.
        fixed: bytes of each storage that do not depend on the batch.
        per_sample: bytes of each storage per unit of batch.
        operators, modules, phases, categories: what is known of each storage.
        marks: (position, phase, step) at which each phase begins.
        rules: storages whose size a formula gives, as (storages, rule, fixed and per-sample part of
            the numbers that it is asked with); equal layers share an entry.
        optional: storages that cuDNN does without where memory is short.
    """

    events: Ints
    fixed: Ints
    per_sample: Ints
    operators: list[str]
    modules: list[str]
    phases: list[Phase]
    categories: list[Category]
    marks: list[tuple[int, Phase, int]]
    rules: Rules = ()
    optional: frozenset[int] = frozenset()

    def sizes(self, batch: int) -> Ints:
        """Requested bytes of every storage at this batch size."""
        sizes = self.fixed + self.per_sample * batch
        for storages, rule, fixed, slopes in self.rules:
            sizes[storages] = rule([a + b * batch for a, b in zip(fixed, slopes, strict=True)])
        return sizes

    def least(self, batch: int) -> Ints:
        """:meth:`sizes` without what is optional."""
        sizes = self.sizes(batch)
        sizes[list(self.optional)] = 0
        return sizes

    def grows(self) -> bool:
        """Whether any size depends on the batch."""
        return bool(self.per_sample.any()) or any(any(slopes) for _, _, _, slopes in self.rules)

    def suspect(self) -> bool:
        """Whether a storage would have a negative size at batch 0: then it is hardly on a line.

        A size that grows as the square of the batch is found so (f(2) = 4a, f(3) = 9a).
        """
        return bool((self.fixed < 0).any())

    def deltas(self, blocks: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        """The change in bytes at each event, and the storage it is about.

        Args:
            blocks: bytes that each storage takes.
        """
        births = self.events >= 0
        index = np.where(births, self.events, ~self.events)
        taken = np.asarray(blocks, dtype=np.int64)[index] if len(index) else index
        return np.where(births, taken, -taken), index

    def live_blocks(self, blocks: Sequence[int] | Ints) -> Ints:
        """Bytes alive after each event."""
        return np.cumsum(self.deltas(blocks)[0])

    def live(self, batch: int) -> Ints:
        """Bytes alive after each event, rounded up to 512 and nothing more; nothing optional."""
        return self.live_blocks(-(-self.least(batch) // BLOCK) * BLOCK)

    def peak(self, batch: int) -> int:
        """The largest value of :meth:`live`: a lower bound of what the allocator hands out."""
        return int(self.live(batch).max(initial=0))

    def moment(self, position: int, live: int) -> Moment:
        """What happens at an event."""
        event = int(self.events[position]) if len(self.events) else 0
        index = event if event >= 0 else ~event
        phase, step = self.phase_at(position)
        operator = self.operators[index] if self.operators else ""
        module = self.modules[index] if self.modules else ""
        return Moment(position, live, phase, step, operator, module)

    def phase_at(self, position: int) -> tuple[Phase, int]:
        """The phase and step that an event belongs to."""
        found = (Phase.INIT, 0)
        for start, phase, step in self.marks:
            if start > position:
                break
            found = (phase, step)
        return found

    def alive_at(self, position: int) -> list[int]:
        """Storages that are alive after the event at ``position``, in order of birth."""
        alive: dict[int, None] = {}
        for event in self.events[: position + 1].tolist():
            if event >= 0:
                alive[event] = None
            else:
                alive.pop(~event, None)
        return list(alive)

    def phase_peaks(self, live: Ints) -> dict[Phase, int]:
        """The largest of the bytes alive within each phase, over all steps.

        What is alive when a phase begins counts for it: one that allocates nothing has that.
        """
        peaks: dict[Phase, int] = {}
        bounds = [*self.marks, (len(live), Phase.INIT, 0)]
        for (start, phase, _), (end, _, _) in pairwise(bounds):
            if end == start and not start:
                continue
            before = int(live[start - 1]) if start else 0
            highest = int(live[start:end].max(initial=before))
            peaks[phase] = max(peaks.get(phase, 0), highest)
        return peaks


def same_order(one: Trace, other: Trace) -> bool:
    """Whether two traces tell the same story: same operators, births and deaths in one order."""
    a, b = one.log, other.log
    return (
        a.operators == b.operators
        and a.phases == b.phases
        and _canonical(a.events) == _canonical(b.events)
        and a.optional == b.optional
    )


def _canonical(events: Sequence[int]) -> list[int]:
    """Deaths between two births in a fixed order: it decides nothing, and may vary."""
    result: list[int] = []
    deaths: list[int] = []
    for event in events:
        if event < 0:
            deaths.append(event)
            continue
        if deaths:
            result += sorted(deaths)
            deaths = []
        result.append(event)
    return result + sorted(deaths)


def from_trace(trace: Trace) -> Timeline:
    """The timeline of one batch size: sizes as traced, nothing per sample."""
    sizes = np.asarray(trace.log.sizes, dtype=np.int64)
    return _timeline(trace, sizes, np.zeros_like(sizes))


def merge(one: Trace, other: Trace) -> Timeline | None:
    """Lay a line through the two sizes of every storage.

    Returns None where the traces differ in more than sizes, or a slope is not a whole number of
    bytes: then there is no single timeline, and each batch size must be traced.
    """
    span = other.batch - one.batch
    if span == 0 or not same_order(one, other):
        return None
    first = np.asarray(one.log.sizes, dtype=np.int64)
    difference = np.asarray(other.log.sizes, dtype=np.int64) - first
    by_rule = list(one.log.rules)
    difference[by_rule] = 0
    if np.any(difference % span):
        return None
    rules = _merge_rules(one, other)
    if rules is None:
        return None
    slope = difference // span
    fixed = first - slope * one.batch
    fixed[by_rule] = slope[by_rule] = 0
    return _timeline(one, fixed, slope, rules)


def _merge_rules(one: Trace, other: Trace) -> Rules | None:
    """The numbers of each rule as lines in the batch; None where the rules differ."""
    span = other.batch - one.batch
    merged: dict[tuple[SizeRule, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    if one.log.rules.keys() != other.log.rules.keys():
        return None
    for index, (rule, numbers) in one.log.rules.items():
        other_rule, other_numbers = other.log.rules[index]
        if rule != other_rule or any(
            (b - a) % span for a, b in zip(numbers, other_numbers, strict=True)
        ):
            return None
        slopes = tuple((b - a) // span for a, b in zip(numbers, other_numbers, strict=True))
        fixed = tuple(a - s * one.batch for a, s in zip(numbers, slopes, strict=True))
        merged.setdefault((rule, fixed, slopes), []).append(index)
    return tuple((storages, *key) for key, storages in merged.items())


def deviations(timeline: Timeline, third: Trace) -> list[tuple[str, str, int, int]] | None:
    """Storages of a third trace that are off the line; None where the order of events differs."""
    log = third.log
    if log.operators != timeline.operators or _canonical(log.events) != timeline.events.tolist():
        return None
    predicted = timeline.sizes(third.batch)
    actual = np.asarray(log.sizes, dtype=np.int64)
    return [
        (timeline.operators[i], timeline.modules[i], int(predicted[i]), int(actual[i]))
        for i in np.flatnonzero(predicted != actual).tolist()
    ]


def _timeline(trace: Trace, fixed: Ints, per_sample: Ints, rules: Rules = ()) -> Timeline:
    log = trace.log
    events = _canonical(log.events)
    return Timeline(
        events=np.asarray(events, dtype=np.int64),
        fixed=fixed,
        per_sample=per_sample,
        operators=log.operators,
        modules=[trace.paths[i] for i in log.modules],
        phases=log.phases,
        categories=_categories(trace, events),
        marks=log.marks,
        rules=rules,
        optional=frozenset(log.optional),
    )


def _categories(trace: Trace, events: list[int]) -> list[Category]:
    """Fill in what the run could not know: activations outlive the forward pass that made them."""
    log = trace.log
    ends = _forward_ends(log.marks)
    death = {~event: position for position, event in enumerate(events) if event < 0}
    birth = {event: position for position, event in enumerate(events) if event >= 0}
    result = []
    for i, category in enumerate(log.categories):
        if category is None:
            if log.phases[i] is Phase.INIT:
                category = Category.INPUTS
            elif log.phases[i] is Phase.FORWARD and _outlives(birth[i], death.get(i), ends):
                category = Category.ACTIVATIONS
            else:
                category = Category.TEMPORARIES
        result.append(category)
    return result


def _forward_ends(marks: list[tuple[int, Phase, int]]) -> list[int]:
    """Positions at which a backward pass begins; without any, at which a forward part ends."""
    backward = [start for start, phase, _ in marks if phase is Phase.BACKWARD]
    return backward or [start for start, _, step in marks if step > 1]


def _outlives(birth: int, death: int | None, ends: list[int]) -> bool:
    following = next((end for end in ends if end >= birth), None)
    return following is not None and (death is None or death >= following)
