"""Tables of many runs, and what is committed of them."""

import json

import numpy as np
import pandas as pd
import pytest
from bad_input import NOT_A_LIST, NOT_A_TABLE, Row, check_refusal, name_of

from rlhelpers import cli, paths
from rlhelpers.evidence.runs import list_runs
from rlhelpers.evidence.tables import (
    KEPT,
    TABLE,
    collect,
    table_of_comparisons,
    table_of_failures,
    table_of_finals,
    table_of_runs,
)
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import RunRecords

EXPERIMENTS = sorted(folder.name for folder in paths.RESULTS.iterdir() if list(folder.glob("*/seed=*")))


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
    with pytest.raises(ValueError, match="runs: got none"):
        table(runs[:0], "estimator")


def test_complete_runs_are_copied_without_weights(roots, write_run):
    own, committed = roots
    folder = write_run(own, seed=0, rewards=(0.1, 0.5, 0.6, 0.7))
    (folder / "policy").mkdir()
    (folder / "policy/model.safetensors").write_bytes(b"weights")
    (folder / "learning_curves.png").write_bytes(b"picture")
    write_run(own, seed=1, status="failed")
    write_run(own, seed=2).rename(own / "04_grpo/grpo/seed=2.earlier-1")
    write_run(own, seed=3, experiment="other")
    made, left = collect("04_grpo")
    assert made == [committed / "04_grpo/grpo/seed=0"] and left == []
    assert {file.name for file in made[0].iterdir()} == set(KEPT)
    assert list_runs("04_grpo", committed_only=True)["seed"].tolist() == [0]
    table = pd.read_csv(committed / "04_grpo" / TABLE)
    assert table.loc[0, ["variant", "seed", "reward_before", "reward_final"]].tolist() == ["grpo", 0, 0.1, 0.6]
    assert table["learning_rate"].tolist() == [3e-4] and table["estimator.baseline"].tolist() == ["mean"]


def test_a_committed_run_is_left_and_the_table_grows(roots, write_run):
    own, committed = roots
    first = write_run(committed, seed=0)
    write_run(own, seed=0, rewards=(0.0, 0.0))
    write_run(own, seed=1)
    made, left = collect()  # the experiments that are there
    assert made == [committed / "04_grpo/grpo/seed=1"] and left == [first]
    assert len(pd.read_csv(committed / "04_grpo" / TABLE)) == 2
    assert table_of_runs("04_grpo")["reward_best"].tolist() == [0.5, 0.5]


def test_the_table_says_how_a_run_was_made(roots):
    with RunRecords(make_config(seed=3)) as records:
        records.log({"step": 0, "val_reward": 0.25, "seconds": 6.0})
    collect("04_grpo")
    [row] = table_of_runs("04_grpo").to_dict("records")
    assert row["minutes"] == 0.1 and row["python"] and row["started"] <= row["finished"]
    assert row["commit"] == records.about["commit"] and row["version.torch"] == records.about["versions"]["torch"]


def test_an_experiment_without_a_run_is_an_error_of_one_line(roots, capsys):
    assert cli.main(["collect", "04_grop"]) == 2
    assert "no complete run of 04_grop" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["..", "", "a/b", "/tmp"])
def test_what_is_no_name_of_an_experiment(roots, capsys, name):
    assert cli.main(["collect", name]) == 2
    assert f"experiments: got {name!r}; accepted are names of folders" in capsys.readouterr().err


def test_nothing_is_copied_where_one_experiment_has_no_run(roots, write_run, capsys):
    write_run(roots[0])
    assert cli.main(["collect", "04_grpo", "04_grop"]) == 2
    assert "no complete run of 04_grop" in capsys.readouterr().err and not list(roots[1].rglob("seed=*"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", "{"),
        ("run.json", "[]"),
        ("run.json", '{"a": 1}'),
        ("run.json", '{"status": "complete", "versions": [1]}'),
        ("config.yaml", None),
        ("config.yaml", "seed: ["),
        ("config.yaml", "estimator: {name: [1]}\nseed: x\nexperiment: a\nvariant: b"),
        ("metrics.jsonl", ""),
        ("metrics.jsonl", '{"step": 0, "seconds": 1.0, "val_reward": null}\n'),
    ],
)
def test_a_broken_run_is_left_and_told_in_one_line(roots, write_run, capsys, name, content):
    own, committed = roots
    write_run(own, seed=0)
    broken = write_run(own, seed=1) / name
    broken.unlink() if content is None else broken.write_text(content, encoding="utf-8")
    assert cli.main(["collect", "04_grpo"]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert "seed=1 is left out: " in line
    assert [folder.name for folder in committed.rglob("*seed=*")] == ["seed=0"]
    broken.parent.rename(own / "broken")
    write_run(own, seed=1)  # once it is mended, it is not taken for one that is there
    assert cli.main(["collect", "04_grpo"]) == 0
    assert len(pd.read_csv(committed / "04_grpo" / TABLE)) == 2


def test_why_there_is_no_run_to_be_read(roots, write_run, capsys):
    (write_run(roots[0]) / "config.yaml").unlink()
    assert cli.main(["collect", "04_grpo"]) == 2
    why, error = capsys.readouterr().err.splitlines()
    assert "seed=0 is left out: FileNotFoundError" in why and "no complete run of 04_grpo" in error


def test_the_command(roots, write_run, capsys):
    write_run(roots[0])
    assert cli.main(["collect", "04_grpo"]) == 0
    assert capsys.readouterr().out == "1 run more in data/results; 0 were there already\n"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_committed_table_is_that_of_its_runs(experiment):
    """After a run is added or taken away, `rlhelpers collect` writes it anew."""
    file = paths.RESULTS / experiment / TABLE
    assert file.read_text(encoding="utf-8") == table_of_runs(experiment).to_csv(lineterminator="\n")


def test_all_that_is_committed_is_small():
    assert sum(file.stat().st_size for file in paths.RESULTS.rglob("*") if file.is_file()) < 10_000_000


# ---- bad input is refused by name; a new case is a row of ROWS

NO_COLUMN = [None, "unknown", 3, [], ["estimator"], {}, np.ones(2)]
FINALS = pd.DataFrame({"grpo": [0.5], "rft": [0.4]})
ROWS = [
    Row("table_of_comparisons", "finals", NOT_A_TABLE),
    Row("table_of_comparisons", "pairs", [[]], "pairs: got none; accepted is at least one"),
    Row("table_of_comparisons", "pairs", [*NOT_A_LIST, [], ["grpo"], ["ab"], [("grpo",)], [("grpo", "rft", "x")], [3]]),
    Row("table_of_comparisons", "pairs", [[("unknown", "rft")]], "method: got 'unknown'; accepted are grpo, rft"),
    Row("table_of_finals", "runs", NOT_A_TABLE),
    Row("table_of_finals", "by", NO_COLUMN),
    Row("table_of_failures", "runs", NOT_A_TABLE),
    Row("table_of_failures", "by", NO_COLUMN),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(runs, row):
    good = {
        "table_of_comparisons": (table_of_comparisons, {"finals": FINALS, "pairs": [("grpo", "rft")]}),
        "table_of_finals": (table_of_finals, {"runs": runs, "by": "estimator"}),
        "table_of_failures": (table_of_failures, {"runs": runs, "by": "estimator"}),
    }
    check_refusal(good, row)
