"""A model of memory read back from a file: a table of what the timeline said, and lines between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .models import MemoryModel

__all__ = ["SavedModel", "table_of"]

_POINTS = 24


def table_of(model: MemoryModel, batches: Iterable[int]) -> list[list[int | None]]:
    """Rows of (batch, allocated, reserved, needed) at some batch sizes and in between.

    Args:
        model: what is written down.
        batches: sizes that must be in the table; it spans from 1 to twice the largest of them.
    """
    exact = sorted(set(batches))
    top = min(2 * exact[-1], model.limit())
    sizes = {int(b) for b in np.geomspace(1, top, _POINTS).round()} | set(exact)
    return [
        [b, model.allocated(b), model.reserved(b), model.needed(b)] for b in sorted(sizes) if b > 0
    ]


class SavedModel:
    """Straight lines between the rows of a table. See :class:`~.models.MemoryModel`.

    The peak of a timeline is a convex function of the batch, up to the allocator's rounding, so
    the lines lie above it: what is answered from a file is at most a little too careful. Nothing
    is said beyond the largest row.
    """

    blind = False

    def __init__(self, rows: Sequence[Sequence[Any]], fingerprint: str, noise: float) -> None:
        self.noise = noise
        self._batches = [int(row[0]) for row in rows]
        self._columns = {
            name: [row[place] for row in rows]
            for place, name in ((1, "allocated"), (2, "reserved"), (3, "needed"))
        }
        self._fingerprint = fingerprint
        self.notes: list[str] = []

    def _at(self, name: str, batch: int) -> int:
        return int(np.ceil(np.interp(batch, self._batches, self._columns[name])))

    def allocated(self, batch: int, size: int | None = None) -> int:
        return self._at("allocated", batch)

    def reserved(self, batch: int) -> int | None:
        return None if None in self._columns["reserved"] else self._at("reserved", batch)

    def needed(self, batch: int) -> int:
        return self._at("needed", batch)

    def fits(self, batch: int, size: int) -> bool:
        return self.needed(batch) <= size

    def uses_batch(self) -> bool:
        return True

    def limit(self) -> int:
        return self._batches[-1]

    def confirm(self, batch: int) -> bool:
        return True

    def fingerprint(self) -> str:
        return self._fingerprint
