"""What is committed of finished runs."""

import pandas as pd
import pytest

from rlhelpers import cli, paths
from rlhelpers.evidence.collection import KEPT, TABLE, collect, table_of_runs
from rlhelpers.evidence.runs import list_runs
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import RunRecords

EXPERIMENTS = sorted(folder.name for folder in paths.RESULTS.iterdir() if list(folder.glob("*/seed=*")))


def test_complete_runs_are_copied_without_responses_and_weights(roots, write_run):
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
def test_a_broken_run_is_left_where_it_is_and_told_in_one_line(roots, write_run, capsys, name, content):
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
def test_the_committed_table_is_that_of_the_committed_runs(experiment):
    """After a run is added or taken away, `rlhelpers collect` writes it anew."""
    file = paths.RESULTS / experiment / TABLE
    assert file.read_text(encoding="utf-8") == table_of_runs(experiment).to_csv(lineterminator="\n")


def test_all_that_is_committed_is_small():
    assert sum(file.stat().st_size for file in paths.RESULTS.rglob("*") if file.is_file()) < 10_000_000
