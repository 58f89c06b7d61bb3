"""What a job may take of the device in front of us, with everything subtracted named."""

from __future__ import annotations

from dataclasses import dataclass

from batchfit.estimator.budget import DEFAULT_MARGIN
from batchfit.estimator.units import format_bytes, parse_bytes

from .errors import CalibrationError
from .meters import Memory

__all__ = ["DeviceBudget", "measure_budget"]


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """Bytes that a job's allocator may reserve, and why. All in bytes.

    Attributes:
        total: of the device.
        outside: held by the context, by libraries, by other processes and by displays: total - free
            - what this process's allocator holds.
        foreign: held by this process's allocator for other things than the job.
        margin: kept free.
        asked: the budget that the user gave; None: none.
    """

    total: int
    outside: int
    foreign: int
    margin: int
    asked: int | None = None

    @property
    def available(self) -> int:
        """What the device can give, whatever was asked."""
        return self.total - self.outside - self.foreign - self.margin

    @property
    def bytes(self) -> int:
        """What the job may reserve."""
        return self.available if self.asked is None else min(self.asked, self.available)

    def __str__(self) -> str:
        if self.asked is not None and self.asked <= self.available:
            return f"{format_bytes(self.asked)}, as given"
        parts = [f"{format_bytes(self.total)} total"]
        for size, what in (
            (self.outside, "context and other processes"),
            (self.foreign, "held by this process for other things"),
            (self.margin, "margin"),
        ):
            if size:
                parts.append(f"{format_bytes(size)} {what}")
        text = f"{format_bytes(max(self.bytes, 0))} = {' - '.join(parts)}"
        if self.asked is not None:
            text += f" (less than the {format_bytes(self.asked)} asked for)"
        return text


def measure_budget(
    memory: Memory,
    own: int,
    asked: int | str | None,
    margin: int | str | None,
) -> DeviceBudget:
    """The budget of a job.

    Args:
        memory: of the device, with this process's cache given back.
        own: bytes of the job itself that are on the device already.
        asked: a budget of the user's, as an int or "10GiB"; None takes what is free.
        margin: None keeps the estimator's margin free (256 MiB), and none beside a budget that was
            asked for.

    Raises:
        CalibrationError: nothing is left.
        BudgetError: a size that cannot be read.
    """
    if margin is None:
        margin = DEFAULT_MARGIN if asked is None else 0
    budget = DeviceBudget(
        total=memory.total,
        outside=max(memory.total - memory.free - memory.reserved, 0),
        foreign=max(memory.reserved - own, 0),
        margin=parse_bytes(margin),
        asked=None if asked is None else parse_bytes(asked),
    )
    if budget.bytes <= 0:
        raise CalibrationError(
            f"the device has no room for a probe: {budget}; end what else runs on it, or make the "
            "margin smaller"
        )
    return budget
