"""The fit, exactly: corrections, bounds, intervals, runs out of memory as inequalities."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from batchfit.calibration import CalibrationError, Probe
from batchfit.calibration.fit import Fit
from batchfit.calibration.prior import BLIND, NOISE, WITH_TIMELINE

GB, MB = 10**9, 10**6


def probe(batch: int, peak: int = 0, budget: int = 10**12) -> Probe:
    failed = None if peak else "out of memory"
    return Probe(batch, peak, None, 1.0, 0.0, 3, failed, budget)


def curve(batch: int) -> int:
    return GB + 100 * MB * batch


def fit(points: dict[int, int], failed: dict[int, int] | None = None, blind: bool = False) -> Fit:
    probes = [probe(b, peak) for b, peak in points.items()]
    probes += [probe(b, 0, budget) for b, budget in (failed or {}).items()]
    return Fit(None if blind else curve, probes, list(points.values()))


def test_probes_that_agree_with_the_timeline_leave_it_alone() -> None:
    made = fit({4: curve(4), 16: curve(16)})
    assert abs(made.c0) < MB and abs(made.c1) < 1000
    low, high = made.interval(64)
    assert low <= curve(64) <= high and high - low < 0.005 * curve(64)


def test_a_fixed_excess_is_no_growing_one() -> None:
    made = fit({4: curve(4) + 300 * MB, 16: curve(16) + 300 * MB})
    assert made.c0 == pytest.approx(300 * MB, rel=0.01) and abs(made.c1) < 10**5
    assert made.mean(128) == pytest.approx(curve(128) + 300 * MB, rel=0.002)


def test_three_probes_on_a_line_tell_the_growing_part() -> None:
    points = {b: curve(b) + 5 * MB * b for b in (4, 16, 64)}
    made = fit(points)
    assert made.c1 == pytest.approx(5 * MB, rel=0.1)
    assert made.mean(128) == pytest.approx(curve(128) + 5 * MB * 128, rel=0.002)


def test_the_interval_is_wide_after_two_probes_and_narrows_with_each() -> None:
    def width(sizes: tuple[int, ...]) -> float:
        made = fit({b: curve(b) + 5 * MB * b for b in sizes})
        low, high = made.interval(256)
        return (high - low) / curve(256)

    assert width((8, 32)) > 0.05
    assert width((8, 32)) > width((8, 32, 64)) > width((8, 32, 64, 128))


def test_the_interval_widens_with_the_distance() -> None:
    made = fit({8: curve(8) + 40 * MB, 32: curve(32) + 100 * MB})
    widths = [(lambda span: span[1] - span[0])(made.interval(b)) / curve(b) for b in (32, 64, 128)]
    assert widths == sorted(widths) and widths[0] < 0.2 * widths[1]


def test_a_run_out_of_memory_is_a_bound() -> None:
    """Without it the timeline is believed; with it the peak there must be above the budget."""
    points = {4: curve(4) + 10 * MB, 16: curve(16) + 100 * MB}
    budget = curve(64) + 600 * MB
    free, bound = fit(points), fit(points, {64: budget})
    assert free.exceeds(64, budget) < 0.5
    assert bound.exceeds(64, budget) > 0.99
    assert bound.quantile(32, 0.5) > free.quantile(32, 0.5)
    # a bound that says nothing new changes nothing
    far = fit(points, {640: budget})
    assert far.quantile(32, 0.5) == pytest.approx(free.quantile(32, 0.5), rel=1e-3)


def test_the_bound_is_that_of_a_direct_computation() -> None:
    """Two jointly normal variables, one of them known to be above a value: by quadrature."""
    made = fit({8: 2 * GB, 16: 3 * GB}, {64: 10 * GB}, blind=True)
    mean, covariance = made._gaussian([48, 64])
    free = fit({8: 2 * GB, 16: 3 * GB}, blind=True)
    limit, value = 10 * GB, made.quantile(48, 0.5)
    total = above = 0.0
    for m, c, w in zip(mean, covariance, free._weights, strict=True):
        u = np.linspace(limit, m[1] + 9 * np.sqrt(c[1, 1]) + limit, 40001)
        density = np.exp(-0.5 * (u - m[1]) ** 2 / c[1, 1]) / np.sqrt(c[1, 1])
        middle = m[0] + c[0, 1] / c[1, 1] * (u - m[1])
        rest = np.sqrt(c[0, 0] - c[0, 1] ** 2 / c[1, 1])
        step = u[1] - u[0]
        total += w * float(density.sum()) * step
        above += w * float((density * ndtr((value - middle) / rest)).sum()) * step
    assert above / total == pytest.approx(0.5, abs=0.02)


def test_a_blind_line_goes_through_its_probes_and_is_never_negative() -> None:
    made = fit({8: 2 * GB, 32: 5 * GB}, blind=True)
    assert made.mean(16) == pytest.approx(3 * GB, rel=0.01)
    assert made.mean(128) == pytest.approx(17 * GB, rel=0.01)
    falling = fit({8: 2 * GB, 32: 2 * GB - 50 * MB}, blind=True)
    assert falling.c1 >= 0 and falling.c0 >= 0
    steep = fit({8: GB, 32: 9 * GB}, blind=True)  # the line through them is below zero at 0
    assert steep.c0 >= 0


@pytest.mark.parametrize("blind", [False, True])
def test_too_few_probes(blind: bool) -> None:
    with pytest.raises(CalibrationError, match="probes ran; a fit needs"):
        fit({8: GB} if blind else {}, {64: GB}, blind)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 4096), min_size=2, max_size=5, unique=True),
    st.floats(-0.1, 0.5), st.floats(-0.05, 0.5), st.integers(1, 8192), st.booleans(),
)  # fmt: skip
def test_quantiles_are_in_order(
    sizes: list[int], c0: float, c1: float, at: int, blind: bool
) -> None:
    points = {b: int(curve(b) * (1 + c1)) + int(c0 * GB) for b in sizes}
    made = fit(points, blind=blind)
    quantiles = [made.quantile(at, p) for p in (0.01, 0.1, 0.5, 0.9, 0.99)]
    assert all(np.isfinite(quantiles))
    assert quantiles == sorted(quantiles)
    for p, value in zip((0.1, 0.5, 0.9), quantiles[1:4], strict=True):
        assert made.exceeds(at, value) == pytest.approx(1 - p, abs=1e-3)
    # a probed size is known to within the noise, if the line may be where the probes are
    for b, peak in points.items():
        low, high = made.interval(b, 0.999)
        assert blind or low - 5 * NOISE * peak <= peak <= high + 5 * NOISE * peak


def test_the_priors_have_the_quantiles_of_their_sources() -> None:
    """|normal| with a log-normal deviation: the median and the nine in ten that were published."""
    draws = np.random.default_rng(0)
    normal = np.abs(draws.standard_normal(400_000))
    for prior, half, tenth in (
        (BLIND, 0.0111, 0.1936),
        (WITH_TIMELINE, 0.0003, 0.068),
    ):
        errors = normal * prior.median * np.exp(prior.log_sd * draws.standard_normal(len(normal)))
        assert np.quantile(errors, 0.5) == pytest.approx(half, rel=0.05)
        assert np.quantile(errors, 0.9) == pytest.approx(tenth, rel=0.05)


# An MLP with AdamW on the CPU, blind: two probes where the optimizer decides, three beyond.
MLP = {2: 453_532, 8: 455_116, 52: 554_848, 651: 3_786_388, 690: 3_997_924}


def exact_weights(made: Fit) -> list[float]:
    """The weights of the pairs by the textbook formula, with a hundred digits."""
    mpmath.mp.dps = 100
    batches, residuals = made._batches, mpmath.matrix(made._residuals.tolist())
    design = mpmath.matrix([[1, b] for b in batches.tolist()])
    noise = mpmath.diag([(made._noise * v) ** 2 for v in made._values.tolist()])
    walk = mpmath.matrix(made._walk(batches, batches).tolist())
    logs = []
    for jump, precision, prior in zip(
        made._grid.jumping, made._precision(), made._grid.log_prior, strict=True
    ):
        prior_covariance = mpmath.matrix(precision.tolist()) ** -1
        total = mpmath.mpf(float(jump)) ** 2 * walk + noise + design * prior_covariance * design.T
        fitted = (residuals.T * total**-1 * residuals)[0]
        logs.append(-(mpmath.log(mpmath.det(total)) + fitted) / 2 + mpmath.mpf(float(prior)))
    weights = [mpmath.exp(log - max(logs)) for log in logs]
    return [float(weight / mpmath.fsum(weights)) for weight in weights]


@pytest.mark.parametrize("points", [MLP, {2: 1_000_000, 9: 1_700_000}])
def test_weights_are_those_of_exact_arithmetic(points: dict[int, int]) -> None:
    made = Fit(None, [probe(*point) for point in points.items()], [*points.values()], noise=2e-5)
    assert made._weights == pytest.approx(exact_weights(made), rel=1e-3, abs=1e-6)


def test_a_blind_fit_over_a_kink_is_no_singular_matrix() -> None:
    probes = [probe(b, peak) for b, peak in MLP.items()] + [probe(729, 0, 4_194_304)]
    made = Fit(None, probes, list(MLP.values()), noise=2e-5)
    assert made.mean(690) == pytest.approx(MLP[690], rel=0.001)
    low, high = made.interval(700)
    assert 3_800_000 < low <= high < 4_300_000
