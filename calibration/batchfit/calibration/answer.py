"""The answer to "how large can the batch be" on the device in front of us."""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchfit.estimator import Outcome, WorkloadError
from batchfit.estimator.solve import candidates, check_batch
from batchfit.estimator.units import format_bytes

from .budget import DeviceBudget

__all__ = ["Answer", "Conditions", "Plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Which answers a user would take.

    Attributes:
        power_of_two: only powers of two (times ``multiple_of``).
        multiple_of: only multiples of this.
        cap: never more than this.
        dataset: samples per epoch; a batch is never larger.
        risk: probability of running out of memory that is accepted.

    Raises:
        WorkloadError: no batch size meets them.
    """

    power_of_two: bool = False
    multiple_of: int = 1
    cap: int | None = None
    dataset: int | None = None
    risk: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.risk < 0.5:
            raise WorkloadError(
                f"risk is the accepted probability of running out of memory, above 0 and below "
                f"0.5; found {self.risk!r}"
            )
        for what, value in (("cap", self.cap), ("dataset", self.dataset)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise WorkloadError(f"{what} must be a positive number of samples, found {value!r}")
        if self.top is not None and self.smallest > self.top:
            kind = "a power of two and " if self.power_of_two else ""
            raise WorkloadError(
                f"no batch size up to {self.top} is {kind}a multiple of {self.multiple_of}"
            )

    @property
    def top(self) -> int | None:
        """The largest batch that would be taken; None: any."""
        return min((v for v in (self.cap, self.dataset) if v is not None), default=None)

    @property
    def smallest(self) -> int:
        """The smallest batch that would be taken."""
        return self.candidate(1)

    def candidate(self, number: int) -> int:
        """The n-th batch size that would be taken."""
        return candidates(self.multiple_of, self.power_of_two)(number)

    def down(self, size: float) -> int:
        """The largest acceptable batch size up to ``size``; 0 if there is none.

        >>> Conditions(multiple_of=8).down(30), Conditions(power_of_two=True).down(30)
        (24, 16)
        """
        units = int(size) // self.multiple_of
        if units < 1:
            return 0
        return self.multiple_of * (1 << (units.bit_length() - 1) if self.power_of_two else units)


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch that is too large for the device, put together of smaller ones.

    Attributes:
        micro_batch: samples that go through the device at once.
        accumulate: micro-batches per optimizer step.
        ranks: devices that work side by side.
        notes: what the reader should know.
    """

    micro_batch: int
    accumulate: int
    ranks: int
    notes: tuple[str, ...] = ()

    @property
    def effective(self) -> int:
        """Samples per optimizer step."""
        return self.micro_batch * self.accumulate * self.ranks

    def __str__(self) -> str:
        ranks = f" x {self.ranks} ranks" if self.ranks > 1 else ""
        return (
            f"{self.micro_batch} x {self.accumulate} micro-batches{ranks} = {self.effective} "
            "samples per step"
        )


def plan_batch(
    largest: int,
    target: int,
    conditions: Conditions,
    *,
    ranks: int = 1,
    tuned_for: int | None = None,
) -> Plan:
    """Reach a target effective batch with micro-batches that fit.

    The micro-batch is the largest that fits and divides the target, so that the effective batch is
    what was asked for. Where only less than half of what fits divides it, the nearest multiple
    above is taken instead, and said.

    Args:
        largest: the largest batch that fits on one device.
        target: samples per optimizer step that are wanted.
        conditions: which micro-batches are acceptable.
        ranks: devices that work side by side.
        tuned_for: the effective batch that the learning rate was chosen for; None: the target.

    Raises:
        WorkloadError: nothing fits, or the target is not a multiple of the ranks.

    >>> print(plan_batch(48, 256, Conditions()))
    32 x 8 micro-batches = 256 samples per step
    """
    check_batch(target)
    if largest < 1:
        raise WorkloadError("no batch fits, so no micro-batch does")
    if target % ranks:
        raise WorkloadError(f"a batch of {target} cannot be shared by {ranks} ranks equally")
    share = target // ranks
    top = min(largest, share)
    usable = [d for d in range(1, top + 1) if share % d == 0 and conditions.down(d) == d]
    notes = []
    if usable and 2 * usable[-1] > conditions.down(top):
        micro, count = usable[-1], share // usable[-1]
    else:
        most = conditions.down(top)
        if not most:
            raise WorkloadError(f"no acceptable micro-batch is as small as {top}")
        count = math.ceil(share / most)
        micro = conditions.down(math.ceil(share / count)) or most
        count = math.ceil(share / micro)
        if micro * count != share:
            notes.append(
                f"no micro-batch between {most // 2 + 1} and {most} divides {share}; "
                f"{micro * count * ranks} samples per step instead of {target}"
            )
    plan = Plan(micro, count, ranks)
    notes += _learning_rate(plan.effective, tuned_for or target)
    return Plan(micro, count, ranks, tuple(notes))


def _learning_rate(effective: int, tuned_for: int) -> list[str]:
    """What two customs would do to the learning rate. Nothing is changed here."""
    if effective == tuned_for:
        return []
    ratio = effective / tuned_for
    return [
        f"the effective batch is {ratio:.3g} times the {tuned_for} that the learning rate is for: "
        f"linear scaling (SGD, Goyal et al. 2017) would multiply it by {ratio:.3g}, square-root "
        f"scaling (Adam, Krizhevsky 2014, Malladi et al. 2022) by {math.sqrt(ratio):.3g}; it was "
        "not changed"
    ]


@dataclass(frozen=True, slots=True)
class Answer:
    """The largest batch for a stated risk.

    Attributes:
        batch: the answer; 0 where nothing fits.
        outcome: what it means.
        budget: what the job may take.
        peak: bytes expected there (at the smallest batch, where nothing fits).
        low, high: bytes between which the peak lies with probability 0.95.
        risk: probability of running out of memory at ``batch``.
        verified: this batch, or a larger one, was run.
        notes: what the reader should know.
    """

    batch: int
    outcome: Outcome
    budget: DeviceBudget
    peak: int
    low: int
    high: int
    risk: float
    verified: bool
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.batch:
            return (
                f"{self.outcome}: about {format_bytes(self.peak)} needed, the budget is "
                f"{self.budget}"
            )
        state = "it ran" if self.verified else f"risk {100 * self.risk:.2g} %, not run"
        return (
            f"{self.batch}: {self.outcome} ({format_bytes(self.peak)} of "
            f"{format_bytes(self.budget.bytes)}; {state})"
        )
