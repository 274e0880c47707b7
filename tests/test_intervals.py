"""Intervals: by hand where that can be done, and by simulation: they cover as often as they say."""

import math

import numpy as np
import pytest
from scipy import stats

from rlhelpers.evidence import statistics as intervals
from rlhelpers.evidence.statistics import FEWEST_TO_RESAMPLE, bootstrap_interval, proportion_interval, t_interval


def test_the_t_interval_by_hand():
    interval = t_interval([0.8, 0.9, 1.0, 0.9])
    half = 3.182446 * math.sqrt(0.02 / 3) / 2  # t for 3 degrees of freedom at 97.5 %
    assert interval.mean == pytest.approx(0.9) and interval.n == 4
    assert (interval.low, interval.high) == pytest.approx((0.9 - half, 0.9 + half), rel=1e-5)
    assert interval.half_width == pytest.approx(half, rel=1e-5)
    assert str(interval) == f"0.900 [{0.9 - half:.3f}, {0.9 + half:.3f}], 4 seeds"
    assert interval.ends == f"{0.9 - half:.3f} to {0.9 + half:.3f}"


@pytest.mark.parametrize("interval", [t_interval, bootstrap_interval])
def test_one_value_has_no_interval_and_none_no_mean(interval):
    one = interval([0.8], of="seed")
    assert one.mean == 0.8 and math.isnan(one.low) and str(one) == "0.800, 1 seed" and one.ends == "1 seed: none"
    assert not one.covers(0.8)
    with pytest.raises(ValueError, match=r"values: got shape \(0,\)"):
        interval([])


@pytest.mark.parametrize("interval", [t_interval, bootstrap_interval])
@pytest.mark.parametrize(
    ("values", "confidence", "message"),
    [
        ([1.0, math.nan], 0.95, "values: got nan; accepted are finite numbers"),
        ([1.0, math.inf], 0.95, "values: got inf; accepted are finite numbers"),
        (["a"], 0.95, r"values: got \['a'\]; accepted are numbers"),
        (3, 0.95, r"values: got shape \(\)"),
        ([1.0, 2.0], 95, "confidence: got 95; accepted are numbers between 0 and 1"),
        ([1.0, 2.0], "0.95", "confidence: got '0.95'"),
        ([1.0, 2.0], math.nan, "confidence: got nan"),
    ],
)
def test_values_without_an_interval(interval, values, confidence, message):
    with pytest.raises(ValueError, match=message):
        interval(values, confidence)


def test_the_t_interval_covers_as_often_as_it_says():
    samples = np.random.default_rng(0).normal(0.5, 0.1, size=(4000, 4))
    covered = np.mean([t_interval(sample).covers(0.5) for sample in samples])
    assert covered == pytest.approx(0.95, abs=0.015)  # four standard errors


def test_the_bootstrap_covers_the_reward_of_hundreds_of_problems(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 499)
    rewards = np.random.default_rng(0).random((1000, 300)) < 0.8
    covered = np.mean([bootstrap_interval(run).covers(0.8) for run in rewards])
    assert covered == pytest.approx(0.95, abs=0.03)


def test_four_seeds_do_not_allow_a_bootstrap():
    """Why there is none: it would hold the truth far less often than it says."""
    four = np.random.default_rng(0).normal(0.5, 0.1, size=(500, 4))
    resampled = [stats.bootstrap((sample,), np.mean, method="percentile", n_resamples=499, rng=0) for sample in four]
    assert np.mean([r.confidence_interval.low <= 0.5 <= r.confidence_interval.high for r in resampled]) < 0.88
    assert math.isnan(bootstrap_interval(four[0]).low)
    assert math.isnan(bootstrap_interval([0, 1] * (FEWEST_TO_RESAMPLE // 2 - 1)).low)


def test_the_bootstrap_agrees_with_the_t_interval_where_both_are_right():
    rewards = np.random.default_rng(1).random(500) < 0.7
    by_bootstrap, by_t = bootstrap_interval(rewards), t_interval(rewards)
    assert by_bootstrap.mean == by_t.mean and str(by_bootstrap).endswith("500 problems")
    assert by_bootstrap.half_width == pytest.approx(by_t.half_width, rel=0.05)
    assert bootstrap_interval(rewards) == by_bootstrap  # the same every time
    assert bootstrap_interval([1.0] * FEWEST_TO_RESAMPLE).half_width == 0


def test_wilsons_interval_by_hand():
    interval, z = proportion_interval([1, 1, 1, 0], of="question"), 1.959964
    centre, half = (0.75 + z * z / 8) / (1 + z * z / 4), z / (1 + z * z / 4) * math.sqrt(0.75 * 0.25 / 4 + z * z / 64)
    assert (interval.mean, interval.low, interval.high) == pytest.approx((0.75, centre - half, centre + half), rel=1e-6)
    assert str(interval) == "0.750 [0.301, 0.954], 4 questions"
    nothing = proportion_interval([0.0] * 5)
    assert nothing.mean == nothing.low == 0 and nothing.high == pytest.approx(z * z / (5 + z * z), rel=1e-6)


def test_wilsons_interval_covers_few_questions_that_are_hard():
    """Exactly: over all numbers of right answers, each as often as it comes."""
    runs = [[1] * right + [0] * (20 - right) for right in range(21)]
    often = stats.binom.pmf(np.arange(21), 20, 0.1)
    assert often @ [proportion_interval(run).covers(0.1) for run in runs] == pytest.approx(0.957, abs=0.001)
    assert often @ [t_interval(run).covers(0.1) for run in runs] < 0.88  # why it is not that one


def test_a_share_is_of_zeros_and_ones():
    with pytest.raises(ValueError, match=r"values: got 0\.5; accepted are 0 and 1"):
        proportion_interval([0, 1, 0.5])
    with pytest.raises(ValueError, match=r"values: got shape \(0,\)"):
        proportion_interval([])
