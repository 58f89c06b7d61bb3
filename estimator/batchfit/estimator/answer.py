"""The answer to "how large can the batch be", and what the number means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .budget import Budget
from .errors import WorkloadError
from .solve import Outcome, candidates, check_batch, following, largest, largest_safe
from .tracing import Category
from .units import format_bytes

if TYPE_CHECKING:
    from .estimate import Estimate

#: Batch sizes of the two traces. 1 is avoided: code treats it specially (squeeze, batch norm).
TRACED_BATCHES = (2, 3)


def traced_batches(unit: int) -> tuple[int, int]:
    """Two batch sizes to trace, for code that takes only multiples of ``unit``.

    >>> traced_batches(1), traced_batches(8)
    ((2, 3), (8, 16))
    """
    return TRACED_BATCHES if unit == 1 else (unit, 2 * unit)


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer to "how large can the batch be".

    Attributes:
        batch: the largest batch; 0 where none fits.
        outcome: what the number means.
        budget: what was available.
        peak: allocated bytes at ``batch``, or at the smallest batch where that does not fit.
        reserved: reserved bytes there, had the allocator no limit.
        short_by: bytes missing at the smallest batch; 0 where something fits.
        largest_category: what takes the most at the peak.
        with_workspaces: the largest batch at which cuDNN gets every workspace it would like;
            between it and ``batch`` convolutions run with smaller ones, and perhaps slower.
        confirmed: a trace at the answer itself agrees with the timeline.
    """

    batch: int
    outcome: Outcome
    budget: Budget
    peak: int
    reserved: int
    short_by: int
    largest_category: Category
    with_workspaces: int
    confirmed: bool

    def __str__(self) -> str:
        if self.outcome is Outcome.DOES_NOT_FIT:
            return (
                f"{self.outcome}: {format_bytes(self.budget.bytes + self.short_by)} needed, "
                f"{format_bytes(self.short_by)} more than the budget of {self.budget}; "
                f"{self.largest_category} take the most"
            )
        return f"{self.batch}: {self.outcome} ({format_bytes(self.peak)} of {self.budget})"


def solve_batch(
    estimate: Estimate, room: Budget, power_of_two: bool, multiple_of: int, cap: int | None
) -> BatchAnswer:
    """Find the largest batch in a budget; see :meth:`Estimate.answer` for the conditions."""
    candidate = candidates(multiple_of, power_of_two)
    limit = estimate.index_limit()
    top = limit if cap is None else check_batch(cap)
    if candidate(1) > top:
        raise WorkloadError(
            f"no batch size up to {top} is {'a power of two and ' if power_of_two else ''}a "
            f"multiple of {multiple_of}"
        )

    def solve() -> tuple[int, int | None]:
        return largest_safe(lambda b: estimate.fits(b, room), candidate, top)

    batch, hole = solve()
    # No trace at an absurd batch size: making its inputs might take real memory.
    unlimited = cap is None and batch > 0 and following(candidate, batch) > limit
    if batch and not unlimited and not estimate.confirm(batch):
        batch, hole = solve()
    if batch > limit:
        estimate.add_note(
            f"above batch {limit} a tensor has more than 2**31 - 1 elements; some kernels refuse it"
        )
    if hole is not None:
        estimate.add_note(
            f"batch {hole} would run out although larger ones fit (fragmentation); the answer "
            "stays below it"
        )
    outcome = Outcome.FITS
    if not batch:
        outcome = Outcome.DOES_NOT_FIT
    elif hole is None and following(candidate, batch) > top:
        outcome = Outcome.UNLIMITED if unlimited else Outcome.CAPPED
    at = batch or candidate(1)
    peak = estimate.peak(at)
    comfortable = batch
    if batch and estimate.timeline_at(batch).optional and not unlimited:
        run = estimate.within(batch, room)
        peak = run.peak_allocated
        if run.skipped:
            comfortable = largest(
                lambda b: estimate.fits_with_workspaces(b, room), candidate, batch
            )
    parts = estimate.breakdown(at)
    sure = bool(batch) and not unlimited
    return BatchAnswer(
        batch=batch, outcome=outcome, budget=room, peak=peak, reserved=estimate.reserved(at),
        short_by=0 if batch else max(estimate.needed(at) - room.bytes, 0),
        largest_category=max(parts, key=lambda c: parts[c]), with_workspaces=comfortable,
        confirmed=sure,
    )  # fmt: skip


def why_not_affine(found: list[tuple[str, str, int, int]] | None, batch: int) -> str:
    """Say why one line through two traces does not hold at a third batch size."""
    if found is None:
        return (
            f"the step takes another path at batch {batch} than at smaller ones; each batch size "
            "was traced by itself"
        )
    operator, module, predicted, actual = max(found, key=lambda d: abs(d[3] - d[2]))
    where = f" in {module}" if module else ""
    return (
        f"{len(found)} storages do not grow in proportion to the batch (largest: {operator}"
        f"{where}, {format_bytes(actual)} at batch {batch} instead of {format_bytes(predicted)}); "
        "each batch size was traced by itself"
    )
