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


def main() -> None:
    """Run the cases and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    count = parser.parse_args().cases
    start = time.perf_counter()
    cases = [calibrated(seed) for seed in track(range(count), "calibrating")]
    found = summary(cases, time.perf_counter() - start)
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in found.items() if k != "missed"}, indent=1))


if __name__ == "__main__":
    main()
