"""Pictures of a calibration: what the probes measured, the corrected curve, the throughput."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from batchfit.calibration import Calibration
from batchfit.estimator.units import GIB

from .style import LINES, Theme, themed

__all__ = ["calibration_curve", "throughput_curve"]


def calibration_curve(
    calibration: Calibration, *, level: float = 0.9, theme: Theme = "light"
) -> Figure:
    """Measured peaks, the curve through them and its interval, with the budget and the answer.

    Args:
        calibration: the calibration.
        level: of the interval.
        theme: "light" or "dark".
    """
    answer = calibration.answer()
    ran = [probe for probe in calibration.probes if probe.ran]
    end = max(8, int(1.15 * max([answer.batch, *(probe.batch for probe in calibration.probes)])))
    batches = np.unique(np.linspace(1, end, 60).astype(int)).tolist()
    middle = np.array([calibration.peak(b) for b in batches]) / GIB
    interval = np.array([calibration.interval(b, level) for b in batches]) / GIB
    with themed(theme) as ink:
        figure = Figure(figsize=(8, 4.2))
        axes = figure.subplots()
        axes.fill_between(
            batches, interval[:, 0], interval[:, 1], color=LINES[0], alpha=0.25, linewidth=0,
            label=f"{level:.0%} interval",
        )  # fmt: skip
        axes.plot(batches, middle, color=LINES[0], label="predicted, corrected by the probes")
        axes.plot(
            [p.batch for p in ran], [p.peak / GIB for p in ran], "o", color=LINES[1],
            label="measured", zorder=5,
        )  # fmt: skip
        failed = [probe.batch for probe in calibration.probes if not probe.ran]
        if failed:
            axes.plot(
                failed, [calibration.budget.bytes / GIB] * len(failed), "x", color=ink,
                label="ran out of memory", zorder=5,
            )  # fmt: skip
        axes.axhline(calibration.budget.bytes / GIB, color=ink, linewidth=1, label="budget")
        if answer.batch:
            axes.axvline(
                answer.batch, color=LINES[2], linestyle=":", label=f"answer: {answer.batch}"
            )
        axes.set(xlabel="batch size", ylabel="allocated / GiB")
        axes.set_xlim(0, end)
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", labelcolor=ink)
    return figure


def throughput_curve(
    calibration: Calibration, *, share: float = 0.95, theme: Theme = "light"
) -> Figure:
    """Samples per second over the batch size, with the smallest batch that runs efficiently.

    Args:
        calibration: at least two of its probes ran.
        share: of the best measured throughput that is to be kept.
        theme: "light" or "dark".

    Raises:
        CalibrationError: fewer than two probes ran.
    """
    speed, efficient = calibration.speed, calibration.efficient(share)
    ran = [probe for probe in calibration.probes if probe.ran and probe.seconds > 0]
    end = max(8, int(1.15 * max([efficient.batch, *(probe.batch for probe in ran)])))
    batches = np.unique(np.linspace(1, end, 80).astype(int)).tolist()
    with themed(theme) as ink:
        figure = Figure(figsize=(8, 4.2))
        axes = figure.subplots()
        axes.plot(
            batches, [speed.throughput(b) for b in batches], color=LINES[0],
            label="seconds = a + b x batch, fitted",
        )  # fmt: skip
        rates = np.array([p.batch / p.seconds for p in ran])
        spreads = np.array([p.spread / p.seconds for p in ran]) * rates
        axes.errorbar(
            [p.batch for p in ran], rates, yerr=spreads, fmt="o", color=LINES[1], capsize=3,
            label="measured", zorder=5,
        )  # fmt: skip
        axes.axvspan(efficient.low, efficient.high, color=LINES[2], alpha=0.2, linewidth=0)
        axes.axvline(
            efficient.batch, color=LINES[2], linestyle=":",
            label=f"{share:.0%} of the best: {efficient.batch}",
        )  # fmt: skip
        axes.set(xlabel="batch size", ylabel="samples per second")
        axes.set_xlim(0, end)
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower right", labelcolor=ink)
    return figure
