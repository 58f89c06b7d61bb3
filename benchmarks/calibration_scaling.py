"""Public measurements as probes: two sizes of a job predict its others, and three its knee.

    python benchmarks/calibration_scaling.py

Memory and throughput against batch size of the jobs of milabench on an H100 (tests/data/truth:
scaling_h100.yaml). There is no timeline for them, so this is the blind fit, beside a line through
the same two points, a power law (log-log) and a parabola through three. Writes
benchmarks/results/calibration_scaling.json.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from batchfit.calibration import Probe, Speed
from batchfit.calibration.fit import Fit

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "truth" / "scaling_h100.yaml"
RESULT = ROOT / "benchmarks" / "results" / "calibration_scaling.json"
MIB = 2**20

# nvidia-smi shows what is reserved: near the end of the card (81559 MiB) that is the card, whatever
# the job needs, so such points say nothing.
_FULL = 76_000
# A larger batch that takes less memory than a smaller one is another job (or a failed run).
_DIP = 0.995
_LEVELS = (0.5, 0.8, 0.9, 0.98)

Points = dict[int, tuple[float, float]]


def jobs() -> dict[str, Points]:
    """Job -> batch -> (MiB, samples per second), medians of repeated runs."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    name = ""
    row = re.compile(r"batch_size: (\d+).*memory: ([\d.]+) MiB, perf: ([\d.]+)")
    for line in DATA.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith(" "):
            name = line.rstrip(":")
        elif match := row.search(line):
            batch = int(match[1])
            pair = float(match[2]), float(match[3])
            found.setdefault(name, {}).setdefault(batch, []).append(pair)
    return {
        job: {
            batch: (statistics.median(m for m, _ in rows), statistics.median(p for _, p in rows))
            for batch, rows in sorted(batches.items())
        }
        for job, batches in found.items()
    }


def growing(points: Points) -> Points:
    """The points below the end of the card, if memory grows with the batch throughout."""
    kept = {batch: value for batch, value in points.items() if value[0] < _FULL}
    memory = [value[0] for value in kept.values()]
    steady = all(b >= _DIP * a for a, b in itertools.pairwise(memory))
    return kept if steady else {}


def _probe(batch: int, mib: float, rate: float = 1.0) -> Probe:
    return Probe(batch, int(mib * MIB), None, batch / rate, 0.0, 5, None, 10**12)


def predictions(points: Points) -> list[dict[str, Any]]:
    """Every pair of sizes and every larger one."""
    rows = []
    batches = list(points)
    for low, high in itertools.combinations(batches, 2):
        targets = [b for b in batches if b > high]
        if high < 1.5 * low or not targets:
            continue
        one, two = points[low][0], points[high][0]
        probes = [_probe(low, one), _probe(high, two)]
        fit = Fit(None, probes, [probe.peak for probe in probes])
        slope = (two - one) / (high - low)
        power = np.log(two / one) / np.log(high / low)
        below = [b for b in batches if b < low]
        for target in targets:
            true = points[target][0]
            found = {
                "fit": fit.quantile(target, 0.5) / MIB,
                "line": two + slope * (target - high),
                "log-log": two * (target / high) ** power,
            }
            if below:
                three = [below[0], low, high]
                parabola = np.polyfit(three, [points[b][0] for b in three], 2)
                found["quadratic"] = float(np.polyval(parabola, target))
            spans = [fit.interval(target, level) for level in _LEVELS]
            rows.append(
                {
                    "distance": target / high,
                    "errors": {name: value / true - 1 for name, value in found.items()},
                    "covered": [a <= true * MIB <= b for a, b in spans],
                }
            )
    return rows


def knee(points: Points, share: float = 0.95) -> dict[str, Any] | None:
    """The smallest efficient batch from three timings (an eighth, half, all) and from all."""
    batches = list(points)
    largest = batches[-1]
    chosen = {min(batches, key=lambda b: abs(b - largest * f)) for f in (1 / 8, 1 / 2, 1)}
    if len(batches) < 5 or len(chosen) < 3:
        return None
    probes = [_probe(b, *points[b]) for b in sorted(chosen)]
    found = Speed(probes).efficient(share, largest).batch
    best = max(rate for _, rate in points.values())
    true = min(b for b, (_, rate) in points.items() if rate >= share * best)
    rate = float(np.interp(found, batches, [points[b][1] for b in batches]))
    return {"found": found, "true": true, "largest": largest, "kept": rate / best}


def _bucket(distance: float) -> str:
    for limit in (1.5, 2.5, 5.0, 10.0):
        if distance <= limit:
            return f"up to x{limit:g}"
    return "beyond x10"


def _figures(errors: list[float]) -> dict[str, float]:
    ordered = sorted(map(abs, errors))
    return {
        "cases": len(ordered),
        "median": statistics.median(ordered),
        "p90": ordered[int(0.9 * (len(ordered) - 1))],
        "worst": ordered[-1],
    }


def summary() -> dict[str, Any]:
    """All figures. Each job counts the same in the coverage, however many sizes it has.

    The coverage is of the jobs that the prior of the blind fit was not taken from.
    """
    by_distance: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    coverage: list[list[float]] = []
    used: list[str] = []
    knees = {}
    for name, points in sorted(jobs().items()):
        usable = growing(points)
        rows = predictions(usable)
        for row in rows:
            for method, error in row["errors"].items():
                by_distance[_bucket(row["distance"])][method].append(error)
                by_distance["all"][method].append(error)
        if rows:
            used.append(name)
        if rows and len(used) % 2 == 0:
            coverage.append([statistics.mean(r["covered"][i] for r in rows) for i in range(4)])
        if usable and (found := knee(usable)) is not None:
            knees[name] = found
    return {
        "jobs": len(used),
        "jobs_of_coverage": len(coverage),
        "errors": {
            bucket: {method: _figures(errors) for method, errors in methods.items()}
            for bucket, methods in by_distance.items()
        },
        "coverage": {
            str(level): statistics.mean(job[i] for job in coverage)
            for i, level in enumerate(_LEVELS)
        },
        "knees": knees,
        "knee_throughput_kept": {
            "median": statistics.median(k["kept"] for k in knees.values()),
            "worst": min(k["kept"] for k in knees.values()),
        },
    }


if __name__ == "__main__":
    made = summary()
    RESULT.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(made, indent=1))
