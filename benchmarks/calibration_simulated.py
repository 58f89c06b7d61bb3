"""Calibrate 500 random jobs on simulated devices; how close, how safe, how honest.

    python benchmarks/calibration_simulated.py [--cases 500]

Writes benchmarks/results/calibration_simulated.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.simulated_cases import LEVELS, Case, calibrated  # noqa: E402
from tests.simulated_device import SimulatedDevice  # noqa: E402

from batchfit.calibration.search import Search, bisection, doubling, halving  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "calibration_simulated.json"


def summary(cases: list[Case], seconds: float) -> dict[str, Any]:
    """The figures of the cases."""
    count = len(cases)
    errors = sorted(abs(case.error) for case in cases)
    return {
        "cases": count,
        "seconds": round(seconds, 1),
        "out_of_memory_after_verification": sum(not case.survived for case in cases),
        "within_2_percent": sum(case.close for case in cases) / count,
        "coverage": {
            str(level): sum(case.covered[place] for case in cases) / count
            for place, level in enumerate(LEVELS)
        },
        "error_before_verification": {
            "median": statistics.median(errors),
            "p90": errors[int(0.9 * count)],
            "worst": errors[-1],
            "median_distance": statistics.median(case.distance for case in cases),
        },
        "runs": {
            "mean": sum(case.runs for case in cases) / count,
            "most": max(case.runs for case in cases),
        },
        "out_of_memory_on_the_way": {
            "mean": sum(case.failures for case in cases) / count,
            "most": max(case.failures for case in cases),
        },
        "missed": [[c.seed, c.truth, c.answer] for c in cases if not c.close],
    }


#: What a user without a prediction would start from, or stop at.
_START = 1024


def searches(seeds: range) -> dict[str, Any]:
    """What searching by trial costs on the same devices: runs, failures, distance from the largest.

    ``samples`` is how many samples a search puts through the model, per sample of the largest
    batch: the time it takes, on a device whose speed does not depend on the batch.
    """
    methods = {
        f"halving from {_START}": lambda runs: halving(runs, _START),
        "doubling, then bisection": lambda runs: doubling(runs, 2**20, start=2),
        f"bisection up to {_START}": lambda runs: bisection(runs, 0, _START),
    }
    found: dict[str, list[tuple[Search, int, int]]] = {name: [] for name in methods}
    for seed in track(seeds, "searching"):
        truth = SimulatedDevice(seed).largest()
        for name, method in methods.items():
            device, tried = SimulatedDevice(seed), list[int]()

            def runs(batch: int, device: Any = device, tried: Any = tried) -> bool:
                tried.append(batch)
                return bool(device.run(batch, device.budget).ran)

            found[name].append((method(runs), truth, sum(tried)))
    return {name: _search_summary(results) for name, results in found.items()}


def _search_summary(results: list[tuple[Search, int, int]]) -> dict[str, Any]:
    count = len(results)
    return {
        "devices": count,
        "runs": sum(s.runs for s, _, _ in results) / count,
        "out_of_memory": sum(s.failures for s, _, _ in results) / count,
        "samples": statistics.median(tried / truth for _, truth, tried in results),
        "share_of_largest": statistics.median(min(s.largest / t, 1.0) for s, t, _ in results),
        "above_largest": sum(s.largest > t for s, t, _ in results) / count,
    }


def main() -> None:
    """Run the cases and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    count = parser.parse_args().cases
    start = time.perf_counter()
    cases = [calibrated(seed) for seed in track(range(count), "calibrating")]
    found = summary(cases, time.perf_counter() - start)
    found["searches"] = searches(range(min(count, 200)))
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in found.items() if k != "missed"}, indent=1))


if __name__ == "__main__":
    main()
