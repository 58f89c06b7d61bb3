"""Beside the batch: the longest sequence at a given batch, and the table of both."""

from __future__ import annotations

import pytest
import torch

from batchfit.calibration import ProbeOptions, batch_table, find_meter, longest
from batchfit.calibration.job import Job
from batchfit.calibration.probes import run_probe
from batchfit.estimator import Workload, WorkloadError

from . import calibration_models as models

QUICK = ProbeOptions(warm_up=1, repeats=1)
OPTIONS = {"device": "cpu", "options": QUICK}


def of_length(length: int) -> Workload:
    return models.work(models.Tagger, lambda b: torch.randn(b, length, 16), "sum", optimizer="sgd")


def peak(length: int, batch: int) -> int:
    meter = find_meter("cpu")
    return run_probe(Job(of_length(length), meter.device, ()), meter, batch, 2**60, QUICK).peak


def test_the_longest_sequence_at_a_batch() -> None:
    budget = (peak(24, 8) + peak(32, 8)) // 2
    found = longest(of_length, 8, step=8, cap=32, budget=budget, **OPTIONS)
    assert found.value == 24 and found.calibration.largest_batch() == 8
    assert all(probe.ran for probe in found.calibration.probes)
    none = longest(of_length, 8, step=8, budget="16KiB", **OPTIONS)
    assert none.value == 0 and none.calibration.largest_batch() == 0


def test_the_table_of_batch_and_length() -> None:
    budget = (peak(8, 32) + peak(8, 33)) // 2
    table = batch_table(of_length, [8, 16], budget=budget, **OPTIONS)
    assert table.rows[0] == (8, 32) and 14 <= table.rows[1][1] <= 17
    assert str(table).startswith("8: 32\n16: ")


def test_what_is_no_question() -> None:
    with pytest.raises(WorkloadError, match="at least one value"):
        batch_table(of_length, [])
    with pytest.raises(WorkloadError, match="multiple of 64"):
        longest(of_length, 8, step=64, cap=32)
    with pytest.raises(WorkloadError, match="positive integer"):
        longest(of_length, 0)
