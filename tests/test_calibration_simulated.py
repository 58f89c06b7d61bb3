"""Calibration of random jobs on simulated devices, whose memory is hidden by mechanisms.

The figures of 500 cases are in benchmarks/results/calibration_simulated.json, made by
``benchmarks/calibration_simulated.py``; here fewer are run. BATCHFIT_CASES says how many.
"""

from __future__ import annotations

import math
import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .simulated_cases import LEVELS, Case, calibrated
from .simulated_device import SimulatedDevice

CASES = int(os.environ.get("BATCHFIT_CASES", "60"))


def allowed(share: float, points: float, count: int) -> float:
    """Points of a share, and two standard errors of what so few cases can tell."""
    return points + 2 * math.sqrt(share * (1 - share) / count)


def test_random_devices() -> None:
    found: list[Case] = []

    @settings(
        max_examples=CASES, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.integers(min_value=0, max_value=2**32 - 1))
    def one(seed: int) -> None:
        case = calibrated(seed)
        found.append(case)
        # Of every single case: the answer was run, and runs again, with another process about.
        assert case.survived, case
        assert case.runs <= 10 and case.failures <= 4, case

    one()
    count = len(found)
    close = sum(case.close for case in found) / count
    assert close >= 0.95 - 2 * math.sqrt(0.95 * 0.05 / count)
    for place, level in enumerate(LEVELS):
        share = sum(case.covered[place] for case in found) / count
        assert share >= level - allowed(level, 0.03, count), (level, share)
        if level >= 0.9:  # and not by being wider than stated
            assert share <= level + allowed(level, 0.03, count), (level, share)
    assert sum(case.runs for case in found) / count < 5


def test_the_simulated_device_hides_memory_and_has_a_hard_limit() -> None:
    """The comparison can fail: what runs is not what the calibration is told."""
    hidden = [
        device.run(8, 2**62, quiet=True).peak / device.model.allocated(8) - 1
        for device in map(SimulatedDevice, range(30))
    ]
    assert max(hidden) > 0.03 and min(hidden) < 0.001
    device = SimulatedDevice(1)
    largest = device.largest()
    assert device.run(largest, quiet=True).ran
    assert not device.run(2 * largest, quiet=True).ran
