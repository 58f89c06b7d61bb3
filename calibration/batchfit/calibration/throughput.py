"""Speed from the same probes: the smallest batch that runs efficiently, and the time of an epoch.

A step takes seconds(B) = a + b B: starting kernels and reading weights take a, the arithmetic of
each sample takes b. So the throughput B / seconds(B) rises towards 1/b, and from some batch size on
a larger one is hardly faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import lsq_linear

from batchfit.estimator import WorkloadError

from .errors import CalibrationError
from .probe import Probe

__all__ = ["Efficient", "Speed"]

#: Relative error of a timed step that more repeats would not show: clocks and other processes.
#: Repeated runs of scaling_h100.yaml differ by 0.6 % in throughput (median over 107 pairs).
_CLOCK = 0.006


@dataclass(frozen=True, slots=True)
class Efficient:
    """The smallest batch that keeps a share of the best measured throughput.

    Attributes:
        batch: that batch.
        low, high: what it could as well be, by the noise of the timings (one standard deviation).
        share: the share asked for.
        throughput: samples per second expected there.
        best: samples per second of the fastest probe.
        best_batch: of that probe.
    """

    batch: int
    low: int
    high: int
    share: float
    throughput: float
    best: float
    best_batch: int

    def __str__(self) -> str:
        span = f" ({self.low} to {self.high})" if self.low < self.high else ""
        return (
            f"{self.batch}{span}: the smallest batch with {100 * self.share:.0f} % of the best "
            f"measured throughput, {self.best:.4g} samples/s at {self.best_batch}"
        )


class Speed:
    """Seconds of a step over the batch size.

    Args:
        probes: at least two of different sizes that ran.

    Raises:
        CalibrationError: there are not two.
    """

    def __init__(self, probes: Sequence[Probe]) -> None:
        self._probes = [p for p in probes if p.ran and p.seconds > 0]
        if len({p.batch for p in self._probes}) < 2:
            raise CalibrationError("speed needs two probes of different batch sizes that ran")
        batches = np.array([p.batch for p in self._probes], dtype=float)
        seconds = np.array([p.seconds for p in self._probes])
        # The quartiles of n values tell the error of their median: 1.57 / 1.35 x their distance
        # / sqrt(n) (McGill, Tukey, Larsen 1978), of which spread is half.
        medians = np.array([2 * 1.16 * p.spread / math.sqrt(max(p.steps, 1)) for p in self._probes])
        errors = np.hypot(medians, _CLOCK * seconds)
        design = np.stack([np.ones_like(batches), batches], axis=1) / errors[:, None]
        unit = np.abs(design).max(axis=0)
        found = lsq_linear(design / unit, seconds / errors, (0.0, np.inf)).x / unit
        self.fixed, self.per_sample = float(found[0]), float(found[1])
        self._covariance = np.linalg.inv(design.T @ design)

    def seconds(self, batch: int) -> float:
        """Seconds of one step."""
        return self.fixed + self.per_sample * batch

    def throughput(self, batch: int) -> float:
        """Samples per second."""
        return batch / self.seconds(batch)

    def epoch(self, batch: int, dataset: int) -> float:
        """Seconds of a pass over so many samples."""
        return math.ceil(dataset / batch) * self.seconds(batch)

    def efficient(self, share: float = 0.95, largest: int | None = None) -> Efficient:
        """The smallest batch that keeps ``share`` of the best measured throughput.

        Args:
            share: above 0, at most 1.
            largest: never answer more than this.

        Raises:
            WorkloadError: a share that is none.
        """
        if not 0 < share <= 1:
            raise WorkloadError(f"a share of the throughput is above 0 and at most 1: {share!r}")
        best = max(self._probes, key=lambda p: p.batch / p.seconds)
        wanted = share * best.batch / best.seconds
        top = largest or best.batch
        deviation = math.sqrt(self._covariance[0, 0])
        sizes = [
            self._smallest(wanted, max(self.fixed + shift * deviation, 0.0), top)
            for shift in (-1, 0, 1)
        ]
        return Efficient(
            sizes[1], sizes[0], sizes[2], share, self.throughput(sizes[1]),
            best.batch / best.seconds, best.batch,
        )  # fmt: skip

    def _smallest(self, wanted: float, fixed: float, top: int) -> int:
        """Solve B / (fixed + per_sample B) = wanted for B."""
        rest = 1 - wanted * self.per_sample
        if rest <= 0:
            return top
        return min(max(1, math.ceil(wanted * fixed / rest)), top)

    def within_epoch(self, limit: float, dataset: int, largest: int) -> int:
        """The largest batch up to ``largest`` whose epoch takes at most ``limit`` seconds; or 0.

        Raises:
            WorkloadError: a limit that is no time.
        """
        if not limit > 0:
            raise WorkloadError(f"the time of an epoch must be above 0 seconds, found {limit!r}")
        batches = np.arange(1, min(largest, dataset) + 1)
        times = np.ceil(dataset / batches) * (self.fixed + self.per_sample * batches)
        found = batches[times <= limit]
        return int(found[-1]) if len(found) else 0
