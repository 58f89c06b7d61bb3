"""Curves through a few measured batch sizes, beside batchfit's own shifted to one of them.

Each series holds measured bytes by batch size. The smallest batches (1 left out, where code and
kernels differ) are the probes; the largest is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .report import PeerRow, peer_row

Point = dict[str, Any]  # batch, measured, predicted
Fit = Callable[[Sequence[Point], int], float]


def _polynomial(degree: int) -> Fit:
    def fit(probes: Sequence[Point], batch: int) -> float:
        x, y = ([float(p[key]) for p in probes] for key in ("batch", "measured"))
        return float(np.polyval(np.polyfit(x, y, degree), batch))

    return fit


def power_law(probes: Sequence[Point], batch: int) -> float:
    """A line through the logarithms."""
    x, y = (np.log([float(p[key]) for p in probes]) for key in ("batch", "measured"))
    return float(np.exp(np.polyval(np.polyfit(x, y, 1), np.log(batch))))


# Name -> number of probes, curve. What is fitted stands in the page.
FITS: dict[str, tuple[int, Fit]] = {
    "line, 2 probes": (2, _polynomial(1)),
    "log-log, 2 probes": (2, power_law),
    "line, 3 probes": (3, _polynomial(1)),
    "log-log, 3 probes": (3, power_law),
    "quadratic, 3 probes": (3, _polynomial(2)),
}


def series(records: Sequence[dict[str, Any]]) -> dict[str, list[Point]]:
    """Id -> points, ascending: the scaling table, and LoRA runs at micro-batch 1, 2 and 4."""
    found = {r["id"]: r["points"] for r in records if "points" in r}
    lora = [
        {"batch": int(r["id"].rpartition("_mb")[2]), **r}
        for r in records
        if "stablelm" in r["id"] and "predicted" in r
    ]
    if len(lora) == 3:
        found["peaks/litgpt_res_stablelm-base-alpha-3b"] = sorted(lora, key=lambda p: p["batch"])
    return found


def _error(value: float, point: Point) -> dict[str, Any]:
    return {"error_pct": round(100 * (value / point["measured"] - 1), 4)}


def rows(records: Sequence[dict[str, Any]]) -> list[PeerRow]:
    """One row per curve; asked are the series, a curve answers where there are probes enough."""
    every = series(records)
    answers: dict[str, dict[str, Any]] = {"batchfit, shifted to 1 probe": {}}
    for name, points in every.items():
        known = [p for p in points if p["batch"] > 1] if len(points) > 3 else points
        last = known[-1]
        first = known[0]
        shifted = first["measured"] + last["predicted"] - first["predicted"]
        answers["batchfit, shifted to 1 probe"][name] = _error(shifted, last)
        for curve, (count, fit) in FITS.items():
            enough = len(known) > count
            answers.setdefault(curve, {})[name] = (
                _error(fit(known[:count], last["batch"]), last)
                if enough
                else {"cannot": f"{len(known)} batch sizes: no probes left"}
            )
    asked = [{"id": name} for name in every]
    return [peer_row(curve, asked, found) for curve, found in answers.items()]
