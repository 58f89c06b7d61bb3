"""Calibration as a user meets it: answers, bad input, bad luck, saved files, other processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchfit.calibration import (
    Calibration,
    CalibrationError,
    Conditions,
    DeviceBudget,
    Memory,
    Probe,
    ProbeOptions,
    StaleCalibration,
    calibrate,
    find_meter,
)
from batchfit.calibration import meter_cpu as cpu
from batchfit.calibration.answer import plan_batch
from batchfit.calibration.budget import measure_budget
from batchfit.calibration.isolate import isolated
from batchfit.calibration.job import Job
from batchfit.calibration.models import BlindModel
from batchfit.calibration.rounds import Rounds
from batchfit.calibration.search import bisection, doubling, halving
from batchfit.calibration.throughput import Speed
from batchfit.estimator import BudgetError, Outcome, Workload, WorkloadError
from batchfit.estimator.units import GIB, MIB

from . import calibration_models as models

QUICK = ProbeOptions(warm_up=2, repeats=2)


def rows(b: int) -> torch.Tensor:
    return torch.randn(b, 64)


def job(**options: Any) -> Workload:
    return models.work(models.mlp, rows, **options)


def quick(work: Any, budget: Any = "2MiB", **options: Any) -> Calibration:
    return calibrate(work, device="cpu", budget=budget, options=QUICK, **options)


# -- answers ---------------------------------------------------------------------------------


def test_the_short_form_and_every_condition() -> None:
    log: list[str] = []
    model = models.mlp()
    made = quick(model, example_inputs=torch.randn(4, 64), optimizer="sgd", progress=log.append)
    largest = made.largest_batch()
    assert largest > 64 and made.answer().outcome is Outcome.FITS
    assert made.largest_batch(multiple_of=7) == largest - largest % 7
    assert made.largest_batch(power_of_two=True) == 2 ** (largest.bit_length() - 1)
    capped = made.answer(cap=50)
    assert (capped.batch, capped.outcome, capped.verified) == (50, Outcome.CAPPED, True)
    assert made.largest_batch(dataset=60) == 60
    assert made.largest_batch(risk=0.001) <= largest
    assert made.largest_batch("1MiB") < largest < made.largest_batch("4MiB")
    assert not made.answer("4MiB").verified
    assert any(line.startswith("batch ") for line in log)
    assert f"{largest}: the largest batch that fits" in str(made)
    assert made.risk(largest) < 0.01 and made.risk(2 * largest) > 0.99
    assert "Sequential" in repr(made)


def test_a_function_is_probed_blind() -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters())

    def step(batch: int) -> None:
        model(rows(batch)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    before = [p.detach().clone() for p in model.parameters()]
    made = quick(step)
    assert made.blind and made.name == "step"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    same = quick(job(optimizer="sgd", loss="mse"))
    assert made.largest_batch() == pytest.approx(same.largest_batch(), rel=0.1)


@pytest.mark.parametrize(
    ("largest", "target", "options", "expected"),
    [
        (48, 256, {}, (32, 8)),
        (300, 256, {}, (256, 1)),
        (48, 256, {"multiple_of": 8}, (32, 8)),
        (100, 96, {"power_of_two": True}, (32, 3)),
        (10, 1, {}, (1, 1)),
    ],
)
def test_micro_batches(largest: int, target: int, options: Any, expected: Any) -> None:
    plan = plan_batch(largest, target, Conditions(**options))
    assert (plan.micro_batch, plan.accumulate) == expected
    assert plan.effective == target and not plan.notes


def test_a_target_that_nothing_divides_and_the_learning_rate() -> None:
    plan = plan_batch(10, 97, Conditions())  # a prime
    assert plan.micro_batch == 10 and plan.accumulate == 10
    assert "100 samples per step instead of 97" in plan.notes[0]
    assert "1.03" in plan.notes[1] and "not changed" in plan.notes[1]
    plan = plan_batch(64, 256, Conditions(), tuned_for=64)
    assert "multiply it by 4" in plan.notes[0] and "by 2;" in plan.notes[0]
    assert plan_batch(64, 256, Conditions(), ranks=4).effective == 256
    with pytest.raises(WorkloadError, match="shared by 3 ranks"):
        plan_batch(64, 256, Conditions(), ranks=3)
    with pytest.raises(WorkloadError, match="no batch fits"):
        plan_batch(0, 256, Conditions())


def test_speed() -> None:
    def timed(batch: int, noise: float = 1.0) -> Probe:
        seconds = (0.01 + 0.001 * batch) * noise
        return Probe(batch, 1, None, seconds, 0.0, 5, None, 10)

    speed = Speed([timed(8), timed(64), timed(128)])
    assert speed.fixed == pytest.approx(0.01, rel=0.02)
    found = speed.efficient(0.95, 128)
    # 95 % of 128 / 0.138: B / (0.01 + 0.001 B) = 881.2 at B = 74.1
    assert found.batch == 75 and found.low <= 75 <= found.high and "95 %" in str(found)
    assert speed.epoch(100, 1000) == pytest.approx(10 * 0.11, rel=0.01)
    assert speed.within_epoch(1.2, 1000, 128) == 128
    assert speed.within_epoch(0.9, 1000, 128) == 0
    assert Speed([timed(8), timed(64, 1.3), timed(128)]).efficient().batch > 0
    with pytest.raises(CalibrationError, match="two probes"):
        Speed([timed(8)])
    with pytest.raises(WorkloadError, match="share"):
        speed.efficient(1.5)
    with pytest.raises(WorkloadError, match="above 0 seconds"):
        speed.within_epoch(0, 10, 10)


def test_searches() -> None:
    def runs(batch: int) -> bool:
        return batch <= 100

    assert halving(runs, 1024).largest == 64
    assert doubling(runs, 2**20).largest == 100 == bisection(runs, 0, 4096).largest
    assert doubling(runs, 80).largest == 80
    assert halving(lambda b: False, 8) == halving(lambda b: False, 8)
    assert halving(lambda b: False, 8).largest == 0 == doubling(lambda b: False, 8).largest


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cap": 0}, "cap must be a positive number of samples, found 0"),
        ({"dataset": -1}, "dataset must be a positive number"),
        ({"risk": 0}, "risk is the accepted probability"),
        ({"risk": 0.7}, "risk is the accepted probability"),
        ({"multiple_of": 0}, "multiple_of must be a positive integer"),
        ({"cap": 4, "multiple_of": 8}, "no batch size up to 4 is a multiple of 8"),
        ({"probes": 0}, "probes must be a positive number of runs"),
    ],
)
def test_conditions_that_nothing_meets(options: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        quick(job(), **options)


def test_what_is_no_job() -> None:
    with pytest.raises(WorkloadError, match="takes a Workload, a module"):
        quick(3)
    with pytest.raises(WorkloadError, match="go with a module only"):
        quick(job(), example_inputs=torch.zeros(2, 64))
    with pytest.raises(WorkloadError, match="unexpected keyword argument 'colour'"):
        quick(models.mlp(), example_inputs=torch.zeros(2, 64), colour=3)
    with pytest.raises(WorkloadError, match="returned NoneType; it must return step"):
        quick(Workload.from_step(lambda device: None))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps", "tpu", "meta"])
def test_devices_that_are_not_here(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(CalibrationError, match=r"torch sees no|names no device|cannot be measured"):
        calibrate(job(), device=device)


def test_budgets() -> None:
    with pytest.raises(BudgetError, match="cannot read"):
        quick(job(), budget="many")
    memory = Memory(total=16 * GIB, free=10 * GIB, reserved=2 * GIB, allocated=GIB)
    budget = measure_budget(memory, GIB, None, None)
    assert budget.outside == 4 * GIB and budget.foreign == GIB and budget.margin == 256 * MIB
    assert budget.bytes == 16 * GIB - 4 * GIB - GIB - 256 * MIB
    for part in ("16.00 GiB total", "4.00 GiB context and other", "1.00 GiB held", "256.00 MiB"):
        assert part in str(budget)
    assert measure_budget(memory, GIB, "8GiB", None).bytes == 8 * GIB
    tight = measure_budget(memory, GIB, "64GiB", None)
    assert tight.bytes == 11 * GIB and "less than the 64.00 GiB asked for" in str(tight)
    full = Memory(total=16 * GIB, free=100 * MIB, reserved=0, allocated=0)
    with pytest.raises(CalibrationError, match=r"no room for a probe.*15.90 GiB context and other"):
        measure_budget(full, 0, None, None)


def test_not_even_the_smallest_fits() -> None:
    made = quick(job(), budget="64KiB")
    answer = made.answer()
    assert answer.batch == 0 and answer.outcome is Outcome.DOES_NOT_FIT
    assert answer.peak > 64 * 1024 and "needed" in str(answer)
    assert len(made.probes) == 1 and not made.probes[0].ran
    with pytest.raises(CalibrationError, match="too few probes"):
        made.interval(4)
    assert Calibration.from_dict(json.loads(json.dumps(made.to_dict()))).largest_batch() == 0


# -- bad luck --------------------------------------------------------------------------------


def test_a_step_that_ignores_its_batch() -> None:
    def build(device: torch.device) -> Any:
        model = models.mlp()
        return lambda batch: model(rows(4)).sum().backward()

    with pytest.raises(CalibrationError, match="probably ignores the batch"):
        quick(Workload.from_step(build))
    step = build(torch.device("cpu"))
    with pytest.raises(CalibrationError, match="the peak is the same at batch 2 and"):
        quick(step, budget="64MiB")


def test_a_step_that_leaks() -> None:
    kept = []
    model = models.mlp()

    def step(batch: int) -> None:
        kept.append(model(rows(batch)))

    with pytest.raises(CalibrationError, match=r"more after each call .* it leaks"):
        quick(step, budget="64MiB")


def test_errors_of_the_step_arrive_as_they_are() -> None:
    class Own(Exception):
        pass

    def step(batch: int) -> None:
        raise Own("a fault of mine")

    with pytest.raises(Own, match="a fault of mine"):
        quick(step)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        quick(models.work(models.mlp, lambda b: torch.randn(b, 63)))


def test_ctrl_c_is_no_out_of_memory() -> None:
    def step(batch: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quick(step)


class Jumpy:
    """A device on which the peak is what a table says, for the order of the probes."""

    def __init__(self, peak: Any, budget: int) -> None:
        self.peak, self.budget = peak, budget
        self.asked: list[int] = []

    def run(self, batch: int) -> Probe:
        self.asked.append(batch)
        peak = int(self.peak(batch))
        if peak > self.budget:
            return Probe(batch, 0, None, 0.0, 0.0, 1, "out", self.budget)
        return Probe(batch, peak, None, 0.1 * batch, 0.0, 3, None, self.budget)

    def rounds(self, **options: Any) -> Rounds:
        budget = DeviceBudget(self.budget, 0, 0, 0, self.budget)
        blind = BlindModel("x", "a test")
        return Rounds(blind, budget, Conditions(), self.run, **options)


def test_a_failed_answer_is_stepped_back_from() -> None:
    """A jump of a third at batch 80: the line of the small probes is too low there."""
    device = Jumpy(lambda b: (1000 + 100 * b) * (1.4 if b >= 80 else 1.0) * MIB, 12_000 * MIB)
    rounds = device.rounds()
    rounds.explore()
    safe = rounds.verify()
    failed = [p.batch for p in rounds.probes if not p.ran]
    assert failed and min(failed) >= 80
    assert 74 <= safe < 80 and safe in [p.batch for p in rounds.probes if p.ran]


def test_a_probe_that_disagrees_is_reported() -> None:
    probes = [
        Probe(b, int((1000 + 100 * b) * f * MIB), None, 1.0, 0.0, 3, None, 20_000 * MIB, retries=r)
        for b, f, r in ((8, 1, 0), (16, 1, 0), (32, 1, 0), (64, 1.5, 0), (128, 1, 0))
    ]
    budget = DeviceBudget(20_000 * MIB, 0, 0, 0)
    made = Calibration("x", BlindModel("x", "a test"), probes, budget, Conditions(), {"job": "x"})
    found = [n for n in made.notes if n.startswith("batch 64 took")]
    assert len(found) == 1 and "more than the other probes say" in found[0]
    assert "likely reason: the peak lies in another part of the step" in found[0]


# -- files -----------------------------------------------------------------------------------


def test_a_saved_calibration_costs_no_probe(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    calls = []
    made = quick(job(), saved=path, progress=calls.append)
    assert any("probing" in call for call in calls)
    calls.clear()
    again = quick(job(), saved=path, progress=calls.append)
    assert not any("probing" in call for call in calls)
    assert again.largest_batch() == made.largest_batch()
    assert again.answer().peak == made.answer().peak and again.answer().verified
    loaded = Calibration.load(path)
    assert loaded.largest_batch() == made.largest_batch() and loaded.probes == made.probes
    for batch in (16, 64, 128, loaded.largest_batch()):  # lines in a table: a little above
        assert 0.999 * made.peak(batch) <= loaded.peak(batch) <= 1.02 * made.peak(batch)
    # for another budget: from the same probes
    other = quick(job(), budget="1MiB", saved=path, progress=calls.append)
    assert other.largest_batch() < made.largest_batch()
    assert not any("probing" in call for call in calls)
    # another job: calibrated anew, with a warning that says what changed
    with pytest.warns(UserWarning, match="the workload .* changed"):
        changed = quick(job(optimizer="sgd"), saved=path)
    assert changed.key["job"] != made.key["job"]


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("device", "Tesla T4", "the device .was Tesla T4"),
        ("torch", "1.0", "torch .was 1.0"),
        ("cudnn", "90100", "cuDNN .was 90100"),
        ("allocator", "expandable_segments:True", "the allocator's settings"),
        ("precision", "fp16", None),
    ],
)
def test_a_calibration_of_elsewhere_is_refused(
    tmp_path: Path, part: str, value: str, message: str | None
) -> None:
    path = tmp_path / "job.json"
    quick(job(), saved=path)
    values = json.loads(path.read_text())
    values["key"][part] = value
    path.write_text(json.dumps(values))
    if message is None:  # of the workload, which load() takes on trust; calibrate() does not
        Calibration.load(path)
        with pytest.warns(UserWarning, match="the precision"):
            quick(job(), saved=path)
        return
    with pytest.raises(StaleCalibration, match=message):
        Calibration.load(path)
    assert Calibration.read(path).largest_batch() > 0
    if part == "driver":
        assert Calibration.load(path).notes


def test_a_new_driver_is_said_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    quick(job(), saved=path)
    values = json.loads(path.read_text())
    values["key"]["driver"] = "550"
    path.write_text(json.dumps(values))
    assert any("the driver (was 550" in note for note in Calibration.load(path).notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "is not a saved calibration"),
        ("[1]", "is not a calibration this version reads"),
        ('{"schema": "batchfit.calibration/99"}', "schema 'batchfit.calibration/99'"),
        ('{"schema": "batchfit.calibration/1"}', "is damaged"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=message):
        Calibration.load(path)
    with pytest.raises(CalibrationError, match="cannot read the calibration"):
        Calibration.load(tmp_path / "none.json")
    with pytest.raises(CalibrationError, match="cannot write the calibration"):
        quick(job(), cap=8).save(tmp_path / "no" / "folder.json")


# -- other processes -------------------------------------------------------------------------


def tagged_step(batch: int) -> None:
    """A step that can travel to another process."""
    torch.empty(batch * 2**18).fill_(float(os.getpid())).sum()


def dying_step(batch: int) -> None:
    os._exit(3)


def wrong_step(batch: int) -> None:
    raise LookupError(f"at batch {batch}")


def alone(step: Any) -> Probe:
    meter = find_meter("cpu")
    return isolated(Job(step, meter.device, ()), meter, 4, 2**40, ProbeOptions(1, 1))


def test_a_probe_in_a_process_of_its_own() -> None:
    probe = alone(tagged_step)
    assert probe.ran and probe.peak == pytest.approx(4 * MIB, rel=0.01)
    with pytest.raises(CalibrationError, match=r"died \(exit status 3\)"):
        alone(dying_step)
    with pytest.raises(LookupError, match="at batch 4"):
        alone(wrong_step)
    with pytest.raises(CalibrationError, match="cannot be sent to a process of its own"):
        alone(lambda batch: None)


def test_the_host_says_how_much_memory_it_has() -> None:
    total, free = cpu._host_memory()
    assert 0 < free <= total


def test_a_module_with_lazy_data_is_told_apart() -> None:
    with pytest.raises(WorkloadError, match="lazy"):
        quick(nn.LazyLinear(3), example_inputs=torch.zeros(2, 64))
