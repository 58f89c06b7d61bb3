"""One calibration on a simulated device, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from batchfit.calibration import Conditions, DeviceBudget
from batchfit.calibration.rounds import Rounds

from .simulated_device import MARGIN, SimulatedDevice

#: Levels at which the interval is checked.
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.98)


@dataclass(frozen=True)
class Case:
    """What became of one calibration.

    Attributes:
        seed: of the device.
        truth: the largest batch that runs together with all smaller ones.
        answer: of the calibration, verified.
        runs, failures: probes, and how many ran out of memory.
        survived: whether three later runs of the answer went through, with another process about.
        error: relative error of the predicted peak at ``truth``, before the answer was run.
        distance: how far ``truth`` lies beyond the largest probe by then.
        covered: for each of LEVELS, whether the interval held the true peak.
    """

    seed: int
    truth: int
    answer: int
    runs: int
    failures: int
    survived: bool
    error: float
    distance: float
    covered: tuple[bool, ...]

    @property
    def close(self) -> bool:
        """Whether the answer is at most 2 % (or one sample) below the true largest."""
        return self.answer >= self.truth - max(1, 0.02 * self.truth)


def calibrated(seed: int) -> Case:
    """Calibrate the device of a seed as ``calibrate`` does, and compare with the truth."""
    device = SimulatedDevice(seed)
    truth = device.largest()
    budget = DeviceBudget(device.budget + MARGIN, 0, 0, MARGIN)
    rounds = Rounds(device.model, budget, Conditions(), device.run)
    rounds.explore()
    assert rounds.corrected is not None and truth
    true = device.run(truth, 2**62, quiet=True).peak
    fit = rounds.corrected.allocated
    spans = [fit.interval(truth, level) for level in LEVELS]
    error = fit.quantile(truth, 0.5) / true - 1
    distance = truth / rounds.largest_run
    answer = rounds.verify()
    later = [device.run(answer, device.later()).ran for _ in range(3)]
    failures = sum(not probe.ran for probe in rounds.probes)
    return Case(
        seed, truth, answer, len(rounds.probes), failures, all(later), error, distance,
        tuple(low <= true <= high for low, high in spans),
    )  # fmt: skip
