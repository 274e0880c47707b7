"""Run folders as tables: one run, and many: which are found, which are comparable, and their curves."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
from bad_input import NOT_A_FOLDER, NOT_A_TABLE, NOT_TEXT, NOT_WHOLE, Row, check_refusal, name_of

from rlhelpers import paths
from rlhelpers.evidence.runs import (
    comparable,
    list_runs,
    read_curves,
    read_metrics,
    read_rollouts,
    seconds_by_part,
    table_of_times,
)
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import RunRecords


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rollouts").mkdir()
    rows = [{"step": 0, "val_reward": 0.2}, {"step": 1, "token_entropy": 0.1}, {"step": 2, "token_entropy": 0.2}]
    rows += [{"step": 3, "val_reward": 0.6, "token_entropy": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return tmp_path


def test_metrics_as_a_table(folder):
    metrics = read_metrics(folder)
    assert metrics.index.tolist() == [0, 1, 2, 3]
    assert metrics["val_reward"].dropna().to_dict() == {0: 0.2, 3: 0.6}
    assert metrics["token_entropy"].isna().tolist() == [True, False, False, True]


def timed_run(folder, slower=1.0):
    """Step 0 and the last are validated, which takes 5 seconds each; the rest of a step takes half a second."""
    clocks = {"seconds_sampling": 2.0 * slower, "seconds_training": 1.0, "seconds_syncing": 0.25}
    rows = [{"step": 0, "val_reward": 0.2, "seconds": 5.5}]
    rows += [{"step": step, **clocks, "seconds": sum(clocks.values()) + 0.5} for step in (1, 2, 3)]
    rows[-1] |= {"val_reward": 0.4, "seconds": rows[-1]["seconds"] + 5.0}
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_where_the_time_went(tmp_path):
    metrics = read_metrics(timed_run(tmp_path / "a"))
    parts = seconds_by_part(metrics)
    expected = {"sampling": 6.0, "training": 3.0, "syncing": 0.75, "validation": 10.0, "rest": 2.0}
    assert parts.to_dict() == pytest.approx(expected) and parts.sum() == pytest.approx(metrics["seconds"].sum())
    without_sync = seconds_by_part(metrics.drop(columns="seconds_syncing"))  # as runs were kept at first
    assert without_sync["syncing"] == 0 and without_sync.sum() == pytest.approx(parts.sum())


def test_a_table_of_times(tmp_path):
    folders = [timed_run(tmp_path / name, slower) for name, slower in (("a", 1.0), ("b", 2.0), ("c", 7.0))]
    table = table_of_times({"before": folders, "after": folders[:1]})
    assert table.loc["sampling"].to_dict() == pytest.approx({"before": 12.0, "after": 6.0})
    assert table.loc["one step", "after"] == pytest.approx(3.75)
    assert table.loc["whole run", "before"] == pytest.approx(27.75)


def test_a_broken_line_is_named(folder):
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 4, "rew\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 5"):
        read_metrics(folder)


def test_rollouts_as_a_table(folder):
    (folder / "rollouts/step_00003_train.jsonl").write_text('{"response": "é", "reward": 1.0}\n', encoding="utf-8")
    assert read_rollouts(folder, 3, "train")["response"].tolist() == ["é"]


def defaults(**changes):
    return make_config(**changes).comparable_settings()


def test_the_readers_own_runs_come_first(roots, write_run):
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


def test_runs_that_differ_elsewhere_are_left_out(roots, write_run):
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


def test_a_run_done_again_counts_once(roots, write_run):
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


def test_older_runs_counted_no_reasons(roots, write_run):
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


def test_what_cannot_be_read_is_left_out_with_a_warning(roots, write_run):
    own, committed = roots
    write_run(committed)
    for seed, name in enumerate(("run.json", "config.yaml", "metrics.jsonl"), start=1):
        (write_run(own, seed) / name).write_text("", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"seed=\d is left out: ") as warned:
        assert list_runs("04_grpo")["seed"].tolist() == [0]
    assert len(warned) == 3


def test_what_no_run_has_is_named(roots, write_run):
    write_run(roots[1])
    runs = list_runs("04_grpo")
    with pytest.raises(ValueError, match="settings: no run has learning_rat; accepted are "):
        comparable(runs, {"learning_rat": 1}, [])
    with pytest.raises(ValueError, match="by: got 'estimater'; accepted are "):
        read_curves(runs, "val_reward", "estimater")


# ---- bad input is refused by name; a new case is a row of ROWS

NO_COLUMN = [None, "unknown", 3, [], ["estimator"], {}, np.ones(2)]
TABLE = pd.DataFrame({"estimator": ["grpo"]})
ROWS = [
    Row("list_runs", "experiments", NOT_TEXT, "experiments: number 0 is "),
    Row("list_runs", "experiments", ["unknown"], "no complete run of unknown"),
    Row("comparable", "runs", NOT_A_TABLE),
    Row("comparable", "settings", [None, "text", 3, [], np.ones(2)]),
    Row("comparable", "except_for", [None, "task", 3, {}, np.ones(2)]),
    Row("comparable", "except_for", [["unknown"]], "except_for: there is no setting unknown"),
    Row("read_curves", "runs", NOT_A_TABLE),
    Row("read_curves", "runs", [TABLE], "runs: got a table without seed, metrics; it has estimator"),
    Row("read_curves", "metric", NOT_TEXT),
    Row("read_curves", "by", NO_COLUMN),
    Row("read_metrics", "folder", NOT_A_FOLDER),
    Row("read_metrics", "folder", ["no/such/folder"], "No such file or directory: 'no/such/folder/metrics.jsonl'"),
    Row("read_rollouts", "folder", NOT_A_FOLDER),
    Row("read_rollouts", "step", NOT_WHOLE),
    Row("read_rollouts", "step", [7], "step_00007_train.jsonl"),
    Row("read_rollouts", "split", [*NOT_TEXT, "test", "../train"]),
    Row("table_of_times", "runs", [None, "text", 3, [], np.ones(2)]),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(roots, write_run, row):
    folder = write_run(roots[1])
    runs = list_runs("04_grpo")
    good = {
        "list_runs": (lambda experiments: list_runs(experiments), {"experiments": "04_grpo"}),
        "comparable": (comparable, {"runs": runs, "settings": {"task": "tiny"}, "except_for": ["task"]}),
        "read_curves": (read_curves, {"runs": runs, "metric": "val_reward", "by": "estimator"}),
        "read_metrics": (read_metrics, {"folder": folder}),
        "read_rollouts": (read_rollouts, {"folder": folder, "step": 5, "split": "train"}),
        "table_of_times": (table_of_times, {"runs": {"grpo": [folder]}}),
    }
    check_refusal(good, row)
