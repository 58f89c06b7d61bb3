"""The true largest batch under a limit, beginning at the predicted one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """How the search ended."""

    EXACT = "as predicted: that batch fits and the next one does not"
    FOUND = "another batch was found: it fits and the next one does not"
    BRACKET = "the trials were used up: the largest batch lies in the bracket"
    CAPPED = "the predicted batch fits; it is not memory that ends there"
    NOTHING = "not even batch 1 fits"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Largest:
    """What the search found.

    Attributes:
        verdict: how it ended.
        fits: the largest batch that was seen to fit; 0 if none was.
        fails: the smallest batch above it that was seen to fail; None if none was.
        trials: (batch, whether it fitted), in order.
    """

    verdict: Verdict
    fits: int
    fails: int | None
    trials: tuple[tuple[int, bool], ...]


class OutOfTrials(Exception):
    """No further trial may be made: of their number, or of time."""


def find_largest(
    fits: Callable[[int], bool], predicted: int, most_trials: int, capped: bool = False
) -> Largest:
    """Find a batch that fits and whose successor does not.

    Two trials confirm a right prediction. From a wrong one the steps outwards begin at half a per
    cent and double; then the gap is halved.

    Args:
        fits: tries a batch; may raise :class:`OutOfTrials`.
        predicted: where to begin; 0 where nothing is predicted to fit.
        most_trials: how often ``fits`` may be called.
        capped: the prediction is not limited by memory, so its successor is not tried.

    >>> find_largest(lambda b: b <= 100, 100, 9).trials
    ((100, True), (101, False))
    >>> find_largest(lambda b: b <= 100, 97, 9).fits
    100
    """
    search = _Search(fits, most_trials)
    try:
        if capped and search.tries(predicted):
            return search.result(Verdict.CAPPED)
        search.outwards(max(predicted, 1))
        search.inwards()
    except OutOfTrials:
        return search.result(Verdict.BRACKET)
    if not search.low and predicted:
        return search.result(Verdict.NOTHING)
    return search.result(Verdict.EXACT if search.low == predicted else Verdict.FOUND)


class _Search:
    def __init__(self, fits: Callable[[int], bool], most_trials: int) -> None:
        self._fits = fits
        self._left = most_trials
        self.low = 0
        self.high: int | None = None
        self.trials: list[tuple[int, bool]] = []

    def tries(self, batch: int) -> bool:
        if self._left <= 0:
            raise OutOfTrials
        self._left -= 1
        fitted = self._fits(batch)
        self.trials.append((batch, fitted))
        if fitted:
            self.low = max(self.low, batch)
        elif self.high is None or batch < self.high:
            self.high = batch
        return fitted

    def outwards(self, start: int) -> None:
        """Until one batch fits and a larger one fails."""
        stride = max(1, start // 200)
        batch = start
        if self.tries(batch):
            batch += 1  # first the successor alone: a right prediction ends here
            while self.tries(batch):
                batch += stride
                stride *= 2
        else:
            while batch > 1:
                batch = max(1, batch - stride)
                stride *= 2
                if self.tries(batch):
                    return

    def inwards(self) -> None:
        """Halve the gap."""
        while self.low and self.high is not None and self.high - self.low > 1:
            self.tries((self.low + self.high) // 2)

    def result(self, verdict: Verdict) -> Largest:
        return Largest(verdict, self.low, self.high, tuple(self.trials))
