"""Bad input to what reads and draws runs: refused by name, and no file is written.  A new case is a row of ROWS."""

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from bad_input import (
    NOT_A_FOLDER,
    NOT_A_LIST,
    NOT_A_NUMBER,
    NOT_A_TABLE,
    NOT_TEXT,
    NOT_WHOLE,
    SOMETHING_ELSE,
    Row,
    check_refusal,
    name_of,
)

from rlhelpers import paths
from rlhelpers.evidence import comparisons, figures, responses, runs, statistics, tables
from rlhelpers.evidence import runs as results
from rlhelpers.evidence import statistics as intervals
from rlhelpers.tasks.grading import verify_answer


@pytest.fixture(scope="module")
def good(tmp_path_factory, write_run):
    """Of each function good arguments."""
    root = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RESULTS", root)
        for estimator in ("grpo", "rft"):
            folders = [write_run(root, seed, estimator=estimator, experiment="e") for seed in (0, 1)]
        table = results.list_runs("e", committed_only=True)
    curves = results.read_curves(table, "val_reward", "estimator")
    finals, metrics = statistics.final_scores(curves), table.metrics[0]
    rows = {name: ["text"] for name in responses.REQUIRED} | {"prompt": ["r1_zero"], "run": ["a"], "human": [None]}
    answers = pd.DataFrame(rows)
    graded = responses.grade_responses(answers)
    figure = plt.figure()
    by = {"runs": table, "by": "estimator"}
    return {
        "t_interval": (intervals.t_interval, {"values": [1.0, 2.0], "confidence": 0.95}),
        "bootstrap_interval": (intervals.bootstrap_interval, {"values": [1.0, 2.0], "confidence": 0.95, "seed": 0}),
        "final_score": (statistics.final_score, {"curve": curves.iloc[:, 0]}),
        "final_scores": (statistics.final_scores, {"curves": curves}),
        "comparison": (statistics.comparison, {"finals": finals, "method": "grpo", "baseline": "rft"}),
        "list_runs": (lambda experiments: results.list_runs(experiments), {"experiments": "e"}),
        "comparable": (results.comparable, {"runs": table, "settings": {"task": "tiny"}, "except_for": ["task"]}),
        "read_curves": (results.read_curves, {**by, "metric": "val_reward"}),
        "read_metrics": (runs.read_metrics, {"folder": folders[0]}),
        "read_rollouts": (runs.read_rollouts, {"folder": folders[0], "step": 5, "split": "train"}),
        "table_of_times": (runs.table_of_times, {"runs": {"grpo": folders}}),
        "table_of_comparisons": (tables.table_of_comparisons, {"finals": finals, "pairs": [("grpo", "rft")]}),
        "table_of_finals": (tables.table_of_finals, by),
        "table_of_failures": (tables.table_of_failures, by),
        "compare_curves": (comparisons.compare_curves, {**by, "metrics": ["loss"], "title": "t", "columns": 1}),
        "compare_finals": (comparisons.compare_finals, {**by, "title": "t"}),
        "learning_curves": (figures.learning_curves, {"metrics": metrics, "title": "t"}),
        "diagnostics": (figures.diagnostics, {"metrics": metrics, "title": "t"}),
        "outcomes": (figures.outcomes, {"metrics": metrics, "title": "t", "most": 3}),
        "save_figure": (figures.save_figure, {"figure": figure, "run_folder": paths.RUNS / "e", "name": "curves"}),
        "save_for_writeup": (figures.save_for_writeup, {"figure": figure, "name": "curves"}),
        "read_responses": (responses.read_responses, {"path": "no.jsonl", "also": []}),
        "grade_responses": (responses.grade_responses, {"table": answers, "verify": verify_answer}),
        "category_counts": (responses.category_counts, {"graded": graded}),
        "draw_examples": (responses.draw_examples, {"graded": graded, "count": 1, "seed": 0}),
        "agreement": (responses.agreement, {"rule": graded.in_substance, "verdicts": graded.human}),
    }


NO_VALUES = [None, "text", [], [[1.0]], ["a"], [1.0, math.nan], [math.inf], np.array([1j, 2]), 3, {}]
NO_COLUMN = [None, "unknown", 3, [], ["estimator"], {}, np.ones(2)]
NO_FILE_NAME = ["", ".", "..", "a/b", "../a", "/a"]
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
    Row("table_of_comparisons", "finals", NOT_A_TABLE),
    Row("table_of_comparisons", "pairs", [*NOT_A_LIST, [], ["grpo"], ["ab"], [("grpo",)], [("grpo", "rft", "x")], [3]]),
    Row("table_of_comparisons", "pairs", [[("unknown", "rft")]], "method: got 'unknown'; accepted are grpo, rft"),
    Row("compare_curves", "metrics", NOT_A_LIST),
    Row("compare_curves", "metrics", [[None], [3]], "metrics: number 0 is "),
    Row("compare_curves", "metrics", [["unknown"]], "metrics, number 0: got 'unknown'; accepted are val_reward, "),
    Row("compare_curves", "metrics", [[]], "metrics has 0; all must have the same length, at least 1"),
    Row("compare_curves", "columns", [*NOT_WHOLE, 0]),
    *(
        row
        for function in ("table_of_finals", "table_of_failures", "compare_curves", "compare_finals")
        for row in (Row(function, "runs", NOT_A_TABLE), Row(function, "by", NO_COLUMN))
    ),
    Row("learning_curves", "metrics", NOT_A_TABLE),
    Row("diagnostics", "metrics", NOT_A_TABLE),
    Row("outcomes", "metrics", NOT_A_TABLE),
    Row("outcomes", "most", NOT_WHOLE),
    Row("save_figure", "figure", SOMETHING_ELSE),
    Row("save_figure", "run_folder", [*NOT_A_FOLDER, "/elsewhere", paths.RUNS / ".." / "results"]),
    Row("save_figure", "name", [*NOT_TEXT, *NO_FILE_NAME]),
    Row("save_for_writeup", "figure", SOMETHING_ELSE),
    Row("save_for_writeup", "name", [*NOT_TEXT, *NO_FILE_NAME]),
    Row("read_responses", "path", NOT_A_FOLDER, "responses: got "),
    Row("read_responses", "path", ["no.jsonl"], "responses: got 'no.jsonl'; there is no such file"),
    Row("read_responses", "also", [*NOT_A_LIST]),
    Row("grade_responses", "table", NOT_A_TABLE),
    Row("grade_responses", "table", [TABLE], "table: got a table without prompt, question, ground_truth, response"),
    Row("grade_responses", "verify", [None, 3, "verify"]),
    Row("category_counts", "graded", [*NOT_A_TABLE, TABLE]),
    Row("draw_examples", "graded", [*NOT_A_TABLE, TABLE]),
    Row("draw_examples", "count", NOT_WHOLE),
    Row("draw_examples", "seed", NOT_WHOLE),
    Row("agreement", "rule", [*NOT_A_NUMBER, TABLE]),
    Row("agreement", "verdicts", [*NOT_A_NUMBER, TABLE]),
    Row("agreement", "verdicts", [pd.Series([True, True])], "rule, verdicts: got 1 and 2 rows"),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(good, tmp_path, monkeypatch, row):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "FIGURES", tmp_path / "figures")
    opened = plt.get_fignums()
    check_refusal(good, row)
    assert list(tmp_path.rglob("*")) == []
    assert plt.get_fignums() == opened  # an empty picture in a notebook would look like a result
