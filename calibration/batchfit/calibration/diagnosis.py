"""Find probes that disagree with the others, and say the likely reason."""

from __future__ import annotations

from collections.abc import Sequence

from batchfit.estimator.units import format_bytes

from .corrected import Corrected
from .models import MemoryModel
from .probe import Probe

__all__ = ["diagnose"]

# A probe disagrees if the others give it a chance of less than one in fifty.
_LEVEL = 0.98
# Other processes count as a reason if the budget changed by more than this share of the peak.
_MOVED = 0.01


def diagnose(model: MemoryModel, probes: Sequence[Probe]) -> list[str]:
    """One line for each probe that lies outside of what the others predict for it."""
    ran = [probe for probe in probes if probe.ran]
    notes = []
    for probe in ran:
        others = [other for other in ran if other.batch != probe.batch]
        if len({other.batch for other in others}) < 2:
            continue
        rest = Corrected(model, others).allocated
        low, high = rest.interval(probe.batch, _LEVEL)
        if low <= probe.peak <= high:
            continue
        expected = int(rest.quantile(probe.batch, 0.5))
        direction = "more" if probe.peak > expected else "less"
        notes.append(
            f"batch {probe.batch} took {format_bytes(abs(probe.peak - expected))} {direction} than "
            f"the other probes say ({format_bytes(expected)}); likely reason: "
            f"{_reason(model, probe, ran)}"
        )
    return notes


def _reason(model: MemoryModel, probe: Probe, ran: Sequence[Probe]) -> str:
    if probe.leak:
        return f"a leak of {format_bytes(probe.leak)} per step"
    if probe.retries:
        return "short of memory, the allocator and cuDNN made do with less"
    usual = max(other.budget for other in ran)
    if usual - probe.budget > _MOVED * probe.peak:
        return (
            f"another process took {format_bytes(usual - probe.budget)} meanwhile, and libraries "
            "made do with less"
        )
    if model.blind:
        return "the peak lies in another part of the step at this size, which a line cannot follow"
    return (
        "a library took another algorithm at this size, with another workspace (cuDNN's "
        "convolutions and attention do)"
    )
