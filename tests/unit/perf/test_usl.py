"""The scalability fit, on data from a known law."""

import math

import numpy
import pytest

from perf import usl
from tests.tiers import quick

COUNTS = (1, 2, 4, 8, 16)


def noisy(rate, contention, coherency, counts=COUNTS, repetitions=5, noise=0.02, seed=7):
    chance = numpy.random.default_rng(seed)
    return {n: list(usl.law(n, rate, contention, coherency) * chance.normal(1, noise, repetitions)) for n in counts}


@pytest.mark.parametrize(("contention", "coherency"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.05, 0.002), (0.4, 0.05)])
def test_without_noise_the_parameters_are_exact(contention, coherency):
    found = usl.fit({n: [usl.law(n, 1e5, contention, coherency)] for n in COUNTS}, resamples=10)
    assert (found.rate, found.contention, found.coherency) == pytest.approx(
        (1e5, contention, coherency), rel=1e-6, abs=1e-9
    )
    assert found.error == pytest.approx(0, abs=1e-9) and found.identified == 3


@pytest.mark.parametrize(("contention", "coherency"), quick([(0.05, 0.002), (0.2, 0.01), (0.02, 0.0005)], [0.05]))
def test_intervals_contain_the_true_value_as_often_as_stated(contention, coherency):
    """Twenty experiments: a 95 % interval from five repetitions is a little too narrow, but not by
    much.
    """
    held = {"rate": 0, "contention": 0, "coherency": 0}
    for seed in range(20):
        found = usl.fit(noisy(1e5, contention, coherency, seed=seed), resamples=100)
        for name, truth in (("rate", 1e5), ("contention", contention), ("coherency", coherency)):
            interval = found.interval(name)
            held[name] += interval.low <= truth <= interval.high
    assert all(count >= 14 for count in held.values()), held


def test_a_prediction_is_in_its_interval_which_widens_outwards():
    found = usl.fit(noisy(1e5, 0.05, 0.002))
    inside, outside = found.interval_at(8), found.interval_at(64)
    assert inside.low <= usl.law(8, 1e5, 0.05, 0.002) <= inside.high
    assert outside.low <= usl.law(64, 1e5, 0.05, 0.002) <= outside.high
    assert (outside.high - outside.low) / found.at(64) > (inside.high - inside.low) / found.at(8)


def test_better_than_linear_is_linear_and_not_a_negative_cost():
    """Batching can make two workers more than twice as fast; the law cannot express that."""
    found = usl.fit({1: [100.0], 2: [220.0], 4: [480.0], 8: [1000.0]}, resamples=10)
    assert found.contention == 0 and found.coherency == 0 and found.rate > 100 and found.error > 0.01
    assert found.peak == math.inf


def test_two_counts_do_not_determine_coherency():
    two = usl.fit({1: [100.0, 101.0], 2: [180.0, 182.0]}, resamples=50)
    assert two.identified == 2 and two.coherency == 0
    assert two.at(2) == pytest.approx(181, rel=0.01)
    one = usl.fit({1: [100.0, 102.0]}, resamples=50)
    assert (
        one.identified == 1 and (one.contention, one.coherency) == (0, 0) and one.at(3) == pytest.approx(303, rel=0.01)
    )


def test_the_peak_is_the_maximum():
    found = usl.fit({n: [usl.law(n, 1.0, 0.1, 0.01)] for n in COUNTS}, resamples=2)
    assert found.peak == pytest.approx(math.sqrt(0.9 / 0.01))
    assert found.at(found.peak) > found.at(found.peak * 1.1) and found.at(found.peak) > found.at(found.peak * 0.9)


def test_repetitions_and_rates_have_equal_weight():
    """Errors are relative: a point at 16 that is 10 times a point at 1 has the same weight."""
    points = {n: [usl.law(n, 1e5, 0.05, 0.001)] for n in COUNTS}
    disturbed = {**points, 1: [points[1][0] * 0.8]}
    assert usl.fit(disturbed, resamples=2).rate < 0.95e5


@pytest.mark.parametrize("points", [{}, {0: [1.0]}, {1: []}, {1: [1.0], 2: [0.0]}])
def test_an_empty_data_set_is_refused(points):
    with pytest.raises(ValueError, match="at least one rate"):
        usl.fit(points)


def test_the_same_data_give_the_same_intervals():
    data = noisy(1e5, 0.05, 0.002)
    assert usl.fit(data).interval("contention") == usl.fit(data).interval("contention")


def test_the_conservative_parameters_gain_less_than_the_fit():
    found = usl.fit(noisy(1e5, 0.05, 0.002))
    contention, coherency = found.pessimistic(64)
    gained = usl.law(64, 1.0, contention, coherency)
    assert gained < found.at(64) / found.rate and (contention, coherency) in {sample[1:] for sample in found.samples}
    assert gained > usl.law(64, 1.0, found.interval("contention").high, found.interval("coherency").high)
    assert usl.fit({1: [1.0]}, resamples=0).pessimistic(8) == (0.0, 0.0)
