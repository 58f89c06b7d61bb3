"""What a calibration knows: the probes, the corrected curve, the answers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from batchfit.estimator import Outcome
from batchfit.estimator.solve import check_batch, following, largest_safe
from batchfit.estimator.units import parse_bytes

from .answer import Answer, Conditions, Plan, plan_batch
from .budget import DeviceBudget
from .corrected import Corrected
from .diagnosis import diagnose
from .errors import CalibrationError
from .fit import Fit
from .models import BlindModel, MemoryModel
from .probe import Probe
from .saved import SavedModel, table_of
from .store import check_key, read_file, write_file
from .throughput import Efficient, Speed

__all__ = ["Calibration"]


class Calibration:
    """A job's memory and speed on one device, as measured there. Made by :func:`calibrate`.

    Attributes:
        name: of the job.
        probes: every run, in order.
        budget: what the job may take of the device.
        conditions: which answers were asked for.
        key: what the calibration depends on; see :mod:`.store`.
        safe: the largest batch that ran, within the accepted risk; 0: none was verified.
    """

    def __init__(
        self,
        name: str,
        model: MemoryModel,
        probes: Sequence[Probe],
        budget: DeviceBudget,
        conditions: Conditions,
        key: dict[str, str],
        safe: int = 0,
        notes: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.probes = tuple(probes)
        self.budget = budget
        self.conditions = conditions
        self.key = key
        self.safe = safe
        self._model = model
        self._notes = list(notes)
        ran = {probe.batch for probe in probes if probe.ran}
        enough = len(ran) >= (2 if model.blind else 1)
        self._corrected = Corrected(model, probes) if enough else None

    def __repr__(self) -> str:
        return f"<Calibration of {self.name} on {self.key.get('device', 'a device')}>"

    def __str__(self) -> str:
        lines = [f"{self.name} on {self.key.get('device', '')}", *map(str, self.probes)]
        return "\n".join([*lines, str(self.answer()), *(f"note: {note}" for note in self.notes)])

    # -- memory ------------------------------------------------------------------------------

    @property
    def blind(self) -> bool:
        """Whether there was no timeline, so that a line stands in for one."""
        return self._model.blind

    def peak(self, batch: int) -> int:
        """Bytes expected to be allocated at most at a batch size (the median)."""
        return self._known().peak(check_batch(batch))

    def interval(self, batch: int, level: float = 0.95) -> tuple[int, int]:
        """Bytes between which the allocated peak lies with probability ``level``."""
        return self._known().allocated.interval(check_batch(batch), level)

    def reserved(self, batch: int) -> int | None:
        """Bytes expected to be reserved, with memory to spare; None where nothing is cached."""
        fit = self._known().reserved
        return None if fit is None else int(fit.quantile(check_batch(batch), 0.5))

    @property
    def reserved_fit(self) -> Fit | None:
        """The fit of what is reserved; None where nothing is cached."""
        return self._known().reserved

    def risk(self, batch: int, budget: int | str | None = None) -> float:
        """The probability that a batch runs out of memory."""
        return self._known().risk(check_batch(batch), self._size(budget))

    # -- answers -----------------------------------------------------------------------------

    def answer(self, budget: int | str | None = None, **conditions: Any) -> Answer:
        """The largest batch that fits.

        Args:
            budget: bytes that the job may reserve; None: what was measured.
            **conditions: other than those of the calibration, see :class:`Conditions`.

        Raises:
            WorkloadError: conditions that no batch size meets.
        """
        asked = self.conditions
        if conditions:
            names = [name for name in asked.__dataclass_fields__ if name not in conditions]
            asked = Conditions(**{n: getattr(asked, n) for n in names}, **conditions)
        if self._corrected is None:
            return self._nothing_fits(asked)
        size, corrected = self._size(budget), self._corrected
        same = size >= self.budget.bytes and asked.risk >= self.conditions.risk
        limits = [asked.top, self._model.limit()]
        if self.safe and size == self.budget.bytes and same:
            limits.append(self.safe)  # the runs at the answer have settled where the limit is
        top = min(limit for limit in limits if limit is not None)
        batch = hole = 0
        if top >= asked.smallest:
            batch, hole = largest_safe(  # type: ignore[assignment]
                lambda b: (same and b <= self.safe) or corrected.fits(b, size, asked.risk),
                asked.candidate, top,
            )  # fmt: skip
        if not batch:
            return self._nothing_fits(asked)
        low, high = self.interval(batch)
        capped = asked.top is not None and following(asked.candidate, batch) > asked.top
        outcome = Outcome.CAPPED if capped and not hole else Outcome.FITS
        return Answer(
            batch, outcome, self._budget(budget), self.peak(batch), low, high,
            corrected.risk(batch, size), self._verified(batch, size), tuple(self.notes),
        )  # fmt: skip

    def largest_batch(self, budget: int | str | None = None, **conditions: Any) -> int:
        """The largest batch that fits; 0 if none does. See :meth:`answer`."""
        return self.answer(budget, **conditions).batch

    def plan(self, target: int, tuned_for: int | None = None) -> Plan:
        """Micro-batches that make up a target effective batch. See :func:`.answer.plan_batch`."""
        ranks = int(self.key.get("ranks") or 1)
        return plan_batch(
            self.largest_batch(), target, self.conditions, ranks=ranks, tuned_for=tuned_for
        )

    def efficient(self, share: float = 0.95) -> Efficient:
        """The smallest batch that keeps a share of the best measured throughput."""
        return self.speed.efficient(share, self.largest_batch() or None)

    def within_epoch(self, seconds: float, dataset: int) -> int:
        """The largest batch that fits and whose epoch takes at most so many seconds; or 0."""
        return self.speed.within_epoch(seconds, dataset, self.largest_batch())

    @property
    def speed(self) -> Speed:
        """Seconds of a step over the batch size.

        Raises:
            CalibrationError: fewer than two probes of different sizes ran.
        """
        return Speed(self.probes)

    @property
    def notes(self) -> list[str]:
        """What the reader should know: assumptions, and probes that disagree."""
        found = [*self._notes, *self._model.notes]
        if self._corrected is not None:
            found += diagnose(self._model, self.probes)
        return list(dict.fromkeys(found))

    # -- files -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; the inverse is :meth:`from_dict`."""
        table = None
        if not self._model.blind:
            answer = self.answer().batch
            table = table_of(self._model, [*(probe.batch for probe in self.probes), answer or 1])
        return {
            "name": self.name,
            "key": self.key,
            "budget": {name: getattr(self.budget, name) for name in self.budget.__slots__},
            "conditions": {n: getattr(self.conditions, n) for n in self.conditions.__slots__},
            "probes": [probe.to_dict() for probe in self.probes],
            "safe": self.safe,
            "table": table,
            "noise": self._model.noise,
            "notes": [*self._notes, *self._model.notes],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any], model: MemoryModel | None = None) -> Calibration:
        """A calibration from what :meth:`to_dict` gave.

        Args:
            values: plain values.
            model: the timeline; None takes the table that was saved.
        """
        job = values["key"]["job"]
        if model is None and values["table"] is None:
            model = BlindModel(job, "it was saved without a timeline", values["noise"])
        return cls(
            values["name"],
            model or SavedModel(values["table"], job, values["noise"]),
            [Probe.from_dict(probe) for probe in values["probes"]],
            DeviceBudget(**values["budget"]),
            Conditions(**values["conditions"]),
            values["key"],
            values["safe"],
            values["notes"],
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON.

        Raises:
            CalibrationError: the file cannot be written.
        """
        write_file(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str], key: dict[str, str] | None = None) -> Calibration:
        """Read a calibration; answers cost no probe.

        Args:
            path: of a file that :meth:`save` wrote.
            key: what it is to apply to (:func:`.calibrate.current_key`); None looks at the device
                and the software of this process, and takes the workload on trust.

        Raises:
            StaleCalibration: it belongs to another job, device or software; names what changed.
            CalibrationError: the file cannot be read.
        """
        found = cls.read(path)
        if key is None:
            from .calibrate import current_key

            key = current_key(found.key)
        found._notes += check_key(found.key, key)
        return found

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Calibration:
        """As :meth:`load`, wherever the calibration is of: to look at it.

        Raises:
            CalibrationError: the file cannot be read.
        """
        values = read_file(path)
        try:
            return cls.from_dict(values)
        except (KeyError, TypeError, ValueError) as error:
            raise CalibrationError(f"{path} is damaged: {type(error).__name__} {error}") from error

    # -- inside ------------------------------------------------------------------------------

    def _known(self) -> Corrected:
        if self._corrected is None:
            raise CalibrationError(
                f"too few probes of {self.name} ran to say anything: "
                + "; ".join(map(str, self.probes))
            )
        return self._corrected

    def _size(self, budget: int | str | None) -> int:
        return self.budget.bytes if budget is None else parse_bytes(budget)

    def _budget(self, budget: int | str | None) -> DeviceBudget:
        if budget is None:
            return self.budget
        size = parse_bytes(budget)
        return DeviceBudget(size, 0, 0, 0, size)

    def _verified(self, batch: int, size: int) -> bool:
        return any(p.ran and p.batch >= batch and p.budget <= size for p in self.probes)

    def _nothing_fits(self, asked: Conditions) -> Answer:
        smallest = asked.smallest
        if self._corrected is not None:
            peak, (low, high) = self.peak(smallest), self.interval(smallest)
        else:
            peak = low = high = self._model.allocated(smallest)
        return Answer(
            0, Outcome.DOES_NOT_FIT, self.budget, peak, low, high, 1.0, False, tuple(self.notes)
        )
