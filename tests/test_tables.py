"""Tables of many runs."""

import json

import pandas as pd
import pytest

from rlhelpers.evidence.runs import list_runs
from rlhelpers.evidence.tables import table_of_comparisons, table_of_failures, table_of_finals


@pytest.fixture
def runs(roots, write_run):
    _, committed = roots
    write_run(committed, 0, rewards=(0.1, 0.8, 0.8, 0.8, 0.8))
    write_run(committed, 1, rewards=(0.1, 0.6, 0.6, 0.6, 0.6))
    write_run(committed, 0, estimator="rft", rewards=(0.1, 0.9, 0.1, 0.1, 0.1))
    file = write_run(committed, 0, estimator="maxrl", rewards=(0.1, 0.3, 0.3, 0.3)) / "metrics.jsonl"
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(json.dumps({"step": 16, "reward": 0.5, "loss": None, "grad_norm": 1.0, "skipped_update": 1}) + "\n")
        lines.write(json.dumps({"step": 17, "reward": 0.5, "loss": 0.1, "grad_norm": 1.0, "skipped_update": 0}) + "\n")
    return list_runs("04_grpo")


def test_finals_are_rounded_and_sorted_and_failures_counted(runs):
    table = table_of_finals(runs, "estimator")
    assert table.index.tolist() == ["grpo", "maxrl", "rft"] and table.index.name == "estimator"
    assert table["mean"].tolist() == [0.7, 0.3, 0.1] and table["seeds"].tolist() == [2, 1, 1]
    assert table["collapsed"].tolist() == [0, 0, 1] and table["diverged"].tolist() == [0, 1, 0]
    assert (table["lowest"]["grpo"], table["highest"]["grpo"]) == (0.6, 0.8)
    assert table["95 % interval"].tolist() == ["-0.571 to 1.971", "1 seed: none", "1 seed: none"]


def test_failures_have_their_signs(runs):
    table = table_of_failures(runs, "estimator")
    assert table["what"].to_dict() == {("maxrl", 0): "diverged", ("rft", 0): "collapsed"}
    assert table.loc[("rft", 0), ["reward, best", "reward, final"]].tolist() == [0.9, 0.1]
    assert table["steps not finite"].tolist() == [1, 0]
    assert table_of_failures(runs[runs["estimator"] == "grpo"], "estimator").empty


def test_comparisons_say_how_many_they_are():
    finals = pd.DataFrame({"old": [0.50, 0.60, 0.55, 0.52]})
    finals["new"] = finals["old"] + [0.05, 0.06, 0.02, 0.05]  # p = 0.013
    finals["other"] = finals["old"] + [0.01, -0.01, 0.02, -0.02]
    finals["third"] = finals["other"]
    finals["fourth"] = [0.9, None, None, None]
    table = table_of_comparisons(finals, [(name, "old") for name in ("new", "other", "third", "fourth")])
    assert table.index.names == ["method", "baseline"] and table["seeds"].tolist() == [4, 4, 4, 1]
    assert table["verdict alone"].tolist() == ["better than"] + ["not told apart from"] * 3
    assert table["verdict, 4 at once"].tolist() == ["not told apart from"] * 4
    assert table["Holm's p, 4 at once"].iloc[0] == pytest.approx(4 * 0.013, abs=0.004)
    assert table["difference"].tolist() == [0.045, 0.0, 0.0, 0.4] and table["95 % interval"].iloc[3] == "1 seed: none"
    alone = table_of_comparisons(finals, [("new", "old")])
    assert alone["verdict, 1 at once"].tolist() == ["better than"]


@pytest.mark.parametrize("table", [table_of_finals, table_of_failures])
def test_tables_of_nothing_are_errors(runs, table):
    with pytest.raises(ValueError, match="by: got 'estimater'; accepted are "):
        table(runs, "estimater")
    with pytest.raises(ValueError, match="runs: got none"):
        table(runs[:0], "estimator")
    with pytest.raises(ValueError, match="pairs: got none"):
        table_of_comparisons(pd.DataFrame({"old": [0.5]}), [])
