"""``batchfit calibrate``: probe a target on the device here, and answer."""

from __future__ import annotations

import contextlib
import json
import sys
from contextlib import ExitStack
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from batchfit.calibration import Answer, Calibration, CalibrationError, calibrate
from batchfit.estimator import BatchfitError, Workload
from batchfit.estimator.workload import Step

from .console import Table, facts, plain_bytes, render
from .targets import Target, find_target
from .text import settings_in_words

#: From options to arguments of :func:`batchfit.calibration.calibrate`.
_ARGUMENTS = {
    "device": "device", "budget": "budget", "margin": "margin", "risk": "risk", "probes": "probes",
    "verify": "verify", "blind": "blind", "isolate": "isolate", "power_of_two": "power_of_two",
    "multiple_of": "multiple_of", "max_batch": "cap", "dataset": "dataset", "saved": "saved",
}  # fmt: skip


class _TargetStep:
    """Starts a target by its name: unlike the workload itself it can go to another process."""

    def __init__(self, target: str, given: dict[str, Any]) -> None:
        self._order = (target, given)

    def __call__(self, device: torch.device) -> Step:
        target, given = self._order
        # What the target put on sys.path stays there: the step may import as it runs.
        return find_target(target, given, ExitStack()).workload.start(device)


def calibrate_target(text: str, given: dict[str, Any]) -> tuple[str, bool]:
    """What to print, and whether any batch fits.

    Args:
        text: the target, as on the command line.
        given: the options that the user gave.

    Raises:
        BatchfitError: anything that the user must settle.
    """
    arguments = {to: given[name] for name, to in _ARGUMENTS.items() if name in given}
    with ExitStack() as stack, _Log() as log:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        log(f"loading {text}")
        target = find_target(text, given, stack)
        work = target.workload
        if "isolate" in given:
            work = Workload.from_step(_TargetStep(text, given), name=text)
        try:
            made = calibrate(work, progress=log, **arguments)
        except (BatchfitError, KeyboardInterrupt):
            raise
        except Exception as error:  # of the user's own code: said as what it is
            raise CalibrationError(f"the step raised {type(error).__name__}: {error}") from error
    answer = made.answer()
    if "as_json" in given:
        return json.dumps(as_json(target, made, answer, given), indent=2), answer.batch > 0
    return as_text(target, made, answer, given), answer.batch > 0


class _Log:
    """Says on stderr what is done: a running line on a terminal, and a line for each result."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False, markup=False)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("starting", total=None)
        self._terminal = console.is_terminal

    def __call__(self, text: str) -> None:
        if text.startswith(("probing", "tracing", "loading")):
            self._progress.update(self._task, description=text)
        else:
            self._progress.console.print(text, soft_wrap=True)

    def __enter__(self) -> _Log:
        if self._terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            self._progress.stop()


def as_text(target: Target, made: Calibration, answer: Answer, given: dict[str, Any]) -> str:
    """What ``batchfit calibrate`` prints."""
    colour = "green" if answer.batch else "red"
    rows: list[tuple[str, str | Text]] = [("largest batch", Text(_said(answer), style=colour))]
    rows.append(("budget", str(made.budget)))
    rows += _extras(made, answer, given)
    table = Table(["batch", "allocated", "reserved", "s/step", "samples/s", "predicted"])
    for probe in made.probes:
        if not probe.ran:
            table.row(str(probe.batch), "out of memory", "", "", "", "")
            continue
        low, high = made.interval(probe.batch)
        table.row(
            str(probe.batch), plain_bytes(probe.peak),
            "-" if probe.reserved is None else plain_bytes(probe.reserved),
            f"{probe.seconds:.3g}", f"{probe.batch / probe.seconds:.4g}",
            f"{plain_bytes(low)} to {plain_bytes(high)}",
        )  # fmt: skip
    notes: list[tuple[str, str | Text]] = [("note", note) for note in (*target.notes, *made.notes)]
    device = made.key.get("device", "")
    parts: list[RenderableType] = [
        Text(f"{target.text} on {device}", style="bold"),
        Text(settings_in_words(target, made.key.get("allocator", "")), style="dim"),
        "",
        facts(rows),
        "",
        table.rich(),
    ]
    if notes:
        parts += ["", facts(notes)]
    return render(*parts)


def _said(answer: Answer) -> str:
    if not answer.batch:
        return f"none: {answer.outcome}; about {plain_bytes(answer.peak)} needed"
    state = "it ran" if answer.verified else f"not run; risk {100 * answer.risk:.2g} %"
    span = f"{plain_bytes(answer.low)} to {plain_bytes(answer.high)}"
    return f"{answer.batch} ({answer.outcome}), which allocates {span}; {state}"


def _extras(
    made: Calibration, answer: Answer, given: dict[str, Any]
) -> list[tuple[str, str | Text]]:
    """Speed, accumulation and epochs, as far as they were asked for and can be told."""
    rows: list[tuple[str, str | Text]] = []
    if not answer.batch:
        return rows
    if len({p.batch for p in made.probes if p.ran}) > 1:
        rows.append(("efficient", str(made.efficient(given.get("throughput", 0.95)))))
        if "dataset" in given:
            seconds = made.speed.epoch(answer.batch, given["dataset"])
            rows.append(("epoch", f"{seconds:.4g} s at batch {answer.batch}"))
            if "epoch_seconds" in given:
                limit = given["epoch_seconds"]
                within = made.within_epoch(limit, given["dataset"])
                said = f"batch {within}" if within else "no batch that fits is fast enough"
                rows.append((f"within {limit:g} s", said))
    if "target_batch" in given:
        plan = made.plan(given["target_batch"], given.get("tuned_for"))
        rows.append((f"for {given['target_batch']}", str(plan)))
        rows += [("", note) for note in plan.notes]
    return rows


def as_json(
    target: Target, made: Calibration, answer: Answer, given: dict[str, Any]
) -> dict[str, Any]:
    """The object of ``--json``; docs/json.md describes it."""
    several = len({p.batch for p in made.probes if p.ran}) > 1
    efficient = made.efficient(given.get("throughput", 0.95)) if several and answer.batch else None
    plan = None
    if "target_batch" in given and answer.batch:
        plan = made.plan(given["target_batch"], given.get("tuned_for"))
    return {
        "schema": "batchfit.calibrate/1",
        "target": target.text,
        "key": made.key,
        "blind": made.blind,
        "budget_bytes": made.budget.bytes,
        "budget": str(made.budget),
        "answer": {
            "batch": answer.batch,
            "outcome": answer.outcome.name.lower(),
            "peak_bytes": answer.peak,
            "low_bytes": answer.low,
            "high_bytes": answer.high,
            "risk": answer.risk,
            "verified": answer.verified,
        },
        "probes": [probe.to_dict() for probe in made.probes],
        "efficient": None
        if efficient is None
        else {"batch": efficient.batch, "low": efficient.low, "high": efficient.high},
        "plan": None
        if plan is None
        else {
            "micro_batch": plan.micro_batch,
            "accumulate": plan.accumulate,
            "ranks": plan.ranks,
            "notes": list(plan.notes),
        },
        "notes": [*target.notes, *made.notes],
    }
