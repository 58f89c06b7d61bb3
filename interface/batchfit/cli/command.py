"""The commands that look at a target: from the options to the text that is printed."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from .comparison import comparison_json, comparison_text
from .console import Progress
from .explain import explanation_json, explanation_text
from .plan import Plan
from .report import as_json, make_report
from .snapshots import check_output, compare_with, snapshot_text, trace_job
from .targets import find_target
from .text import as_text


@contextlib.contextmanager
def _work() -> Iterator[tuple[contextlib.ExitStack, Progress]]:
    """What users' code prints, and says in warnings, does not belong to the result."""
    progress = Progress()
    with contextlib.ExitStack() as stack:
        stack.callback(progress.clear)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if not sys.warnoptions:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        yield stack, progress


def estimate_target(target: str, given: dict[str, Any]) -> tuple[str, bool]:
    """What to print, and whether every batch that was asked for fits.

    Args:
        target: as on the command line.
        given: the options that the user gave.

    Raises:
        BatchfitError: anything that the user must settle.
    """
    with _work() as (stack, progress):
        progress(f"loading {target}")
        plan = Plan.of(given)
        report = make_report(find_target(target, given, stack), plan, progress)
    if "as_json" in given:
        return json.dumps(as_json(report), indent=2), report.fits
    return as_text(report), report.fits


def snapshot_target(target: str, given: dict[str, Any]) -> str:
    """Write the predicted snapshot to ``--output``; returns what to print. As `estimate_target`."""
    output = given["output"]
    check_output(output, force="force" in given)
    with _work() as (stack, progress):
        job = trace_job(target, given, stack, progress)
        progress(f"writing {output}")
        job.write(output)
    return snapshot_text(job, output)


def compare_target(target: str, given: dict[str, Any]) -> str:
    """Lay the snapshot of ``--compare`` beside the prediction. As `estimate_target`."""
    with _work() as (stack, progress):
        compared = compare_with(given["compare"], target, given, stack, progress)
    if "as_json" in given:
        return json.dumps(comparison_json(compared), indent=2)
    return comparison_text(compared)


def explain_target(target: str, given: dict[str, Any]) -> str:
    """The lines from what was asked for to what nvidia-smi shows. As `estimate_target`."""
    with _work() as (stack, progress):
        job = trace_job(target, given, stack, progress)
        if "as_json" in given:
            return json.dumps(explanation_json(job), indent=2)
        return explanation_text(job)
