"""What is known, before any probe, of the memory that a timeline does not see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["BLIND", "EXACT", "NOISE", "WITH_TIMELINE", "Grid", "Prior"]

Floats = npt.NDArray[np.float64]

#: Relative standard deviation of a repeated measurement: three quarters of the 107 repeated runs of
#: scaling_h100.yaml (milabench) agree within 0.024 % (half of them within 0.005 %).
NOISE = 2.4e-4

#: The same on the host, where nothing is cached or rounded: runs of small jobs differ by tens of
#: bytes in peaks of some megabytes (counters and flags that one run makes and the next one finds).
EXACT = 2e-5

_SIZES = 25
_LARGEST, _SMALLEST = 2.0, 1e-6


@dataclass(frozen=True, slots=True)
class Grid:
    """Pairs of hyperparameters that statements are averaged over, shape (pairs,) each.

    Attributes:
        growing: standard deviation of c1, relative to the bytes per sample; inf: anything.
        jumping: standard deviation of d over a doubling of the batch, relative to the peak.
        log_prior: logarithm of each pair's weight.
    """

    growing: Floats
    jumping: Floats
    log_prior: Floats


@dataclass(frozen=True, slots=True)
class Prior:
    """The logarithm of the size of what is unknown is normal; its jumpy share is one of a few.

    Attributes:
        median: of that size, relative to the peak.
        log_sd: standard deviation of its logarithm.
        shares: what part of it changes over a doubling of the batch other than in proportion;
            each equally likely. None: the size itself is that of the changes.
    """

    median: float
    log_sd: float
    shares: tuple[float, ...] | None = None

    def grid(self) -> Grid:
        """Points for the averages."""
        low = max(self.median * np.exp(-2.5 * self.log_sd), _SMALLEST)
        high = min(self.median * np.exp(2.5 * self.log_sd), _LARGEST)
        sizes = np.geomspace(low, high, _SIZES)
        logs = -0.5 * ((np.log(sizes) - np.log(self.median)) / self.log_sd) ** 2
        if self.shares is None:
            return Grid(np.full(_SIZES, np.inf), sizes, logs)
        shares = np.array(self.shares)
        pairs = np.repeat(sizes, len(shares))
        return Grid(pairs, pairs * np.tile(shares, _SIZES), np.repeat(logs, len(shares)))


#: Without a timeline. Lines through two sizes of the jobs of scaling_h100.yaml (every other job of
#: those whose memory grows, in alphabetical order, each counting the same) miss the larger sizes by
#: 0.0111 (median) and 0.194 (nine of ten) in units of what a random walk of step 1 makes of the
#: same sizes; that is this prior. The other jobs are for checking: benchmarks/calibration_scaling.
BLIND = Prior(0.0198, 2.03)

#: With a timeline. Size: of 29 public training steps (docs/accuracy.md) half are predicted within
#: 0.03 %, nine of ten within 6.8 %, which a median of 0.056 % and log_sd 4.1 give; most jobs are
#: exact, a few are far off. Shares: from 1/64, which is what BLIND says of memory as a whole, to 1,
#: a workspace that comes or goes with a library's choice of algorithm.
WITH_TIMELINE = Prior(5.6e-4, 4.1, (1 / 64, 1 / 23, 1 / 8, 1 / 2.8, 1.0))
