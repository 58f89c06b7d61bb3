"""``batchfit estimate``: from the options to the text that is printed."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from typing import Any

from .console import Progress
from .plan import Plan
from .report import as_json, make_report
from .targets import find_target
from .text import as_text


def estimate_target(target: str, given: dict[str, Any]) -> tuple[str, bool]:
    """What to print, and whether every batch that was asked for fits.

    Args:
        target: as on the command line.
        given: the options that the user gave.

    Raises:
        BatchfitError: anything that the user must settle.
    """
    progress = Progress()
    with contextlib.ExitStack() as stack:
        stack.callback(progress.clear)
        # What the user's code prints does not belong to the result.
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if not sys.warnoptions:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        progress(f"loading {target}")
        plan = Plan.of(given)
        report = make_report(find_target(target, given, stack), plan, progress)
    if "as_json" in given:
        return json.dumps(as_json(report), indent=2), report.fits
    return as_text(report), report.fits
