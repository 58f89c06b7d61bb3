"""The benchmark for CUDA machines, here with a small job on the CPU, and its jobs on paper."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from batchfit.estimator import estimate

from .calibration_models import JOBS
from .helpers import load_script

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(BENCHMARKS / "cuda_calibrate.py")


def test_one_row(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(script.JOBS, "small", JOBS["mlp"])
    monkeypatch.setattr(script, "CAP", 512)
    row = json.loads(json.dumps(script.one("small", "cpu", 1_200_000)))
    truth = row["truth"]
    assert 200 < truth < 512
    for method in ("batchfit", "bisection", "lightning"):
        assert row[method]["batch"] == truth
    assert row["accelerate"]["batch"] <= truth
    assert row["batchfit"]["oom"] == 0 < row["bisection"]["oom"]
    assert row["batchfit"]["runs"] < row["bisection"]["runs"] < row["lightning"]["runs"]
    script.show({"rows": [row, {"job": "x", "limit": 1, "error": "died"}], "not_run": ["y"]})


def test_the_true_largest_is_found_from_any_guess(script: ModuleType) -> None:
    for guess in (0, 1, 60, 99, 100, 101, 3000):
        assert script.true_largest(lambda b: b <= 100, guess) == 100
    assert script.true_largest(lambda b: False, 8) == 0


@pytest.mark.parametrize("name", ["unet fp16 amp", "lstm fp32", "gpt2 checkpointed"])
def test_the_jobs_can_be_predicted(script: ModuleType, name: str) -> None:
    assert len(script.JOBS) >= 12
    made = estimate(script.JOBS[name], gpu="a100-80gb", allocator="")
    assert made.largest_batch("8GiB", margin=0) > 0
    assert torch.is_grad_enabled()
