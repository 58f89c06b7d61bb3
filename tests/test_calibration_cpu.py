"""Calibration for real, on the CPU: what was predicted against what PyTorch's profiler measured."""

from __future__ import annotations

import pytest

from batchfit.calibration import Calibration, Conditions, Probe, calibrate, find_meter
from batchfit.calibration.calibrate import _model
from batchfit.calibration.job import Job
from batchfit.calibration.probes import ProbeOptions, run_probe
from batchfit.estimator import Outcome, Workload

from .calibration_models import JOBS

QUICK = ProbeOptions(warm_up=2, repeats=1)
#: Samples that the budget is meant for; small enough to be quick.
WANTED = 60


def measure(work: Workload, batch: int, budget: int | None = None) -> Probe:
    meter = find_meter("cpu", budget)
    return run_probe(Job(work, meter.device, ()), meter, batch, budget or 2**62, QUICK)


@pytest.mark.parametrize("name", JOBS)
def test_two_probes_predict_four_times_the_larger_one(name: str) -> None:
    work = JOBS[name]
    budget = (measure(work, WANTED).peak + measure(work, WANTED + 1).peak) // 2
    made = calibrate(work, device="cpu", budget=budget, probes=2, options=QUICK)
    assert all(probe.ran for probe in made.probes), "no run out of memory was provoked"
    assert not made.blind

    # As if only the first two had been made: 4 times the larger one, and its interval.
    first = Calibration.from_dict({**made.to_dict(), "safe": 0}, made._model)
    two = Calibration(
        first.name, made._model, made.probes[:2], made.budget, made.conditions, made.key
    )
    far = 4 * max(probe.batch for probe in two.probes)
    measured = measure(work, far).peak
    assert two.peak(far) == pytest.approx(measured, rel=0.01)
    low, high = two.interval(far, 0.98)
    assert low <= measured <= high

    # The budget is enforced by the meter: the answer runs, one more does not.
    answer = made.answer()
    assert answer.batch == WANTED and answer.verified and answer.outcome is Outcome.FITS
    assert measure(work, WANTED, budget).ran
    more = measure(work, WANTED + 1, budget)
    assert not more.ran and "not enough memory" in (more.out_of_memory or "")


@pytest.mark.parametrize("name", ["cnn", "gpt", "custom loop"])
def test_the_next_power_of_two_exceeds_the_budget(name: str) -> None:
    work = JOBS[name]
    budget = measure(work, 100).peak
    made = calibrate(work, device="cpu", budget=budget, power_of_two=True, options=QUICK)
    assert made.largest_batch() == 64
    assert all(probe.ran for probe in made.probes)
    assert not measure(work, 128, budget).ran


@pytest.mark.parametrize("name", ["cnn", "lstm", "gpt amp bf16"])
def test_a_blind_calibration_comes_close(name: str) -> None:
    work = JOBS[name]
    budget = measure(work, WANTED).peak
    made = calibrate(work, device="cpu", budget=budget, blind=True, options=QUICK)
    assert made.blind and any("blind" in note for note in made.notes)
    assert all(probe.ran for probe in made.probes)
    assert 0.95 * WANTED <= made.largest_batch() <= WANTED


def test_what_the_timeline_does_not_see_is_found_by_the_probes() -> None:
    """oneDNN's packed operands are no storage of an operator: the fit makes them up."""
    work = JOBS["unet"]
    meter = find_meter("cpu")
    model = _model(Job(work, meter.device, ()), meter, None, False, Conditions(), print)
    measured = measure(work, 64)
    assert measured.peak > 1.01 * model.allocated(64)
    made = calibrate(work, device="cpu", budget=4 * measured.peak, verify=False, options=QUICK)
    assert made.peak(128) == pytest.approx(measure(work, 128).peak, rel=0.01)
    assert made._corrected is not None and made._corrected.allocated.c1 > 0
