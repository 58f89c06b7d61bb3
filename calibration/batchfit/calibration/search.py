"""Search by trying, as other tools do: the baseline, and the fallback where nothing can be fitted.

Each takes ``runs(batch) -> bool``, which tries one batch size for real, and tells how many runs and
how many out-of-memory errors the search cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchfit.estimator.solve import check_batch

__all__ = ["Search", "bisection", "doubling", "halving"]

Runs = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Search:
    """What a search found.

    Attributes:
        largest: the largest batch that ran; 0: none did.
        runs: how many were tried.
        failures: how many of these ran out of memory.
    """

    largest: int
    runs: int
    failures: int


class _Counted:
    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._known: dict[int, bool] = {}

    def __call__(self, batch: int) -> bool:
        if batch not in self._known:
            self._known[batch] = self._runs(batch)
        return self._known[batch]

    def result(self, largest: int) -> Search:
        return Search(largest, len(self._known), sum(not ran for ran in self._known.values()))


def halving(runs: Runs, start: int) -> Search:
    """Halve until it runs, as accelerate's ``find_executable_batch_size`` does.

    >>> halving(lambda b: b <= 100, 256)
    Search(largest=64, runs=3, failures=2)
    """
    tried = _Counted(runs)
    batch = check_batch(start)
    while batch and not tried(batch):
        batch //= 2
    return tried.result(batch)


def doubling(runs: Runs, cap: int, start: int = 1) -> Search:
    """Double until it fails, then bisect, as Lightning's ``BatchSizeFinder`` ("binsearch") does.

    >>> doubling(lambda b: b <= 100, 4096)
    Search(largest=100, runs=14, failures=5)
    """
    tried = _Counted(runs)
    low, high = 0, check_batch(start)
    while high <= cap and tried(high):
        low, high = high, 2 * high
    return tried.result(_between(tried, low, min(high, cap + 1)))


def bisection(runs: Runs, low: int, high: int) -> Search:
    """Bisect between a batch that is taken to run (or 0) and one that is taken to fail.

    >>> bisection(lambda b: b <= 100, 0, 256)
    Search(largest=100, runs=8, failures=5)
    """
    tried = _Counted(runs)
    return tried.result(_between(tried, low, check_batch(high)))


def _between(tried: _Counted, low: int, high: int) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tried(middle) else (low, middle)
    return low
