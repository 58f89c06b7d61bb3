"""A real memory snapshot beside the prediction: where they part, by category and block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from .snapshot import birth_steps, describe
from .snapshot_replay import LiveBlock, real_peak

if TYPE_CHECKING:
    from .estimate import Estimate

__all__ = ["BlockPair", "CategoryRow", "Match", "SnapshotComparison", "compare"]


class Match(str, Enum):
    """How a block of one side relates to the other side."""

    IN_ORDER = "in order"
    MOVED = "another place in the order"
    ONLY_REAL = "only real"
    ONLY_PREDICTED = "only predicted"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class BlockPair:
    """One block that lives at the peak, on one or both sides.

    Attributes:
        match: how it was found.
        requested: bytes asked for, the same on both sides.
        real_size, predicted_size: bytes of the blocks; 0 where there is none.
        category: as predicted; of a block that is only real "" (a real snapshot knows none).
        real_frames, predicted_frames: "file:line:function", innermost first; predicted ones
            are "module:step:operator" and "phase:step:category".
    """

    match: Match
    requested: int
    real_size: int
    predicted_size: int
    category: str
    real_frames: tuple[str, ...]
    predicted_frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """One category at the peak. Bytes.

    Attributes:
        category: as predicted; "" gathers what is only real and of unknown category.
        predicted: of the predicted peak; the column adds up to it.
        real: of the real blocks that were matched with this category, or that say so themselves;
            the column adds up to the real peak.
    """

    category: str
    predicted: int
    real: int

    @property
    def difference(self) -> int:
        """Predicted minus real."""
        return self.predicted - self.real


@dataclass(frozen=True, slots=True)
class SnapshotComparison:
    """A real snapshot and the prediction. All sizes in bytes.

    Attributes:
        batch: the predicted batch size.
        real_allocated, real_reserved: the peaks in the record.
        predicted_allocated, predicted_reserved: `Estimate.peak` and `Estimate.reserved`.
        real_blocks, predicted_blocks: how many blocks live at either peak.
        older: how many of the real ones are older than the record: their order is not known.
        matched: bytes of the real blocks that have a predicted one of the same requested size.
        categories: the difference by category, largest first.
        blocks: the alignment, in the order of allocation.
    """

    batch: int
    real_allocated: int
    real_reserved: int
    predicted_allocated: int
    predicted_reserved: int
    real_blocks: int
    predicted_blocks: int
    older: int
    matched: int
    categories: tuple[CategoryRow, ...]
    blocks: tuple[BlockPair, ...]

    @property
    def matched_share(self) -> float:
        """The share of the bytes alive at the real peak that the prediction has, too; 0 to 1."""
        return self.matched / self.real_allocated if self.real_allocated else 1.0

    @property
    def error(self) -> float:
        """Predicted peak over real peak, minus 1."""
        return self.predicted_allocated / self.real_allocated - 1 if self.real_allocated else 0.0

    def only(self, match: Match) -> tuple[BlockPair, ...]:
        """The blocks of one kind, largest first."""
        found = [pair for pair in self.blocks if pair.match is match]
        return tuple(sorted(found, key=lambda pair: -max(pair.real_size, pair.predicted_size)))


def compare(estimate: Estimate, batch: int, snapshot: dict[str, Any]) -> SnapshotComparison:
    """Lay a real snapshot beside the prediction, each at its own peak.

    Blocks are aligned by requested size: first the longest common subsequence in the order of
    allocation, then what is left in any order.

    Args:
        estimate: of the workload.
        batch: the batch size of the real run.
        snapshot: from :func:`load_snapshot`.

    Raises:
        SnapshotError: it is not a snapshot, or contradicts itself.
        WorkloadError: not a batch size.
    """
    real = real_peak(snapshot)
    predicted = _predicted_live(estimate, batch)
    blocks = _align(real.live, predicted)
    return SnapshotComparison(
        batch=batch,
        real_allocated=real.allocated,
        real_reserved=real.reserved,
        predicted_allocated=estimate.peak(batch),
        predicted_reserved=estimate.reserved(batch),
        real_blocks=len(real.live),
        predicted_blocks=len(predicted),
        older=real.older,
        matched=sum(p.real_size for p in blocks if p.match in (Match.IN_ORDER, Match.MOVED)),
        categories=_rows(blocks),
        blocks=tuple(blocks),
    )


def _predicted_live(estimate: Estimate, batch: int) -> list[LiveBlock]:
    """The predicted blocks at the peak, in the order of their birth."""
    run = estimate.replay(batch)
    timeline = estimate.timeline_at(batch)
    sizes = timeline.sizes(batch).tolist()
    steps = birth_steps(timeline)
    return [
        LiveBlock(
            address=0,
            requested=sizes[i],
            size=run.block_sizes[i],
            entry={"frames": describe(timeline, i, steps.get(i, 0))},
        )
        for i in timeline.alive_at(run.peak_allocated_event)
        if run.block_sizes[i]
    ]


def _rows(blocks: Sequence[BlockPair]) -> tuple[CategoryRow, ...]:
    predicted: Counter[str] = Counter()
    real: Counter[str] = Counter()
    for pair in blocks:
        if pair.predicted_size:
            predicted[pair.category] += pair.predicted_size
        if pair.real_size:
            real[pair.category] += pair.real_size
    rows = [CategoryRow(c, predicted[c], real[c]) for c in {**predicted, **real}]
    return tuple(sorted(rows, key=lambda r: (-abs(r.difference), -r.predicted, r.category)))


def _align(real: Sequence[LiveBlock], predicted: Sequence[LiveBlock]) -> list[BlockPair]:
    """Every block of both sides, once, in the real order with the predicted ones in between."""
    pairs = common_subsequence([b.requested for b in real], [b.requested for b in predicted])
    partner = dict(pairs)
    taken = {j for _, j in pairs}
    left: dict[int, list[int]] = {}
    for j in reversed(range(len(predicted))):
        if j not in taken:
            left.setdefault(predicted[j].requested, []).append(j)
    moved: dict[int, int] = {}
    for i, block in enumerate(real):
        if i not in partner and left.get(block.requested):
            moved[i] = left[block.requested].pop()
    only = sorted(j for js in left.values() for j in js)
    result: list[BlockPair] = []
    for i, block in enumerate(real):
        if i in partner:
            while only and only[0] < partner[i]:
                result.append(_pair(Match.ONLY_PREDICTED, None, predicted[only.pop(0)]))
            result.append(_pair(Match.IN_ORDER, block, predicted[partner[i]]))
        elif i in moved:
            result.append(_pair(Match.MOVED, block, predicted[moved[i]]))
        else:
            result.append(_pair(Match.ONLY_REAL, block, None))
    return result + [_pair(Match.ONLY_PREDICTED, None, predicted[j]) for j in only]


def _pair(match: Match, real: LiveBlock | None, predicted: LiveBlock | None) -> BlockPair:
    known = predicted or real
    assert known is not None
    return BlockPair(
        match=match,
        requested=known.requested,
        real_size=real.size if real else 0,
        predicted_size=predicted.size if predicted else 0,
        category=known.category,
        real_frames=real.frames if real else (),
        predicted_frames=predicted.frames if predicted else (),
    )


def common_subsequence(one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int]]:
    """The longest common subsequence, as pairs of positions.

    Bit-parallel (Hyyrö 2004, "Bit-parallel LCS-length computation revisited"): one big integer per
    element of ``one`` with a bit per element of ``other``; 10,000 by 10,000 take a second.

    >>> common_subsequence([1, 2, 3, 4], [1, 3, 9, 4])
    [(0, 0), (2, 1), (3, 3)]
    """
    where: dict[int, int] = {}
    for j, value in enumerate(other):
        where[value] = where.get(value, 0) | (1 << j)
    full = (1 << len(other)) - 1
    row, rows = full, []
    for value in one:
        matches = row & where.get(value, 0)
        row = ((row + matches) | (row - matches)) & full
        rows.append(row)
    pairs: list[tuple[int, int]] = []
    i, j = len(one), len(other)
    while i and j:
        if rows[i - 1] >> (j - 1) & 1:
            j -= 1
        else:
            i -= 1
            if not i or rows[i - 1] >> (j - 1) & 1:
                j -= 1
                pairs.append((i, j))
    return pairs[::-1]
