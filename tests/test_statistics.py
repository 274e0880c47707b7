"""Intervals over seeds, paired differences, comparisons, and collapse."""

import math

import numpy as np
import pandas as pd
import pytest

from rlhelpers.evidence.statistics import (
    comparison,
    final_scores,
    has_collapsed,
    paired_difference,
    t_interval,
    table_of_finals,
)


def test_the_interval_by_hand():
    interval = t_interval([0.8, 0.9, 1.0, 0.9])
    half = 3.182446 * math.sqrt(0.02 / 3) / 2  # t for 3 degrees of freedom at 97.5 %
    assert interval.mean == pytest.approx(0.9) and interval.n == 4
    assert (interval.low, interval.high) == pytest.approx((0.9 - half, 0.9 + half), rel=1e-5)
    assert str(interval) == f"0.900 [{0.9 - half:.3f}, {0.9 + half:.3f}], 4 seeds"


def test_one_seed_has_no_interval():
    interval = t_interval([0.8])
    assert interval.mean == 0.8 and math.isnan(interval.low) and str(interval) == "0.800, 1 seed"


def test_the_interval_covers_as_often_as_it_says():
    generator = np.random.default_rng(0)
    samples = generator.normal(0.5, 0.1, size=(4000, 4))
    covered = np.mean([i.low < 0.5 < i.high for i in map(t_interval, samples)])
    assert covered == pytest.approx(0.95, abs=0.015)  # four standard errors


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
    assert comparison(finals, "new", "old").startswith("new better than old: 0.100 [")
    assert comparison(finals, "old", "new").startswith("old worse than new: -0.100 [")
    unpaired = t_interval(finals["new"][:3]).low < t_interval(finals["old"][:3]).high
    assert unpaired  # the seeds' common luck hides the difference from who does not pair


def test_no_seed_at_all_and_none_in_common():
    with pytest.raises(ValueError, match="values: got none"):
        t_interval([])
    finals = pd.DataFrame({"new": [0.5, np.nan], "old": [np.nan, 0.5]})
    with pytest.raises(ValueError, match="new and old have no seed in common"):
        comparison(finals, "new", "old")


def test_the_table_is_rounded_and_sorted():
    table = table_of_finals(curves(rft=[[0.1, 0.9, 0.1, 0.1, 0.1]], grpo=[[0.1] + [0.8] * 4, [0.1] + [0.6] * 4]))
    assert table.index.tolist() == ["grpo", "rft"] and table.index.name == "estimator"
    assert table["mean"].tolist() == [0.7, 0.1] and table["seeds"].tolist() == [2, 1]
    assert table["collapsed"].tolist() == [0, 1]
    assert (table["lowest"]["grpo"], table["highest"]["grpo"]) == (0.6, 0.8)
    assert table["95 % interval"].tolist() == ["-0.571 to 1.971", "one seed has none"]


@pytest.mark.parametrize("new", [[0.5, 0.6], [0.9], [0.2, 0.9]])
def test_what_is_not_told_apart_is_said_so(new):
    finals = pd.DataFrame({"new": pd.Series(new), "old": pd.Series([0.5, 0.5])})
    assert "new not told apart from old" in comparison(finals, "new", "old")


@pytest.mark.parametrize(
    ("values", "collapsed"),
    [
        ([0.1, 0.7, 0.8, 0.8, 0.8], False),
        ([0.1, 0.7, 0.1, 0.1, 0.1], True),
        ([0.1, 0.8, 0.3, 0.5, 0.5], False),
        ([0.0, 0.0, 0.0], False),
        ([np.nan, 0.6, np.nan, 0.2, 0.1, 0.0], True),
    ],
)
def test_a_collapse_is_a_final_score_below_half_of_the_best(values, collapsed):
    assert has_collapsed(pd.Series(values)) is collapsed
