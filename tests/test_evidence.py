"""Run folders as tables, and their pictures."""

import json

import pytest

from rlhelpers import paths
from rlhelpers.evidence.figures import DIAGNOSTICS, METRICS, diagnostics, learning_curves, save_figure, save_for_writeup
from rlhelpers.evidence.runs import read_metrics, read_rollouts


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(paths, "FIGURES", tmp_path / "figures")
    folder = tmp_path / "runs/experiment/grpo/seed=0"
    (folder / "rollouts").mkdir(parents=True)
    rows = [{"step": 0, "val_reward": 0.2, "val_format_reward": 0.4}]
    rows += [
        {"step": s, "reward": s / 10, "format_reward": 0.5, **dict.fromkeys(DIAGNOSTICS, 0.1 * s)} for s in (1, 2, 3)
    ]
    rows[-1] |= {"val_reward": 0.6, "val_format_reward": 0.9, "token_entropy": None}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return folder


def test_metrics_as_a_table(folder):
    metrics = read_metrics(folder)
    assert metrics.index.tolist() == [0, 1, 2, 3]
    assert metrics["val_reward"].dropna().to_dict() == {0: 0.2, 3: 0.6}
    assert metrics["token_entropy"].isna().tolist() == [True, False, False, True]


def test_a_broken_line_is_named(folder):
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 4, "rew')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 5"):
        read_metrics(folder)


def test_rollouts_as_a_table(folder):
    (folder / "rollouts/step_00003_train.jsonl").write_text('{"response": "é", "reward": 1.0}\n', encoding="utf-8")
    assert read_rollouts(folder, 3, "train")["response"].tolist() == ["é"]


def test_the_curves_are_the_numbers(folder):
    figure = learning_curves(read_metrics(folder), "a title")
    left, right = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in left.lines}
    assert lines == {"training batch": [[1, 0.1], [2, 0.2], [3, 0.3]], "validation": [[0, 0.2], [3, 0.6]]}
    assert left.get_xlabel() == "rollout step" and right.get_ylabel() == "mean format reward per response"


def test_diagnostics_draw_what_there_is_and_say_what_is_missing(folder):
    metrics = read_metrics(folder).drop(columns="clip_fraction")
    panels = diagnostics(metrics, "a title").axes
    drawn = {axes.get_title(): len(axes.lines) for axes in panels}
    assert drawn[METRICS["loss"][0]] == 1 and drawn[METRICS["clip_fraction"][0]] == 0
    assert panels[-1].texts[0].get_text() == "not measured"


def test_a_figure_goes_to_the_run_and_to_figures(folder):
    files = save_figure(learning_curves(read_metrics(folder), "t"), folder, "learning_curves")
    assert files == [
        folder / "learning_curves.png",
        paths.FIGURES / "experiment/grpo/seed=0/learning_curves.png",
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_figures_of_many_runs_go_to_the_figures_folder(folder):
    file = save_for_writeup(learning_curves(read_metrics(folder), "title"), "05_comparison")
    assert file == paths.FIGURES / "05_comparison.png" and file.read_bytes().startswith(b"\x89PNG")
