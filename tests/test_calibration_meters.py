"""The accelerators' meter against a stand-in for ``torch.cuda``, as there is no GPU here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchfit.calibration import CalibrationError, Meter, ProbeOptions
from batchfit.calibration.budget import measure_budget
from batchfit.calibration.gpu import gpu_of
from batchfit.calibration.job import Job
from batchfit.calibration.meters import AcceleratorMeter
from batchfit.calibration.probes import run_probe

MIB, GIB = 2**20, 2**30
QUICK = ProbeOptions(warm_up=1, repeats=2)


class Card:
    """A GPU of 16 GiB with a context of 500 MiB, another process, and PyTorch's counters."""

    def __init__(self) -> None:
        self.total, self.context, self.others = 16 * GIB, 500 * MIB, GIB
        self.allocated = self.reserved = self.peak = self.peak_reserved = 0
        self.fraction, self.retries, self.log = 1.0, 0, ["start"]

    def take(self, size: int) -> None:
        grown = max(self.reserved, -(-(self.allocated + size) // (2 * MIB)) * 2 * MIB)
        if grown > self.fraction * self.total:
            self.retries += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot.")
        self.allocated += size
        self.reserved = grown
        self.peak = max(self.peak, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def give(self, size: int) -> None:
        self.allocated -= size

    # what AcceleratorMeter calls
    def synchronize(self, device: Any = None) -> None:
        self.log.append("synchronize")

    def empty_cache(self) -> None:
        self.reserved = -(-self.allocated // (2 * MIB)) * 2 * MIB

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {"num_alloc_retries": self.retries}

    def max_memory_allocated(self, device: Any) -> int:
        return self.peak

    def max_memory_reserved(self, device: Any) -> int:
        return self.peak_reserved

    def memory_allocated(self, device: Any) -> int:
        return self.allocated

    def memory_reserved(self, device: Any) -> int:
        return self.reserved

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return self.total - self.context - self.others - self.reserved, self.total

    def set_per_process_memory_fraction(self, fraction: float, device: Any) -> None:
        self.fraction = fraction

    def get_per_process_memory_fraction(self, device: Any) -> float:
        return self.fraction


def meter_on(card: Card, limit: int | None = None) -> AcceleratorMeter:
    meter = AcceleratorMeter(torch.device("cuda", 0), limit)
    meter._torch = card
    return meter


def stepping(card: Card, per_sample: int = 100 * MIB) -> Job:
    def step(batch: int) -> None:
        card.take(batch * per_sample)
        card.give(batch * per_sample)

    return Job(step, torch.device("cuda", 0), ())


def test_peaks_are_those_of_the_job_alone() -> None:
    card = Card()
    card.take(3 * GIB)  # of something else in this process
    meter: Meter = meter_on(card)
    probe = run_probe(stepping(card), meter, 8, 10 * GIB, QUICK)
    assert probe.peak == 800 * MIB and probe.reserved == 800 * MIB and probe.steps == 3
    assert card.reserved == 3 * GIB, "the cache was given back"


def test_the_limit_is_enforced_and_lifted() -> None:
    card = Card()
    meter = meter_on(card, 4 * GIB)
    assert run_probe(stepping(card), meter, 40, 4 * GIB, QUICK).ran
    probe = run_probe(stepping(card), meter, 41, 4 * GIB, QUICK)
    assert not probe.ran and "CUDA out of memory" in (probe.out_of_memory or "")
    assert card.fraction == 1.0
    card.fraction = 0.1  # of the user: it stays, and it is the smaller one
    assert not run_probe(stepping(card), meter, 20, 4 * GIB, QUICK).ran
    assert card.fraction == 0.1
    with pytest.raises(CalibrationError, match=r"is more than the 16\.00 GiB"):
        run_probe(stepping(card), meter_on(card, 20 * GIB), 1, 4 * GIB, QUICK)


def test_errors_lift_the_limit_too() -> None:
    card = Card()

    def step(batch: int) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_probe(Job(step, torch.device("cuda", 0), ()), meter_on(card, GIB), 1, GIB, QUICK)
    assert card.fraction == 1.0


def test_an_ambiguous_error_counts_on_a_full_card_only() -> None:
    def engine(batch: int) -> None:
        raise RuntimeError("GET was unable to find an engine to execute this computation")

    card = Card()
    job = Job(engine, torch.device("cuda", 0), ())
    with pytest.raises(RuntimeError, match="unable to find an engine"):
        run_probe(job, meter_on(card), 1, GIB, QUICK)
    card.others = 15 * GIB
    assert not run_probe(job, meter_on(card), 1, GIB, QUICK).ran


def test_the_budget_names_what_is_subtracted() -> None:
    card = Card()
    card.take(2 * GIB)
    budget = measure_budget(meter_on(card).memory(), GIB, None, "256MiB")
    assert budget.outside == GIB + 500 * MIB and budget.foreign == GIB
    assert budget.bytes == 16 * GIB - budget.outside - GIB - 256 * MIB
    card.fraction = 0.5  # only half of the card is this process's
    assert measure_budget(meter_on(card).memory(), 2 * GIB, None, 0).bytes == 8 * GIB


@pytest.mark.parametrize(
    ("name", "capability", "expected"),
    [
        ("NVIDIA GeForce RTX 3090", (8, 6), "RTX 3090"),
        ("NVIDIA Unheard 9", (9, 0), "NVIDIA Unheard 9"),
    ],
)
def test_the_gpu_in_front_of_us(
    name: str, capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=20 * GIB,
        multi_processor_count=82,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen)
    gpu = gpu_of(meter_on(Card()))
    assert (gpu.name, gpu.capability, gpu.total_bytes) == (expected, capability, 20 * GIB)
