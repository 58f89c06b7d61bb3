"""Pictures of an estimate: memory over a step, memory over the batch size, batch against length.

Every function returns a figure of its own (not pyplot's), so that nothing global changes; save it
with ``figure.savefig`` or show it in a notebook by returning it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from batchfit.estimator import GPU, Category, Estimate, Phase, WorkloadError, find_gpu
from batchfit.estimator.solve import check_batch
from batchfit.estimator.units import GIB, format_bytes

from .style import CATEGORY_COLOURS, LINES, Theme, themed

__all__ = ["feasibility", "memory_over_batch", "memory_over_step"]

# A line through more points than a screen has columns looks the same.
_MOST_POINTS = 4000


def memory_over_step(
    estimate: Estimate, batch: int, *, step: int = 2, theme: Theme = "light"
) -> Figure:
    """Allocated memory over one step, stacked by category; the peak is marked and named.

    Args:
        estimate: the estimate.
        batch: the batch size.
        step: which of the steps that were traced; in the first, optimizer state is born.
        theme: "light" or "dark".

    Raises:
        WorkloadError: a batch size or a step that there is not.
    """
    curve = estimate.timeline(check_batch(batch))
    marks = [(start, phase) for start, phase, number in curve.marks if number == step]
    if not marks:
        raise WorkloadError(f"the workload was traced for other steps than {step}")
    later = [start for start, _, number in curve.marks if number > step]
    first, last = marks[0][0], min(later, default=len(curve.allocated))
    with themed(theme) as ink:
        figure = Figure(figsize=(8, 4.2))
        axes = figure.subplots()
        _stack(axes, curve.by_category, first, last)
        peak = first + int(np.argmax(curve.allocated[first:last]))
        _mark_peak(axes, estimate, batch, (peak, first), int(curve.allocated[peak]), ink)
        _name_phases(axes, [*marks, (last, Phase.INIT)], first, ink)
        axes.set(xlabel="births and deaths of tensors in the step", ylabel="allocated / GiB")
        axes.set_xlim(0, last - 1 - first)
        axes.set_ylim(bottom=0)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _name_phases(axes: Axes, marks: list[tuple[int, Phase]], first: int, ink: str) -> None:
    """A dotted line where a phase begins, and its name where there is room.

    What follows the optimizer (zero_grad, the end of the loop) belongs to no phase in particular.
    """
    end = marks[-1][0]
    seen: set[Phase] = set()
    for (start, phase), (stop, _) in pairwise(marks):
        axes.axvline(start - first, color=ink, linewidth=0.6, linestyle=":")
        tail = phase is Phase.FORWARD and Phase.OPTIMIZER in seen
        if stop - start > (end - first) / 50 and not tail:
            axes.text(
                (start + stop) / 2 - first, 1.02, str(phase), ha="center", va="bottom",
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip
        seen.add(phase)


def _stack(axes: Axes, parts: dict[Category, np.ndarray], first: int, last: int) -> None:
    stride = max(1, (last - first) // _MOST_POINTS)
    at = np.arange(0, last - first, stride)
    # The highest point of each stretch, so that no spike is lost between two drawn points.
    total = np.sum([parts[c][first:last] for c in parts], axis=0)
    highest = [int(np.argmax(total[i : i + stride])) + i for i in range(0, last - first, stride)]
    shown = {c: parts[c][first:last][highest] / GIB for c in Category if parts[c][first:last].any()}
    axes.stackplot(
        at, list(shown.values()), labels=[str(c) for c in shown],
        colors=[CATEGORY_COLOURS[c] for c in shown], step="post", linewidth=0,
    )  # fmt: skip


def _mark_peak(
    axes: Axes, estimate: Estimate, batch: int, place: tuple[int, int], size: int, ink: str
) -> None:
    moment = estimate.timeline_at(batch).moment(place[0], size)
    position = place[0] - place[1]
    where = f" in {moment.module}" if moment.module else ""
    name = f"{format_bytes(size)}: {moment.operator.removeprefix('aten::')}{where}"
    to_left = position > axes.dataLim.x1 / 2
    axes.plot(position, size / GIB, marker="v", color=ink, markersize=7, clip_on=False, zorder=5)
    axes.annotate(
        name, (position, size / GIB), xytext=(-8 if to_left else 8, 2), textcoords="offset points",
        ha="right" if to_left else "left", va="bottom", fontsize=9,
        bbox={"boxstyle": "round,pad=0.2", "fc": axes.get_facecolor(), "ec": "none", "alpha": 0.8},
    )  # fmt: skip
    axes.margins(y=0.12)


def memory_over_batch(
    estimate: Estimate, gpus: Sequence[str | GPU] = (), *, largest: int | None = None,
    theme: Theme = "light",
) -> Figure:  # fmt: skip
    """Reserved and allocated peak against the batch size, with budgets of GPUs and the answers.

    Args:
        estimate: the estimate; its kernels are those of the GPU that it was made for.
        gpus: whose budgets are drawn; none draws that of the estimate's GPU.
        largest: the right end; None goes a tenth beyond the largest answer.
        theme: "light" or "dark".

    Raises:
        TargetError: an unknown GPU.
    """
    from batchfit.estimator.budget import gpu_budget

    cards = [find_gpu(gpu) for gpu in gpus] or [estimate.gpu]
    budgets = {card.name: gpu_budget(card) for card in cards}
    answers = {name: estimate.answer(budget).batch for name, budget in budgets.items()}
    end = largest or max(8, int(1.1 * max(answers.values())))
    batches = np.unique(np.linspace(1, end, 60).astype(int))
    with themed(theme) as ink:
        figure = Figure(figsize=(8, 4.2))
        axes = figure.subplots()
        for values, label, style in (
            ([estimate.peak(int(b)) for b in batches], "allocated", "-"),
            ([estimate.reserved(int(b)) for b in batches], "reserved, with memory to spare", "--"),
        ):
            axes.plot(
                batches, np.asarray(values) / GIB, style, color=LINES[0], label=label, linewidth=1.6
            )
        for (name, budget), colour in zip(budgets.items(), cycle(LINES[1:]), strict=False):
            size, answer = budget.bytes / GIB, answers[name]
            axes.axhline(size, color=colour, linewidth=1.2)
            said = f"{name}: {answer}" if answer else f"{name}: does not fit"
            axes.annotate(
                said, (1, size), xycoords=("axes fraction", "data"), xytext=(4, 0),
                textcoords="offset points", va="center", annotation_clip=False,
            )  # fmt: skip
            if answer:
                axes.plot(answer, size, marker="o", color=colour, markersize=6, zorder=5)
                axes.plot([answer, answer], [0, size], ":", color=colour, linewidth=1)
        axes.set(xlabel="batch size", ylabel="memory / GiB")
        axes.set_xlim(0, end)
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", labelcolor=ink)
    return figure


def feasibility(
    largest_batch: Callable[[int], int], lengths: Sequence[int], batches: Sequence[int], *,
    name: str = "sequence length", theme: Theme = "light",
) -> Figure:  # fmt: skip
    """Which batch sizes fit at which length (or resolution), as a map of yes and no.

    Args:
        largest_batch: the largest batch at a length; asked once per length.
        lengths: along the horizontal axis.
        batches: along the vertical axis.
        name: of the horizontal axis.
        theme: "light" or "dark".

    Raises:
        WorkloadError: no length or no batch size.
    """
    if not lengths or not batches:
        raise WorkloadError("a map needs at least one length and one batch size")
    limits = [largest_batch(length) for length in lengths]
    fits = np.array([[batch <= limit for limit in limits] for batch in batches])
    with themed(theme) as ink:
        figure = Figure(figsize=(1.5 + 0.9 * len(lengths), 1.5 + 0.45 * len(batches)))
        axes = figure.subplots()
        axes.grid(False)
        for row, column in np.ndindex(fits.shape):
            good = bool(fits[row, column])
            cell = Rectangle(
                (column - 0.5, row - 0.5), 1, 1, edgecolor=ink, linewidth=0.6, fill=good,
                facecolor=LINES[0] if good else "none", hatch="" if good else "///",
            )  # fmt: skip
            axes.add_patch(cell)
            axes.text(
                column, row, "fits" if good else "no", ha="center", va="center", fontsize=9,
                color="#ffffff" if good else ink,
                bbox=None if good else {"fc": axes.get_facecolor(), "ec": "none", "pad": 1.5},
            )  # fmt: skip
        axes.set_xticks(range(len(lengths)), [str(n) for n in lengths])
        axes.set_yticks(range(len(batches)), [str(n) for n in batches])
        axes.set(xlabel=name, ylabel="batch size")
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_ylim(-0.5, len(batches) - 0.5)
    return figure
