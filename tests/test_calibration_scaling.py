"""Public measurements as probes (tests/data/truth/scaling_h100.yaml), without a timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .helpers import load_script

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "calibration_scaling.py"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return dict(load_script(SCRIPT).summary())


def test_two_sizes_predict_the_others(found: dict[str, Any]) -> None:
    assert found["jobs"] >= 25
    errors = found["errors"]
    assert errors["up to x2.5"]["fit"]["median"] < 0.01
    assert errors["up to x5"]["fit"]["median"] < 0.03
    for bucket in errors.values():
        assert bucket["fit"]["median"] <= 1.02 * bucket["line"]["median"]
        assert bucket["fit"]["median"] < bucket["log-log"]["median"]
    assert errors["all"]["fit"]["p90"] < 0.5 * errors["all"]["quadratic"]["p90"]


def test_the_interval_holds_what_it_says(found: dict[str, Any]) -> None:
    """Of the jobs that the prior was not taken from; they are 14, so not to a point."""
    coverage = found["coverage"]
    assert 0.8 <= coverage["0.9"] <= 1.0 and coverage["0.98"] >= 0.9


def test_three_timings_find_the_knee(found: dict[str, Any]) -> None:
    assert len(found["knees"]) >= 20
    assert found["knee_throughput_kept"]["median"] > 0.93
