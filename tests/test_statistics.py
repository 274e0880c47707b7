"""Intervals by hand and by simulation, final scores, verdicts, many of them at once, and signs of failure."""

import math

import numpy as np
import pandas as pd
import pytest
from bad_input import NOT_A_TABLE, NOT_WHOLE, SOMETHING_ELSE, Row, check_refusal, name_of
from scipy import stats

from rlhelpers.evidence import statistics
from rlhelpers.evidence.runs import list_runs
from rlhelpers.evidence.statistics import (
    FEWEST_TO_RESAMPLE,
    bootstrap_interval,
    comparison,
    final_score,
    final_scores,
    holm,
    paired_difference,
    paired_p,
    proportion_interval,
    read_all_signs,
    read_signs,
    t_interval,
    verdict,
)


def covers(interval, truth):
    return interval.low <= truth <= interval.high


def test_the_t_interval_by_hand():
    interval = t_interval([0.8, 0.9, 1.0, 0.9])
    half = 3.182446 * math.sqrt(0.02 / 3) / 2  # t for 3 degrees of freedom at 97.5 %
    assert interval.mean == pytest.approx(0.9) and interval.n == 4
    assert (interval.low, interval.high) == pytest.approx((0.9 - half, 0.9 + half), rel=1e-5)
    assert interval.half_width == pytest.approx(half, rel=1e-5)
    assert str(interval) == f"0.900 [{0.9 - half:.3f}, {0.9 + half:.3f}], 4 seeds"
    assert interval.ends == f"{0.9 - half:.3f} to {0.9 + half:.3f}"


@pytest.mark.field_report("B52")
@pytest.mark.parametrize("interval", [t_interval, bootstrap_interval])
def test_one_value_has_no_interval_and_none_no_mean(interval):
    one = interval([0.8], of="seed")
    assert one.mean == 0.8 and math.isnan(one.low) and str(one) == "0.800, 1 seed" and one.ends == "1 seed: none"
    assert not covers(one, 0.8)
    with pytest.raises(ValueError, match=r"values: got shape \(0,\)"):
        interval([])


@pytest.mark.parametrize("interval", [t_interval, bootstrap_interval])
@pytest.mark.parametrize(
    ("values", "confidence", "message"),
    [
        ([1.0, math.nan], 0.95, "values: got nan; accepted are finite numbers"),
        ([1.0, math.inf], 0.95, "values: got inf; accepted are finite numbers"),
        (["a"], 0.95, r"values: got \['a'\]; accepted are numbers"),
        ([1.0, 2.0], 95, "confidence: got 95; accepted are numbers between 0 and 1"),
    ],
)
def test_values_without_an_interval(interval, values, confidence, message):
    with pytest.raises(ValueError, match=message):
        interval(values, confidence)


@pytest.mark.field_report("B52")
def test_two_values_have_the_spread_of_n_minus_1():
    two = t_interval([0.4, 0.6])
    assert two.mean == 0.5 and two.n == 2
    t = 12.7062  # of Student's distribution with one degree of freedom, 97.5 %
    assert two.half_width * math.sqrt(2) / t == pytest.approx(0.1414, abs=1e-4)


def test_the_t_interval_covers_as_often_as_it_says():
    samples = np.random.default_rng(0).normal(0.5, 0.1, size=(4000, 4))
    covered = np.mean([covers(t_interval(sample), 0.5) for sample in samples])
    assert covered == pytest.approx(0.95, abs=0.015)  # four standard errors


@pytest.mark.slow
def test_the_bootstrap_covers_the_reward_of_many_problems(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 499)
    rewards = np.random.default_rng(0).random((1000, 300)) < 0.8
    covered = np.mean([covers(bootstrap_interval(run), 0.8) for run in rewards])
    assert covered == pytest.approx(0.95, abs=0.03)


def test_four_seeds_do_not_allow_a_bootstrap():
    """Why there is none: it would hold the truth far less often than it says."""
    four = np.random.default_rng(0).normal(0.5, 0.1, size=(500, 4))
    resampled = [stats.bootstrap((sample,), np.mean, method="percentile", n_resamples=499, rng=0) for sample in four]
    assert np.mean([r.confidence_interval.low <= 0.5 <= r.confidence_interval.high for r in resampled]) < 0.88
    assert math.isnan(bootstrap_interval(four[0]).low)
    assert math.isnan(bootstrap_interval([0, 1] * (FEWEST_TO_RESAMPLE // 2 - 1)).low)


def test_the_bootstrap_agrees_with_the_t_interval():
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
    assert often @ [covers(proportion_interval(run), 0.1) for run in runs] == pytest.approx(0.957, abs=0.001)
    assert often @ [covers(t_interval(run), 0.1) for run in runs] < 0.88  # why it is not that one


def test_a_share_is_of_zeros_and_ones():
    with pytest.raises(ValueError, match=r"values: got 0\.5; accepted are 0 and 1"):
        proportion_interval([0, 1, 0.5])
    with pytest.raises(ValueError, match=r"values: got shape \(0,\)"):
        proportion_interval([])


def curves(**methods):
    columns = {(name, seed): values for name, seeds in methods.items() for seed, values in enumerate(seeds)}
    table = pd.DataFrame(columns)
    return table.rename_axis(columns=["estimator", "seed"])


def test_the_final_score_is_of_the_last_three_validations():
    finals = final_scores(curves(a=[[0.0, 0.3, 0.6, 0.9], [0.9, 0.3, 0.3, np.nan]], b=[[1.0, 1.0, 1.0, 1.0]]))
    assert finals["a"].tolist() == pytest.approx([0.6, 0.5])
    assert finals["b"][0] == 1.0 and math.isnan(finals["b"][1])


def test_differences_are_paired_by_seed():
    finals = pd.DataFrame({"new": [0.5, 0.7, 0.9, 0.95], "old": [0.4, 0.61, 0.79, np.nan]})
    difference = paired_difference(finals, "new", "old")
    assert difference.n == 3 and difference.mean == pytest.approx(0.1)
    assert comparison(finals, "new", "old").startswith("new better than old with 3 seeds: 0.100 [")
    assert comparison(finals, "old", "new").startswith("old worse than new with 3 seeds: -0.100 [")
    unpaired = t_interval(finals["new"][:3]).low < t_interval(finals["old"][:3]).high
    assert unpaired  # the seeds' common luck hides the difference from who does not pair


@pytest.mark.parametrize("new", [[0.5, 0.6], [0.9], [0.2, 0.9]])
def test_what_is_not_told_apart_is_said_so(new):
    finals = pd.DataFrame({"new": pd.Series(new), "old": pd.Series([0.5, 0.5])})
    assert comparison(finals, "new", "old").startswith("new not told apart from old with ")


def test_one_common_seed_tells_nothing_apart():
    finals = pd.DataFrame({"new": [0.9, np.nan], "old": [0.1, 0.2]})
    assert comparison(finals, "new", "old") == "new not told apart from old with 1 seed: 0.800"
    assert paired_p(finals, "new", "old") == 1


def test_no_seed_in_common():
    finals = pd.DataFrame({"new": [0.5, np.nan], "old": [np.nan, 0.5]})
    with pytest.raises(ValueError, match="new and old have no seed in common"):
        comparison(finals, "new", "old")


def test_the_p_value_is_that_of_the_paired_t_test():
    generator = np.random.default_rng(0)
    verdicts = []
    for _ in range(200):
        finals = pd.DataFrame(generator.normal([0.1, 0.0], 0.1, size=(4, 2)), columns=["new", "old"])
        p = paired_p(finals, "new", "old")
        assert p == pytest.approx(stats.ttest_rel(finals["new"], finals["old"]).pvalue)
        verdicts.append(verdict(paired_difference(finals, "new", "old")) != "not told apart from")
        assert verdicts[-1] == (p < 0.05)
    assert 0 < sum(verdicts) < 200


@pytest.mark.parametrize(("shift", "p"), [(0.0, 1.0), (0.25, 0.0)])
def test_seeds_that_all_differ_by_the_same(shift, p):
    finals = pd.DataFrame({"new": [0.5 + shift, 0.25 + shift], "old": [0.5, 0.25]})
    assert paired_p(finals, "new", "old") == p
    assert verdict(paired_difference(finals, "new", "old")) == ("better than" if shift else "not told apart from")


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]).tolist() == [1.0, 1.0] and holm([0.03]).tolist() == [0.03]


@pytest.mark.slow
def test_holm_keeps_the_error_of_five_at_once():
    """Five methods that are no better than their baseline, with four seeds each, many times."""
    generator = np.random.default_rng(0)
    alone, at_once = 0, 0
    for _ in range(1000):
        finals = pd.DataFrame(generator.normal(0.5, 0.1, size=(4, 6)))
        p_values = [paired_p(finals, method, 0) for method in range(1, 6)]
        alone += min(p_values) < 0.05
        at_once += min(holm(p_values)) < 0.05
    assert alone / 1000 > 0.12 and at_once / 1000 < 0.07


def test_holm_finds_what_is_there():
    finals = pd.DataFrame({"old": [0.5, 0.6, 0.55, 0.52], "same": [0.51, 0.59, 0.54, 0.53]})
    finals["new"] = finals["old"] + [0.20, 0.21, 0.19, 0.20]
    adjusted = holm([paired_p(finals, "same", "old"), paired_p(finals, "new", "old")])
    assert adjusted[0] > 0.5 and adjusted[1] < 0.001


@pytest.mark.parametrize(("pair", "wrong"), [(("x", "old"), "method: got 'x'"), (("old", "x"), "baseline: got 'x'")])
def test_a_method_without_a_column(pair, wrong):
    with pytest.raises(ValueError, match=f"{wrong}; accepted are old, new"):
        comparison(pd.DataFrame({"old": [0.1], "new": [0.2]}), *pair)


@pytest.mark.parametrize("p_values", [[np.nan, 0.1], [2.0], [-1.0], 0.5, [[0.1]]])
def test_what_is_no_p_value(p_values):
    with pytest.raises(ValueError, match=r"p_values: got .*; accepted is \(n,\), numbers from 0 to 1"):
        holm(p_values)


# ---- signs of failure, on made-up runs


def run(rewards, formats=None, lengths=None, **logged):
    """A run that is validated every five steps, and trained on at each."""
    n = len(rewards)
    validation = {"val_reward": rewards, "val_format_reward": formats, "val_response_length": lengths}
    index = pd.RangeIndex(5 * n - 4, name="step")
    metrics = pd.DataFrame({"reward": np.where(index > 0, 0.5, np.nan)}, index=index)
    for name, values in validation.items():
        metrics.loc[::5, name] = [1.0] * n if values is None else values
    metrics.loc[1:, ["loss", "grad_norm", "skipped_update"]] = 0.0
    for name, values in logged.items():
        for step, value in values.items():
            metrics.loc[step, name] = value
    return metrics


@pytest.mark.parametrize(
    ("rewards", "collapsed"),
    [
        ([0.1, 0.7, 0.8, 0.8, 0.8], False),
        ([0.1, 0.7, 0.1, 0.1, 0.1], True),
        ([0.1, 0.7, 0.3, 0.3, 0.3], True),
        ([0.1, 0.7, 0.4, 0.4, 0.4], False),
        ([0.1, 0.8, 0.3, 0.5, 0.5], False),
        ([0.1, 0.8, 0.1, 0.7, 0.7], False),  # it came back
        ([0.0, 0.0, 0.0], False),
        ([np.nan, 0.6, np.nan, 0.2, 0.1, 0.0], True),
    ],
)
def test_a_collapse_is_less_than_half_of_the_best(rewards, collapsed):
    signs = read_signs(run(rewards))
    assert signs.collapsed is collapsed and signs.failures == ["collapsed"] * collapsed


@pytest.mark.parametrize(
    ("rewards", "formats", "lengths", "all_signs"),
    [
        ([0.01, 0.02, 0.02, 0.02], [0.1, 1, 1, 1], [300, 40, 20, 20], True),  # there was no reward to lose
        ([0.01, 0.40, 0.02, 0.02, 0.02], [0.1, 0.9, 1, 1, 1], [300, 200, 20, 20, 20], True),
        ([0.01, 0.02, 0.02, 0.02], [0.1, 0.1, 0.1, 0.1], [300, 40, 20, 20], False),  # nothing but short
        (
            [0.01, 0.02, 0.02, 0.02],
            [0.1, 1, 1, 1],
            [300, 280, 290, 300],
            False,
        ),  # the form, not yet the sums
        ([0.01, 0.50, 0.60, 0.70], [0.1, 1, 1, 1], [300, 60, 50, 40], False),  # short and right
    ],
)
def test_well_formed_short_and_wrong(rewards, formats, lengths, all_signs):
    signs = read_signs(run(rewards, formats, lengths))
    assert signs.well_formed_short_wrong is all_signs is signs.collapsed


def test_signs_by_hand():
    signs = read_signs(run([0.2, 0.6, 0.3, 0.0, 0.0], [0.5, 0.9, 1.0, 0.9, 0.8], [50, 40, 30, 20, 10]))
    assert (signs.best, signs.length_before) == (0.6, 50)
    assert (signs.reward, signs.format_reward, signs.response_length) == pytest.approx((0.1, 0.9, 20))


@pytest.mark.parametrize(
    ("logged", "steps"),
    [
        ({}, 0),
        ({"skipped_update": {3: 1.0, 4: 1 / 16}}, 2),
        ({"loss": {2: np.nan}, "grad_norm": {2: np.nan, 6: np.nan}}, 2),
        ({"skipped_update": {3: 1.0}, "grad_norm": {3: np.nan}}, 1),  # the same step
        ({"reward": {3: np.nan}, "loss": {3: np.nan}}, 0),  # nothing was trained there
    ],
)
def test_divergence_is_an_update_that_was_not_finite(logged, steps):
    signs = read_signs(run([0.1, 0.5, 0.5, 0.5], **logged))
    assert signs.not_finite == steps and signs.diverged is (steps > 0)
    assert signs.failures == ["diverged"] * (steps > 0)


def test_what_was_not_logged_is_no_failure(roots, write_run):
    """A step function of the reader's own need not say whether it skipped an update."""
    write_run(roots[1], rewards=(0.1, 0.5, 0.5, 0.5))
    [signs] = read_all_signs(list_runs("04_grpo"), "estimator").values()
    assert signs.failures == [] and np.isnan(signs.response_length)
    own = run([0.1, 0.5, 0.5, 0.5]).drop(columns=["loss", "skipped_update"]).assign(grad_norm=np.nan)
    assert read_signs(own).failures == []


# ---- bad input is refused by name; a new case is a row of ROWS

FINALS = pd.DataFrame({"grpo": [0.5], "rft": [0.4]})
CURVES = curves(grpo=[[0.5]], rft=[[0.4]])
GOOD = {
    "t_interval": (t_interval, {"values": [1.0, 2.0], "confidence": 0.95}),
    "bootstrap_interval": (bootstrap_interval, {"values": [1.0, 2.0], "confidence": 0.95, "seed": 0}),
    "final_score": (final_score, {"curve": CURVES.iloc[:, 0]}),
    "final_scores": (final_scores, {"curves": CURVES}),
    "comparison": (comparison, {"finals": FINALS, "method": "grpo", "baseline": "rft"}),
}
NO_VALUES = [None, "text", [], [[1.0]], ["a"], [1.0, math.nan], [math.inf], np.array([1j, 2]), 3, {}]
NO_COLUMN = [None, "unknown", 3, [], ["estimator"], {}, np.ones(2)]
TABLE = pd.DataFrame({"estimator": ["grpo"]})
ROWS = [
    Row("t_interval", "values", NO_VALUES),
    Row("t_interval", "confidence", [None, "0.95", True, 0, 1, -1, math.nan, []]),
    Row("bootstrap_interval", "values", NO_VALUES),
    Row("bootstrap_interval", "confidence", [None, "0.95", True, 0, 1, -1, math.nan, []]),
    Row("bootstrap_interval", "seed", NOT_WHOLE),
    Row("final_score", "curve", [*SOMETHING_ELSE, TABLE]),
    Row("final_scores", "curves", [*NOT_A_TABLE, TABLE]),
    Row("comparison", "finals", NOT_A_TABLE),
    Row("comparison", "method", NO_COLUMN),
    Row("comparison", "baseline", NO_COLUMN),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(row):
    check_refusal(GOOD, row)
