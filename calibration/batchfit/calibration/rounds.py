"""Which batch sizes to probe, in what order: small, half the answer, the answer itself.

The error of a prediction grows with the distance beyond the largest probe (on public data, for a
line: 1 to 2 % at twice the size, 3 % at four times, 5 % at eight times). So the last probe before
the answer lies near half of it, where it still costs little; a further small one would add nothing.
No probe is chosen that is expected to run out of memory with more than the accepted risk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchfit.estimator.solve import largest, largest_safe
from batchfit.estimator.units import format_bytes

from .answer import Conditions
from .budget import DeviceBudget
from .corrected import Corrected
from .errors import CalibrationError
from .models import MemoryModel
from .probe import Probe
from .ranks import Alone, Ranks

__all__ = ["Rounds"]

# The first probe is at an eighth of what the model expects: far enough from the second (at half)
# to tell a fixed part from one that grows, large enough to be about the same kernels.
_FIRST = 8
# Blind, a probe is at most so many times the largest one before: no line is trusted further.
_REACH = 16
# A batch that is larger by less is not worth another run; nor is a bracket that is narrower.
_WORTH, _NARROW = 1.004, 1.02
# After a run out of memory the next attempt is smaller by at least this.
_STEP_BACK = 0.98
# Runs at the answer: the first, further up where it showed room, steps back where it failed.
_VERIFICATIONS = 6
# The risk that such a run fails: of the first, and of those that look for what is left beyond a
# batch that ran. A failure is survived; caution would cost a batch that is smaller than need be.
_ATTEMPT, _FURTHER = 0.1, 0.5
# A leak counts as such if a thousand steps of it take more than this share of the peak.
_LEAK = 0.01


class Rounds:
    """The runs of one calibration.

    Args:
        model: what is predicted.
        budget: bytes that the job may reserve.
        conditions: which answers are wanted.
        run: measures one batch size.
        most: probes before the answer itself is tried, at most.
        ranks: the processes that calibrate together.
        log: told what each probe told.

    Attributes:
        probes: what was measured so far.
        notes: what the reader should know.
    """

    def __init__(
        self,
        model: MemoryModel,
        budget: DeviceBudget,
        conditions: Conditions,
        run: Callable[[int], Probe],
        *,
        most: int = 3,
        ranks: Ranks | None = None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.probes: list[Probe] = []
        self.notes: list[str] = []
        self._model = model
        self._budget = budget
        self._conditions = conditions
        self._run = run
        self._most = most
        self._ranks = ranks or Alone()
        self._log = log
        self._corrected: Corrected | None = None
        self._ceiling: int | None = None
        self._largest_run = self._failures = 0

    # -- the order of things -----------------------------------------------------------------

    def explore(self) -> None:
        """Probe small, then near half the answer.

        Raises:
            CalibrationError: the step does not depend on its batch, or leaks.
        """
        if not self._model.uses_batch():
            raise CalibrationError(
                "nothing that the step allocates grows with the batch size; it probably ignores "
                "the batch that it is called with"
            )
        first = self._first()
        while not self.probe(first) and not self.largest_run and first > self._conditions.smallest:
            first = max(self._conditions.down(first / 4), self._conditions.smallest)
        while self.largest_run and len(self.probes) < self._most:
            following = self._following()
            if following is None:
                break
            self.probe(following)

    def verify(self) -> int:
        """Run the answer; step back where it fails, further up where the run showed more room.

        Returns:
            the largest batch that is safe and, where one could be run at all, was run.
        """
        runs = 0
        while runs < _VERIFICATIONS:
            done = self.largest_run
            answer = self._ranks.smallest(self._attempt(first=not runs))
            if answer <= done or (runs and answer < _WORTH * done):
                break
            runs += 1
            self.probe(answer)
        return self.largest_run

    def _attempt(self, first: bool) -> int:
        """The next batch size to run as the answer."""
        risk = max(self._conditions.risk, _ATTEMPT if first else _FURTHER)
        answer, done = self._largest(risk, safe=False), self.largest_run
        if self._ceiling is None:
            return answer
        middle = max(self._conditions.down((done + self._ceiling) / 2), done)
        if self._failures > 1:  # the fit has been wrong twice: halve what is left
            return min(answer, middle) if answer > done else middle
        if answer < _WORTH * done and self._ceiling > _NARROW * done + 1:
            return middle  # it cannot tell where between what ran and what failed
        return answer

    def solve(self, risk: float | None = None) -> int:
        """The largest batch that fits with the accepted risk; 0 if none does."""
        return self._largest(self._conditions.risk if risk is None else risk, safe=True)

    def probe(self, batch: int) -> bool:
        """Measure one batch size; returns whether it ran on every rank."""
        self._log(f"probing batch {batch}")
        made: Probe | None = None
        error: BaseException | None = None
        try:
            made = self._run(batch)
            self._examine(made)
        except Exception as raised:
            error = raised
        failed = self._ranks.any(made is not None and not made.ran, error)
        assert made is not None
        self._log(str(made))
        self.probes.append(made)
        if failed:
            self._failures += 1
            self._ceiling = min(batch, self._ceiling or batch)
        else:
            self._largest_run = max(batch, self._largest_run)
        if made.ran:
            self._corrected = self._correct()
        return not failed

    @property
    def largest_run(self) -> int:
        """The largest batch that ran, on every rank; 0 if none did."""
        return self._largest_run

    @property
    def corrected(self) -> Corrected | None:
        """The model as the probes correct it; None before enough of them ran."""
        return self._corrected

    # -- inside ------------------------------------------------------------------------------

    def _correct(self) -> Corrected | None:
        sizes = {probe.batch for probe in self.probes if probe.ran}
        return None if self._model.blind and len(sizes) < 2 else Corrected(self._model, self.probes)

    def _first(self) -> int:
        """An eighth of what the model expects; blind, the smallest but one."""
        smallest = self._conditions.smallest
        if self._model.blind:
            second = self._conditions.candidate(2)
            return self._ranks.smallest(second if second <= self._top() else smallest)
        expected = largest(
            lambda b: self._model.fits(b, self._budget.bytes), self._conditions.candidate,
            self._top(),
        )  # fmt: skip
        if expected and expected < self._model.limit():
            self._model.confirm(expected)
        return self._ranks.smallest(max(self._conditions.down(expected / _FIRST), smallest))

    def _following(self) -> int | None:
        """Half the expected answer, if that is well beyond what was probed; else None."""
        done = self.largest_run
        if self._corrected is None:  # blind, one probe: a line from zero through it bounds the peak
            (probe,) = [p for p in self.probes if p.ran]
            reach = min(4.0, self._budget.bytes / max(probe.peak, probe.reserved or 0))
            wanted = self._conditions.down(done * reach)
        else:
            expected = self._largest(0.5, safe=False)
            wanted = min(
                self._conditions.down(expected / 2),
                self._largest(self._conditions.risk, safe=False),
            )
        if self._model.blind:
            wanted = min(wanted, self._conditions.down(_REACH * done))
        wanted = self._ranks.smallest(min(wanted, self._top()))
        if wanted < 1.25 * done:
            return None
        return wanted

    def _top(self) -> int:
        tops = [self._model.limit(), self._conditions.top, (self._ceiling or 2**31) - 1]
        return min(top for top in tops if top is not None)

    def _largest(self, risk: float, safe: bool) -> int:
        if self._corrected is None:
            return 0
        corrected, size, top = self._corrected, self._budget.bytes, self._top()
        ceiling = _STEP_BACK * self._ceiling if self._ceiling else top
        candidate = self._conditions.candidate
        limit = max(min(top, int(ceiling)), min(self.largest_run, top))

        def fits(batch: int) -> bool:
            return corrected.fits(batch, size, risk)

        if not safe:
            return largest(fits, candidate, limit)
        found, hole = largest_safe(fits, candidate, limit)
        if hole is not None:
            self.notes.append(
                f"batch {hole} would run out although larger ones fit (fragmentation)"
            )
        return found

    def _examine(self, probe: Probe) -> None:
        """Refuse a step that leaks, or that ignores its batch.

        Raises:
            CalibrationError: what was seen.
        """
        if not probe.ran:
            return
        if 1000 * probe.leak > _LEAK * probe.peak:
            raise CalibrationError(
                f"the step keeps {format_bytes(probe.leak)} more after each call (batch "
                f"{probe.batch}): it leaks, and no batch size is safe in a long run; look for "
                "lists that losses or outputs with their graphs are added to"
            )
        if probe.leak:
            self.notes.append(f"the step keeps {probe.leak} bytes more after each call")
        ran: Sequence[Probe] = [p for p in self.probes if p.ran]
        smallest = min(ran, key=lambda p: p.batch, default=probe)
        flat = abs(probe.peak - smallest.peak) <= 3 * self._model.noise * probe.peak
        if self._model.blind and flat and probe.batch >= 16 * smallest.batch:
            raise CalibrationError(
                f"the peak is the same at batch {smallest.batch} and {probe.batch}, "
                f"{format_bytes(probe.peak)}: either the step ignores its batch, or something "
                "that does not depend on it takes the most; give a Workload, whose timeline tells"
            )
