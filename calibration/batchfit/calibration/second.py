"""A second variable beside the batch: the longest sequence, the largest resolution, and the table.

The job is given as a function of that variable, which makes the workload for one value of it. What
is found for one value is not extrapolated to others: attention grows with the square of the length,
convolutions with the area, and the timeline of each value knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchfit.estimator import Workload, WorkloadError
from batchfit.estimator.solve import check_batch, largest

from .calibrate import calibrate
from .calibration import Calibration

__all__ = ["BatchTable", "Longest", "batch_table", "longest"]

Make = Callable[[int], Workload]

# While values are looked at, a batch counts as fitting if that is likelier than not; the answer is
# run at the risk that was asked for.
_EVEN = 0.49


@dataclass(frozen=True, slots=True)
class Longest:
    """The largest value of a second variable at a given batch.

    Attributes:
        value: the answer; 0 where not even the smallest candidate fits.
        batch: the batch size asked about.
        calibration: that at ``value`` (at the smallest candidate, where nothing fits).
    """

    value: int
    batch: int
    calibration: Calibration


@dataclass(frozen=True, slots=True)
class BatchTable:
    """The largest batch for each value of a second variable.

    Attributes:
        rows: (value, largest batch); a batch of 0 where nothing fits.
        calibrations: of each value.
    """

    rows: tuple[tuple[int, int], ...]
    calibrations: tuple[Calibration, ...]

    def __str__(self) -> str:
        return "\n".join(f"{value}: {batch or 'none'}" for value, batch in self.rows)


def batch_table(make: Make, values: Sequence[int], **options: Any) -> BatchTable:
    """The largest batch at each of some sequence lengths or resolutions.

    Args:
        make: the workload for a value.
        values: of the second variable.
        **options: as of :func:`.calibrate`.

    Raises:
        WorkloadError: no values.
    """
    if not values:
        raise WorkloadError("the table needs at least one value, for example [128, 256, 512]")
    made = tuple(calibrate(make(check_batch(value)), **options) for value in values)
    rows = tuple((v, c.largest_batch()) for v, c in zip(values, made, strict=True))
    return BatchTable(rows, made)


def longest(make: Make, batch: int, *, step: int = 1, cap: int = 2**16, **options: Any) -> Longest:
    """The longest sequence, or the largest resolution, with which a batch fits.

    Each value that is looked at is calibrated with one probe far below the batch; only the answer
    is run at the batch itself, and stepped back from where it fails. So it takes as many short
    probes as a bisection has steps, and hardly a run out of memory.

    Args:
        make: the workload for a value of the second variable.
        batch: the batch size.
        step: only multiples of this are answered (a patch size, a multiple of 64).
        cap: never answer more.
        **options: as of :func:`.calibrate`.

    Raises:
        WorkloadError: a batch, a step or a cap that is none.
    """
    check_batch(batch)
    check_batch(step)
    if cap < step:
        raise WorkloadError(f"no value up to the cap of {cap} is a multiple of {step}")
    quick = {"probes": 1, **options, "verify": False, "cap": batch, "risk": _EVEN}
    found: dict[int, Calibration] = {}

    def fits(value: int) -> bool:
        found[value] = calibrate(make(value), **quick)
        return found[value].largest_batch() >= batch

    value = largest(fits, lambda n: step * n, cap)
    while value:
        final = calibrate(make(value), **{**options, "verify": True, "cap": batch})
        if final.largest_batch() >= batch:
            return Longest(value, batch, final)
        value -= step
    return Longest(0, batch, found[min(found)])
