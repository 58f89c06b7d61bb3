"""What one measured run told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchfit.estimator.units import format_bytes

__all__ = ["Probe"]


@dataclass(frozen=True, slots=True)
class Probe:
    """One measured run at one batch size. Bytes are ints; a run out of memory has none.

    Attributes:
        batch: the batch size.
        peak: peak bytes allocated, of the job alone.
        reserved: peak bytes reserved; None where the device has no caching allocator.
        seconds: median time of a step after warm-up; 0.0 where it ran out of memory.
        spread: half the distance between the quartiles of those times, seconds.
        steps: how many steps ran, warm-up included.
        out_of_memory: the message, if memory ran out; else None.
        budget: bytes that the allocator could reserve meanwhile.
        leak: bytes by which each step left more behind than the one before.
        retries: how often the allocator gave back its cache to go on.
    """

    batch: int
    peak: int
    reserved: int | None
    seconds: float
    spread: float
    steps: int
    out_of_memory: str | None
    budget: int
    leak: int = 0
    retries: int = 0

    @property
    def ran(self) -> bool:
        """Whether the run ended without running out of memory."""
        return self.out_of_memory is None

    def __str__(self) -> str:
        if not self.ran:
            return f"batch {self.batch}: out of memory ({format_bytes(self.budget)} to use)"
        text = f"batch {self.batch}: {format_bytes(self.peak)} allocated"
        if self.reserved is not None:
            text += f", {format_bytes(self.reserved)} reserved"
        return f"{text}, {self.seconds:.3g} s per step"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Probe:
        """The inverse of :meth:`to_dict`."""
        return cls(**{name: values[name] for name in cls.__slots__})
