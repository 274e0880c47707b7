"""Many runs as tables: which are found, which may be compared, and their curves side by side."""

import json
import warnings

import pytest

from rlhelpers import paths
from rlhelpers.evidence.runs import comparable, list_runs, read_curves
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import RunRecords


def defaults(**changes):
    return make_config(**changes).comparable_settings()


def test_complete_runs_of_both_roots_and_the_readers_own_first(roots, write_run):
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


def test_runs_that_differ_in_what_is_not_asked_about_are_left_out(roots, write_run):
    _, committed = roots
    write_run(committed)
    write_run(committed, estimator="dr_grpo")
    write_run(committed, estimator="dr_grpo", learning_rate=1e-3)
    write_run(committed, learning_rate=1e-3, gradient_accumulation_steps=2, device="cpu")
    runs = list_runs("04_grpo")
    assert comparable(runs, defaults(), except_for=["estimator"])["estimator"].tolist() == ["dr_grpo", "grpo"]
    assert sorted(comparable(runs, defaults(), except_for=["learning_rate"])["learning_rate"]) == [3e-4, 1e-3]
    assert len(comparable(runs, defaults(), except_for=[])) == 1
    assert comparable(runs, defaults(temperature=0.5), except_for=["estimator"]).empty


def test_older_runs_had_the_packages_components(roots, write_run):
    _, committed = roots
    write_run(committed, seed=0, without=["components"])
    write_run(committed, seed=1)
    write_run(committed, seed=2, components="mine", variant="grpo")
    runs = list_runs("04_grpo")
    assert sorted(comparable(runs, defaults(), except_for=[])["seed"]) == [0, 1]
    assert comparable(runs, defaults(components="mine"), except_for=["estimator"])["seed"].tolist() == [2]


def test_older_runs_sampled_with_torch(roots, write_run):
    """Runs from before there was a choice of engine compare with new ones that make the same choice, and no others."""
    _, committed = roots
    write_run(committed, seed=0, without=["engine", "engine_gpu", "kv_cache_gib", "sleep_level", "rollouts_ahead"])
    write_run(committed, seed=1)
    write_run(committed, seed=2, engine="vllm")
    write_run(committed, seed=3, engine="vllm-server", rollouts_ahead=True)
    write_run(committed, seed=4, engine="vllm", sleep_level=1, kv_cache_gib=6.0)
    write_run(committed, seed=5, engine="vllm-server", engine_gpu=1)
    runs = list_runs("04_grpo")
    assert sorted(comparable(runs, defaults(), except_for=[])["seed"]) == [0, 1]
    assert sorted(comparable(runs, defaults(), except_for=["engine"])["seed"]) == [0, 1, 2, 4, 5]
    # How much memory the engine had, and of which GPU, is nobody's matter.
    assert sorted(comparable(runs, defaults(engine="vllm"), except_for=[])["seed"]) == [2, 4]
    assert sorted(comparable(runs, defaults(), except_for=["engine", "rollouts_ahead"])["seed"]) == [0, 1, 2, 3, 4, 5]


def test_older_rows_had_no_cap(roots, write_run):
    _, committed = roots
    folder = write_run(committed, seed=0)
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    assert "engine_ratio_cap: null" in text
    (folder / "config.yaml").write_text(text.replace("  engine_ratio_cap: null\n", ""), encoding="utf-8")
    write_run(committed, seed=1)
    assert sorted(comparable(list_runs("04_grpo"), defaults(), except_for=[])["seed"]) == [0, 1]


def test_a_run_done_again_under_another_name_counts_once_the_readers_own(roots, write_run):
    own, committed = roots
    write_run(committed)
    mine = write_run(own, experiment="mine", gradient_accumulation_steps=8, rollouts_every=1)
    runs = comparable(list_runs("04_grpo", "mine"), defaults(), except_for=["estimator"])
    assert runs["folder"].tolist() == [mine]


def test_what_the_records_write_is_what_is_read(roots):
    with RunRecords(make_config(seed=3)) as records:
        records.log({"step": 0, "val_reward": 0.25, "seconds": 6.0})
    runs = comparable(list_runs("04_grpo"), defaults(), except_for=[])
    assert runs["minutes"].tolist() == [0.1]
    assert read_curves(runs, "val_reward", "estimator")["grpo", 3].tolist() == [0.25]


def test_curves_have_a_column_for_each_run(roots, write_run):
    _, committed = roots
    write_run(committed, seed=0, rewards=(0.1, 0.5, 0.7))
    write_run(committed, seed=1, rewards=(0.2, 0.4))
    runs = list_runs("04_grpo")
    curves = read_curves(runs, "val_reward", "estimator")
    assert curves.columns.tolist() == [("grpo", 0), ("grpo", 1)] and curves.index.tolist() == [0, 5, 10]
    assert curves["grpo", 1].isna().tolist() == [False, False, True]
    assert read_curves(runs, "no such metric", "estimator").empty


def test_runs_from_before_reasons_were_counted_stand_beside_new_ones(roots, write_run):
    _, committed = roots
    write_run(committed, seed=0)
    file = write_run(committed, seed=1) / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows[-1] |= {"val_reason/right": 3, "val_reason/no </think>": 5, "val_boxes_disagree": 0}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    runs = comparable(list_runs("04_grpo"), defaults(), except_for=[])
    curves = read_curves(runs, "val_reason/right", "estimator")
    assert curves.index.tolist() == [5] and curves["grpo", 1].tolist() == [3.0] and curves["grpo", 0].isna().all()


def test_the_committed_runs_are_all_read_and_small():
    """No responses and no weights; and a step is a line that one can read."""
    folders = [file.parent for file in paths.RESULTS.glob("*/*/seed=*/run.json")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs = list_runs(*{folder.parents[1].name for folder in folders}, committed_only=True)
    assert sorted(runs["folder"]) == sorted(folders)
    for folder in folders:
        assert {file.name for file in folder.iterdir()} == {"config.yaml", "metrics.jsonl", "run.json"}
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert max(len(line) for line in lines) < 2000


def test_two_runs_in_one_column_are_an_error(roots, write_run):
    _, committed = roots
    write_run(committed)
    write_run(committed, learning_rate=1e-3)
    with pytest.raises(ValueError, match="by: two runs have estimator='grpo' and seed 0"):
        read_curves(list_runs("04_grpo"), "val_reward", "estimator")


def test_a_folder_that_cannot_be_read_is_left_out_with_a_warning(roots, write_run):
    own, committed = roots
    write_run(committed)
    for seed, name in enumerate(("run.json", "config.yaml", "metrics.jsonl"), start=1):
        (write_run(own, seed) / name).write_text("", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"seed=\d is left out: ") as warned:
        assert list_runs("04_grpo")["seed"].tolist() == [0]
    assert len(warned) == 3


def test_a_misspelt_setting_is_named(roots, write_run):
    write_run(roots[1])
    with pytest.raises(ValueError, match="except_for: there is no setting estimatr"):
        comparable(list_runs("04_grpo"), defaults(), except_for=["estimatr"])


def test_what_no_run_has_is_named(roots, write_run):
    write_run(roots[1])
    runs = list_runs("04_grpo")
    with pytest.raises(ValueError, match="settings: no run has learning_rat; accepted are "):
        comparable(runs, {"learning_rat": 1}, [])
    with pytest.raises(ValueError, match="by: got 'estimater'; accepted are "):
        read_curves(runs, "val_reward", "estimater")
