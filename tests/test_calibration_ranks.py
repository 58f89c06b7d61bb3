"""Two processes under torchrun: one answer, and nobody waits for a rank that has failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

SCRIPT = Path(__file__).parent / "ranks_job.py"

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks got."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", "2", str(SCRIPT), str(folder)]  # fmt: skip
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_one_rank_fails_at_a_smaller_batch(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["wall"] for rank in ranks)
    assert first["batch"] == second["batch"] and 57 <= first["batch"] <= 60
    assert first["asked"] == second["asked"] and first["ranks"] == "2"
    assert all(first["ran"]) and not all(second["ran"])


def test_the_smallest_answer_is_taken(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["uneven"] for rank in ranks)
    assert first["batch"] == second["batch"] and 63 <= first["batch"] <= 66
    assert first["asked"] == second["asked"]


def test_a_fault_of_one_rank_is_told_to_all(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["fault"] for rank in ranks)
    assert first["error"] == "CalibrationError: rank 1 failed: ValueError: a fault of rank 1"
    assert second["error"] == "ValueError: a fault of rank 1"
