"""``batchfit validate``: a saved prediction beside what was measured later."""

from __future__ import annotations

import json
from typing import Any

from rich.text import Text

from batchfit.calibration import Calibration, CalibrationError
from batchfit.calibration.logs import read_log
from batchfit.estimator.solve import check_batch
from batchfit.estimator.units import parse_bytes

from .console import facts, plain_bytes, render


def validate_file(path: str, given: dict[str, Any]) -> tuple[str, bool]:
    """What to print, and whether the measurement lies within the interval.

    Raises:
        BatchfitError: the file, the log or a number cannot be read.
    """
    batch = check_batch(given["batch"])
    level = given.get("level", 0.95)
    if not 0 < level < 1:
        raise CalibrationError(f"--level is a probability between 0 and 1, found {level}")
    made = Calibration.load(path) if given.get("here") else Calibration.read(path)
    if "log" in given:
        logged = read_log(given["log"])
        measured, reserved, off = logged.bytes, logged.reserved, logged.resolution
        source = f"{given['log']}, as {logged.trainer} writes it"
    else:
        measured, reserved, off = parse_bytes(given["measured"]), "reserved" in given, 0
        source = "as given"
    if reserved:
        fit = made.reserved_fit
        if fit is None:
            raise CalibrationError(
                f"{path} says nothing of reserved bytes; give the allocated peak"
            )
        predicted, (low, high) = int(fit.quantile(batch, 0.5)), fit.interval(batch, level)
    else:
        predicted, (low, high) = made.peak(batch), made.interval(batch, level)
    within = low - off <= measured <= high + off
    error = predicted / measured - 1 if measured else float("inf")
    if "as_json" in given:
        found = {
            "schema": "batchfit.validate/1", "file": path, "batch": batch,
            "metric": "reserved" if reserved else "allocated", "predicted_bytes": predicted,
            "low_bytes": low, "high_bytes": high, "level": level, "measured_bytes": measured,
            "error": error, "within": within,
        }  # fmt: skip
        return json.dumps(found, indent=2), within
    what = "reserved" if reserved else "allocated"
    verdict = Text(
        f"within the interval of {100 * level:g} %" if within else
        f"outside of the interval of {100 * level:g} %", style="green" if within else "red",
    )  # fmt: skip
    rows: list[tuple[str, str | Text]] = [
        (
            "predicted",
            f"{plain_bytes(predicted)} {what}, {plain_bytes(low)} to {plain_bytes(high)}",
        ),
        ("measured", f"{plain_bytes(measured)}, {source}"),
        ("error", f"{100 * error:+.2f} %"),
        ("verdict", verdict),
    ]
    title = f"{made.name} at batch {batch} on {made.key.get('device', '')}"
    return render(Text(title, style="bold"), "", facts(rows)), within
