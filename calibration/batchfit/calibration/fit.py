"""Correct a timeline by what probes measured, and say how far off the result may be.

measured(B) = timeline(B) + c0 + c1 B + d(B) + noise

c0 is what the timeline does not know and does not grow (a library's own memory); nothing is assumed
of it. c1 is what it does not know and grows with the batch. d(B) is what jumps: a kernel library
changes its algorithm, and with it a workspace, at some batch size. d is a random walk in log2(B).

How large c1 and the steps of d are is not known either. Their prior comes from public measurements
(prior.py), their posterior from the probes; all statements are averages over it. If the probes
agree with the timeline, there is little that it does not see, and the interval is narrow; with two
probes that disagree little is known of d, so it is wide. It narrows with each probe and widens with
the distance from the nearest one.

A run that ended out of memory says measured(B) > budget; it is used as the inequality it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import brentq, lsq_linear
from scipy.special import ndtr, ndtri

from .errors import CalibrationError
from .prior import BLIND, NOISE, WITH_TIMELINE, Floats, Prior
from .probe import Probe

__all__ = ["Fit"]

# Equally likely values that stand for a measurement which is only known to be above the budget.
_TRUNCATED = 12
# c0 is known to be within so many times the largest measurement.
_ANY = 10.0


class Fit:
    """The corrected curve of one quantity (bytes allocated, or reserved) over the batch size.

    Args:
        curve: the timeline's bytes at a batch size; None for a blind fit.
        probes: the runs; those out of memory count as an inequality.
        values: the measured bytes of each probe that ran, in order.
        predicted: the timeline's bytes for each of them; None takes the curve's (they differ where
            a run was short of memory).
        prior: None takes the one that fits.
        noise: relative standard deviation of a repeated measurement.
        gap: bytes beyond what is allocated that a batch size needs by the timeline, as the
            allocator cannot use them. Of a run out of memory it is not known how much of the gap
            was needed, so it counts as known to within the gap itself.

    Raises:
        CalibrationError: there is no probe that ran (or, without a timeline, are not two of
            different sizes).
    """

    def __init__(
        self,
        curve: Callable[[int], int] | None,
        probes: Sequence[Probe],
        values: Sequence[int],
        predicted: Sequence[int] | None = None,
        prior: Prior | None = None,
        noise: float = NOISE,
        gap: Callable[[int], int] = lambda batch: 0,
    ) -> None:
        ran = [probe for probe in probes if probe.ran]
        needed = 1 if curve is not None else 2
        if len({probe.batch for probe in ran}) < needed:
            raise CalibrationError(
                f"{len(ran)} of {len(probes)} probes ran; a fit needs {needed} of different sizes"
            )
        self.blind = curve is None
        self._curve = curve
        self._noise = noise
        self._gap = gap
        self._batches = np.array([p.batch for p in ran], dtype=float)
        self._values = np.array(values, dtype=float)
        if predicted is None:
            predicted = [curve(p.batch) if curve else 0 for p in ran]
        self._residuals = self._values - np.array(predicted, dtype=float)
        self._slope = self._typical_slope()
        self._grid = (prior or (BLIND if self.blind else WITH_TIMELINE)).grid()
        self._solve()
        failed = [probe for probe in probes if not probe.ran]
        self._failed = min(failed, key=lambda p: p.batch, default=None)
        if self._failed is not None:
            self._condition(self._failed)

    # -- what the probes say -----------------------------------------------------------------

    @property
    def c0(self) -> float:
        """Bytes beside the timeline that do not depend on the batch (the whole, if blind)."""
        return float(self._weights @ self._corrections[:, 0])

    @property
    def c1(self) -> float:
        """Bytes per sample beside the timeline (all of them, if blind)."""
        return float(self._weights @ self._corrections[:, 1])

    @property
    def jumping(self) -> float:
        """Expected change of d over a doubling of the batch, relative to the peak."""
        return float(self._weights @ self._grid.jumping)

    # -- what it says of a batch size --------------------------------------------------------

    def mean(self, batch: int) -> float:
        """The expected bytes at a batch size."""
        means, _, weights = self._predict(batch)
        return float(self._base(batch) + weights @ means)

    def quantile(self, batch: int, probability: float) -> float:
        """The bytes that are not exceeded with this probability."""
        means, deviations, weights = self._predict(batch)
        reach = float(ndtri(min(max(probability, 1e-9), 1 - 1e-9)))
        ends = means + reach * deviations
        low, high = float(ends.min()), float(ends.max())
        if high - low < 1.0:
            return self._base(batch) + high

        def excess(value: float) -> float:
            return float(weights @ ndtr((value - means) / deviations)) - probability

        return self._base(batch) + float(brentq(excess, low - 1.0, high + 1.0, xtol=1.0))

    def interval(self, batch: int, level: float = 0.95) -> tuple[int, int]:
        """The bytes between which a measurement lies with probability ``level``."""
        low, high = ((1 - level) / 2, (1 + level) / 2)
        return max(0, int(self.quantile(batch, low))), int(np.ceil(self.quantile(batch, high)))

    def exceeds(self, batch: int, size: float) -> float:
        """The probability that a measurement at a batch size is above ``size`` bytes."""
        means, deviations, weights = self._predict(batch)
        return float(weights @ ndtr((self._base(batch) + means - size) / deviations))

    # -- the curve ---------------------------------------------------------------------------

    def _base(self, batch: int) -> float:
        return float(self._curve(batch)) if self._curve is not None else 0.0

    def _typical_slope(self) -> float:
        """Bytes per sample by which the curve grows over the probes, the unit of c1."""
        low, high = int(self._batches.min()), int(self._batches.max())
        if self._curve is None:
            rise = self._values[self._batches.argmax()] - self._values[self._batches.argmin()]
            return max(float(rise) / (high - low), 0.0)
        if low == high:
            high = 2 * low
        return max((self._curve(high) - self._curve(low)) / (high - low), 0.0)

    def _size(self, batches: Floats) -> Floats:
        """The peak at batch sizes, which the random walk is relative to."""
        if self._curve is not None:
            return np.array([self._curve(int(b)) for b in batches], dtype=float)
        line = self._values.max() + self._slope * (batches - self._batches.max())
        size: Floats = np.maximum(line, self._values.min())
        return size

    def _walk(self, a: Floats, b: Floats) -> Floats:
        """Covariance of d at batch sizes, per squared step: zero at the smallest probe."""
        first = self._batches.min()
        u, v = np.log2(a / first)[:, None], np.log2(b / first)[None, :]
        shared = np.where(u * v > 0, np.minimum(np.abs(u), np.abs(v)), 0.0)
        walk: Floats = self._size(a)[:, None] * self._size(b)[None, :] * shared
        return walk

    # -- the fit: one for each pair of hyperparameters, all at once --------------------------

    def _solve(self) -> None:
        """Weighted, bounded least squares for (c0, c1), and the weight of each pair."""
        steps = self._grid.jumping[:, None, None] ** 2
        noise = np.diag((self._noise * self._values) ** 2)
        covariance = steps * self._walk(self._batches, self._batches) + noise
        design = np.stack([np.ones_like(self._batches), self._batches], axis=1)
        precision = self._precision()
        self._inverse = np.linalg.inv(covariance)
        weighted = design.T @ self._inverse
        self._spread = np.linalg.inv(weighted @ design + precision)
        least = (self._spread @ (weighted @ self._residuals)[..., None])[..., 0]
        self._corrections = least.copy()
        self._bound(covariance, design, precision)
        # Of covariance + design precision^-1 design', which is too ill-conditioned to be formed:
        # by the matrix determinant lemma and Woodbury's identity.
        rest = self._residuals - least @ design.T
        quadratic = np.einsum("ni,nij,nj->n", rest, self._inverse, rest)
        quadratic += np.einsum("ni,nij,nj->n", least, precision, least)
        volume = np.linalg.slogdet(covariance)[1] - np.linalg.slogdet(self._spread)[1]
        volume -= np.linalg.slogdet(precision)[1]
        likelihood = -0.5 * (volume + quadratic)
        logs = likelihood + self._grid.log_prior
        self._weights = np.exp(logs - logs.max())
        self._weights /= self._weights.sum()
        self._design = design

    def _precision(self) -> Floats:
        """Inverse prior covariance of (c0, c1); shape (pairs, 2, 2)."""
        scale = _ANY * self._values.max()
        precision = np.zeros((len(self._grid.jumping), 2, 2))
        precision[:, 0, 0] = scale**-2
        typical = np.minimum(
            self._grid.growing * max(self._slope, 1.0), scale / self._batches.min()
        )
        precision[:, 1, 1] = typical**-2
        return precision

    def _bound(self, covariance: Floats, design: Floats, precision: Floats) -> None:
        """Neither bytes nor their growth with the batch are negative."""
        low = np.array([0.0, 0.0])
        if self._curve is not None:
            low = np.array([-float(self._curve(1)), -self._slope])
        for pair in np.flatnonzero((self._corrections < low - 1e-6).any(axis=1)):
            root = np.linalg.cholesky(covariance[pair])
            rows = np.vstack([np.linalg.solve(root, design), np.sqrt(precision[pair])])
            right = np.concatenate([np.linalg.solve(root, self._residuals), np.zeros(2)])
            unit = np.abs(rows).max(axis=0)
            found = lsq_linear(rows / unit, right, (low * unit - 1e-9, np.inf))
            self._corrections[pair] = np.maximum(found.x / unit, low)

    def _gaussian(self, batches: Sequence[int]) -> tuple[Floats, Floats]:
        """Mean and covariance of what is added to the curve at batch sizes.

        Returns:
            shapes (pairs, batches) and (pairs, batches, batches).
        """
        at = np.array(batches, dtype=float)
        new = np.stack([np.ones_like(at), at], axis=1)
        steps = self._grid.jumping[:, None, None] ** 2
        cross, own = steps * self._walk(at, self._batches), steps * self._walk(at, at)
        gain = cross @ self._inverse
        left = new - gain @ self._design
        rest = self._residuals - self._corrections @ self._design.T
        means = self._corrections @ new.T + (gain @ rest[..., None])[..., 0]
        noise = np.diag((self._noise * self._size(at)) ** 2)
        turned = np.swapaxes(cross, 1, 2)
        covariance = own - gain @ turned + left @ self._spread @ np.swapaxes(left, 1, 2) + noise
        return means, covariance

    def _predict(self, batch: int) -> tuple[Any, Any, Any]:
        """A mixture of normal variables: means, deviations and weights."""
        if self._failed is None:
            means, covariances = self._gaussian([batch])
            return means[:, 0], np.sqrt(np.maximum(covariances[:, 0, 0], 1.0)), self._weights
        means, covariances = self._gaussian([batch, self._failed.batch])
        variance = np.maximum(covariances[:, 1, 1], 1.0) + self._gap(self._failed.batch) ** 2
        gain = (covariances[:, 0, 1] / variance)[:, None]
        above = self._truncated(means[:, 1], np.sqrt(variance), self._failed)
        moved = means[:, :1] + gain * (above - means[:, 1:])
        rest = np.maximum(covariances[:, 0, 0] - gain[:, 0] * covariances[:, 0, 1], 1.0)
        deviations = np.repeat(np.sqrt(rest), _TRUNCATED)
        return moved.ravel(), deviations, np.repeat(self._weights / _TRUNCATED, _TRUNCATED)

    def _truncated(self, means: Floats, deviations: Floats, failed: Probe) -> Floats:
        """Values of a normal variable above the budget, equally likely ones.

        Returns:
            shape (pairs, _TRUNCATED).
        """
        limit = self._room(failed)
        tail = ndtr((means - limit) / deviations)[:, None]
        ranks = (np.arange(_TRUNCATED) + 0.5) / _TRUNCATED
        values = means[:, None] - deviations[:, None] * ndtri(np.maximum(tail, 1e-300) * ranks)
        above: Floats = np.maximum(values, limit)
        return above

    def _condition(self, failed: Probe) -> None:
        """Weigh each pair by how likely it makes the run that failed."""
        means, covariances = self._gaussian([failed.batch])
        variance = np.maximum(covariances[:, 0, 0], 1.0) + self._gap(failed.batch) ** 2
        odds = ndtr((means[:, 0] - self._room(failed)) / np.sqrt(variance))
        self._weights = self._weights * np.maximum(odds, 1e-300)
        self._weights /= self._weights.sum()

    def _room(self, failed: Probe) -> float:
        """Bytes beside the timeline that would have fitted in a run out of memory."""
        return failed.budget - self._base(failed.batch) - self._gap(failed.batch)
