"""Final scores, paired differences, verdicts, and many of them at once."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from rlhelpers.evidence.statistics import (
    comparison,
    final_scores,
    holm,
    paired_difference,
    paired_p,
    t_interval,
    verdict,
)


def curves(**methods):
    columns = {(name, seed): values for name, seeds in methods.items() for seed, values in enumerate(seeds)}
    table = pd.DataFrame(columns)
    return table.rename_axis(columns=["estimator", "seed"])


def test_the_final_score_is_the_mean_of_the_last_three_validations():
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


def test_the_p_value_is_that_of_the_paired_t_test_and_goes_with_the_verdict():
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


def test_chance_tells_one_in_twenty_apart_alone_and_one_set_of_five_in_twenty_at_once():
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
