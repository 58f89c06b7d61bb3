"""The largest batch: a search over a test that says whether one batch fits."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from .errors import WorkloadError


class Outcome(str, Enum):
    """What an answer means; the value is the advice."""

    FITS = "the largest batch that fits"
    CAPPED = "fits at every batch you asked about; the answer is the cap"
    UNLIMITED = (
        "fits at any size you would use; the answer is the largest batch for which 32-bit index "
        "arithmetic stays valid in every tensor"
    )
    DOES_NOT_FIT = "does not fit even at the smallest batch"

    def __str__(self) -> str:
        return self.value


def check_batch(batch: int) -> int:
    """A batch size is a positive integer."""
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise WorkloadError(f"a batch size must be a positive integer, found {batch!r}")
    if batch >= 2**31:
        raise WorkloadError(f"a batch size must be below 2**31, found {batch}")
    return batch


def candidates(multiple_of: int, power_of_two: bool) -> Callable[[int], int]:
    """The n-th batch size (n >= 1) that a user would accept.

    >>> [candidates(8, False)(n) for n in (1, 2, 3)], [candidates(1, True)(n) for n in (1, 2, 3)]
    ([8, 16, 24], [1, 2, 4])
    """
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int) or multiple_of < 1:
        raise WorkloadError(f"multiple_of must be a positive integer, found {multiple_of!r}")
    if power_of_two and multiple_of & (multiple_of - 1):
        raise WorkloadError(
            f"no power of two is a multiple of {multiple_of}; drop one of the two conditions"
        )
    if power_of_two:
        return lambda n: multiple_of * 2 ** (n - 1)
    return lambda n: multiple_of * n


def following(candidate: Callable[[int], int], batch: int) -> int:
    """The candidate after a candidate."""
    return candidate(_number(candidate, batch) + 1)


def _number(candidate: Callable[[int], int], batch: int) -> int:
    low, high = 1, 2
    while candidate(high) <= batch:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if candidate(middle) <= batch else (low, middle)
    return low


def largest(fits: Callable[[int], bool], candidate: Callable[[int], int], cap: int) -> int:
    """A candidate up to ``cap`` that fits and whose successor does not; 0 if the first does not.

    >>> largest(lambda b: b <= 100, candidates(8, False), 10_000)
    96
    >>> largest(lambda b: False, candidates(1, False), 10)
    0
    """
    if candidate(1) > cap or not fits(candidate(1)):
        return 0
    low = high = 1
    while candidate(high) <= cap and fits(candidate(high)):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if candidate(middle) <= cap and fits(candidate(middle)):
            low = middle
        else:
            high = middle
    return candidate(low)


# How many candidates below an answer are tried one by one: all down to a tenth below it, at least
# 64 (so every one of a small answer) and at most 128. Fragmentation decides only near the limit:
# where a tenth of the budget is free, the allocator can release and retry.
_WINDOW = 0.9
_LEAST, _MOST = 64, 128


def largest_safe(
    fits: Callable[[int], bool], candidate: Callable[[int], int], cap: int
) -> tuple[int, int | None]:
    """The largest candidate that fits together with every candidate below it.

    Fragmentation makes ``fits`` not quite monotone. So each candidate in the last tenth below the
    answer (at least 64, at most 128) is tried too; where one fails, the answer lies below it.

    Returns:
        The answer (0 if none), and the smaller batch that fails, if there is one.

    >>> largest_safe(lambda b: b <= 100 and b != 97, candidates(1, False), 10_000)
    (96, 97)
    """
    best = largest(fits, candidate, cap)
    hole = None
    if best:
        number = _number(candidate, best)
        lowest = max(1, number - _MOST, min(int(number * _WINDOW), number - _LEAST))
        for n in range(number - 1, lowest - 1, -1):
            if not fits(candidate(n)):
                hole = candidate(n)
                best = candidate(n - 1) if n > 1 else 0
    return best, hole
