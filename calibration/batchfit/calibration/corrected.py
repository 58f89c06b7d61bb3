"""A model of a job's memory, corrected by probes: how much a batch takes, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from .fit import Fit
from .models import MemoryModel
from .probe import Probe

__all__ = ["Corrected"]

# Points at which the average over the unknown share of fragmentation is taken.
_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)


class Corrected:
    """The corrected curves of a job.

    What decides about out of memory lies between what is allocated and what is reserved: short of
    memory, the allocator gives back what it caches, but not the gaps within its segments. The twin
    of the allocator knows how much of that is needed for the timeline. Where a probe reserved more
    beyond its allocated peak than the twin does, some unknown share of the excess is needed, too;
    every share is held equally likely.

    Args:
        model: what was predicted.
        probes: all probes, those out of memory included.

    Attributes:
        allocated: the fit of the allocated peak.
    """

    def __init__(self, model: MemoryModel, probes: Sequence[Probe]) -> None:
        self.model = model
        self.probes = list(probes)
        self._ran = [probe for probe in probes if probe.ran]
        peaks = [probe.peak for probe in self._ran]
        if model.blind:
            self.allocated = Fit(None, probes, peaks, noise=model.noise)
        else:
            predicted = [model.allocated(probe.batch, probe.budget) for probe in self._ran]
            self.allocated = Fit(model.allocated, probes, peaks, predicted, noise=model.noise)

    @cached_property
    def reserved(self) -> Fit | None:
        """The fit of the reserved peak; None where nothing is cached, or nothing was predicted."""
        values = [probe.reserved for probe in self._ran]
        measured = [value for value in values if value is not None]
        if len(measured) < len(values):
            return None
        if self.model.blind:
            return Fit(None, self._ran, measured)
        if self.model.reserved(self._ran[0].batch) is None:
            return None
        return Fit(lambda b: self.model.reserved(b) or 0, self._ran, measured)

    def peak(self, batch: int) -> int:
        """Bytes expected to be allocated at most (the median)."""
        return int(self.allocated.quantile(batch, 0.5))

    def fits(self, batch: int, size: int, risk: float) -> bool:
        """Whether a batch goes through with ``size`` bytes to reserve, with that risk."""
        if self._ran_at(batch, size):
            if any(probe.batch == batch for probe in self._ran):
                return True
            risk, loose = 0.5, 0.0  # a larger one ran
        else:
            loose = (1 - risk) * self._excess(batch)
        above = self.allocated.quantile(batch, 1 - risk)
        if self.model.blind:
            return above + loose <= size
        return self.model.fits(batch, int(size - (above - self.model.allocated(batch)) - loose))

    def risk(self, batch: int, size: int) -> float:
        """The probability that a batch runs out of memory with ``size`` bytes to reserve."""
        room = size - self.model.needed(batch) + self.model.allocated(batch)
        excess = 0.0 if self._ran_at(batch, size) else self._excess(batch)
        odds = [self.allocated.exceeds(batch, room - share * excess) for share in _SHARES]
        return sum(odds) / len(odds)

    def _gap(self, batch: int) -> int:
        """Bytes that the timeline needs beyond what it allocates."""
        return max(self.model.needed(batch) - self.model.allocated(batch), 0)

    def _ran_at(self, batch: int, size: int) -> bool:
        """Whether this batch, or a larger one, ran with no more to reserve."""
        return any(probe.batch >= batch and probe.budget <= size for probe in self._ran)

    def _excess(self, batch: int) -> float:
        """Bytes reserved beyond what was allocated that the twin does not account for."""
        return self._excess_share * self.allocated.mean(batch)

    @cached_property
    def _excess_share(self) -> float:
        """That of the largest probe: gaps depend on sizes, and its are the nearest."""
        probe = max(self._ran, key=lambda p: p.batch)
        if probe.reserved is None:
            return 0.0
        known = 0
        if not self.model.blind and (reserved := self.model.reserved(probe.batch)) is not None:
            known = reserved - self.model.allocated(probe.batch)
        return max((probe.reserved - probe.peak - known) / probe.peak, 0.0)
