"""Many runs as tables: which are found, which may be compared, and their curves side by side."""

import json

import pytest
import yaml

from rlhelpers import paths
from rlhelpers.evidence.results import comparable, list_runs, read_curves
from rlhelpers.training.config import make_config
from rlhelpers.training.records import RunRecords


def write_run(root, seed=0, status="complete", rewards=(0.1, 0.5), without=(), **settings):
    config = make_config(seed=seed, **settings)
    folder = root / config.experiment / config.variant / f"seed={seed}"
    folder.mkdir(parents=True)
    kept = {name: value for name, value in config.model_dump(mode="json").items() if name not in without}
    (folder / "config.yaml").write_text(yaml.safe_dump(kept), encoding="utf-8")
    rows = [{"step": 5 * i, "val_reward": reward, "seconds": 30.0} for i, reward in enumerate(rewards)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"status": status}), encoding="utf-8")
    return folder


@pytest.fixture
def roots(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    return tmp_path / "runs", tmp_path / "results"


def defaults(**changes):
    return make_config(**changes).model_dump(mode="json")


def test_complete_runs_of_both_roots_and_the_readers_own_first(roots):
    own, committed = roots
    for seed in (0, 1):
        write_run(committed, seed)
    mine = write_run(own, seed=1)
    write_run(own, seed=2, status="failed")
    write_run(own, seed=3, experiment="other")
    write_run(own, seed=4).rename(own / "04_grpo/grpo/seed=4.earlier-1")
    runs = list_runs("04_grpo")
    assert sorted(runs["seed"]) == [0, 1]
    assert runs.set_index("seed")["folder"][1] == mine
    assert runs["minutes"].tolist() == [1.0, 1.0] and set(runs["estimator"]) == {"grpo"}
    assert committed in list_runs("04_grpo", committed_only=True).set_index("seed")["folder"][1].parents
    assert set(list_runs("04_grpo", "other")["seed"]) == {0, 1, 3}


def test_nothing_found_is_an_error_that_says_where(roots):
    with pytest.raises(FileNotFoundError, match=r"no complete run of 05_variants .*notebooks make them"):
        list_runs("05_variants")


def test_runs_that_differ_in_what_is_not_asked_about_are_left_out(roots):
    _, committed = roots
    write_run(committed)
    write_run(committed, estimator="dr_grpo")
    write_run(committed, estimator="dr_grpo", learning_rate=1e-3)
    write_run(committed, learning_rate=1e-3, gradient_accumulation_steps=2, device="cpu")
    runs = list_runs("04_grpo")
    assert comparable(runs, defaults(), but=["estimator"])["estimator"].tolist() == ["dr_grpo", "grpo"]
    assert sorted(comparable(runs, defaults(), but=["learning_rate"])["learning_rate"]) == [3e-4, 1e-3]
    assert len(comparable(runs, defaults(), but=[])) == 1
    assert comparable(runs, defaults(temperature=0.5), but=["estimator"]).empty


def test_a_setting_that_older_runs_do_not_know_does_not_part_them(roots):
    _, committed = roots
    write_run(committed, seed=0, without=["components"])
    write_run(committed, seed=1)
    write_run(committed, seed=2, components="mine", variant="grpo")
    assert sorted(comparable(list_runs("04_grpo"), defaults(), but=[])["seed"]) == [0, 1]


def test_what_the_records_write_is_what_is_read(roots):
    with RunRecords(make_config(seed=3)) as records:
        records.log({"step": 0, "val_reward": 0.25, "seconds": 6.0})
    runs = comparable(list_runs("04_grpo"), defaults(), but=[])
    assert runs["minutes"].tolist() == [0.1]
    assert read_curves(runs, "val_reward", "estimator")["grpo", 3].tolist() == [0.25]


def test_curves_have_a_column_for_each_run(roots):
    _, committed = roots
    write_run(committed, seed=0, rewards=(0.1, 0.5, 0.7))
    write_run(committed, seed=1, rewards=(0.2, 0.4))
    runs = list_runs("04_grpo")
    curves = read_curves(runs, "val_reward", "estimator")
    assert curves.columns.tolist() == [("grpo", 0), ("grpo", 1)] and curves.index.tolist() == [0, 5, 10]
    assert curves["grpo", 1].isna().tolist() == [False, False, True]
    assert read_curves(runs, "no such metric", "estimator").empty


def test_two_runs_in_one_column_are_an_error(roots):
    _, committed = roots
    write_run(committed)
    write_run(committed, learning_rate=1e-3)
    with pytest.raises(ValueError, match="by: two runs have estimator='grpo' and seed 0"):
        read_curves(list_runs("04_grpo"), "val_reward", "estimator")
