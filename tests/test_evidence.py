"""Run folders as tables, and their pictures."""

import json
from itertools import pairwise

import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from rlhelpers import paths
from rlhelpers.evidence.figures import (
    DIAGNOSTICS,
    METRICS,
    OTHERS,
    diagnostics,
    learning_curves,
    outcomes,
    save_figure,
    save_for_writeup,
)
from rlhelpers.evidence.runs import read_metrics, read_rollouts, seconds_by_part, table_of_times
from rlhelpers.tasks.grading import REASONS


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


COUNTED = pd.DataFrame(
    {
        "reason/no </think>": [None, 5, None],
        "reason/right": [None, 1, 6],
        "reason/wrong value": [None, 2, 2],
        "val_reason/right": [1, None, 3],
        "val_reason/no \\boxed": [3, None, None],
        "val_reason/too long": [None, None, 1],
        "boxes_disagree": [None, 0, 1],
    },
    index=[0, 1, 2],
    dtype=float,
)


def bars(axes):
    """(left, bottom, height) of every bar that can be seen, from the left and from below."""
    return sorted((b.get_x(), round(b.get_y(), 3), round(b.get_height(), 3)) for b in axes.patches if b.get_height())


def named(figure):
    """Colour by reason, as the legend says, from below."""
    [legend] = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    colours = [to_rgb(patch.get_facecolor()) for patch in legend.get_patches()]
    return dict(zip(names[::-1], colours[::-1], strict=True))


def test_outcomes_are_shares_of_the_responses_of_a_step():
    figure = outcomes(COUNTED, "a title")
    train, validation = figure.axes
    assert (train.get_title(), validation.get_title()) == ("training batch", "validation")
    assert bars(train) == [(0.5, 0, 0.125), (0.5, 0.125, 0.25), (0.5, 0.375, 0.625), (1.5, 0, 0.75), (1.5, 0.75, 0.25)]
    assert bars(validation) == [(-1, 0, 0.25), (-1, 0.25, 0.75), (1, 0, 0.75), (1, 0.75, 0.25)]
    assert train.get_ylabel() == "share of responses" and train.get_ylim() == (0, 1)


def test_outcomes_stand_in_the_order_of_the_reasons_and_have_colours_of_their_own():
    """Neighbours differ in lightness, which every reader sees."""
    colours = named(outcomes(COUNTED, "a title"))
    assert list(colours) == ["right", "wrong value", "too long", "no </think>", r"no \boxed"]
    for metrics in (COUNTED, pd.DataFrame({f"reason/{reason}": [1.0] for reason in REASONS})):
        figure = outcomes(metrics, "a title")
        lightness = [0.2126 * r**2.2 + 0.7152 * g**2.2 + 0.0722 * b**2.2 for r, g, b in named(figure).values()]
        assert all(abs(a - b) > 0.03 for a, b in pairwise(lightness))
        drawn = {to_rgb(bar.get_facecolor()) for bar in figure.axes[0].patches}
        assert drawn == set(named(figure).values())


def test_rare_outcomes_are_drawn_as_one():
    names = [*REASONS, "a reason of earlier days"]
    counts = {f"reason/{reason}": [float(n)] for n, reason in enumerate(names, start=1)}
    figure = outcomes(pd.DataFrame(counts, index=[7]), "a title", most=2)
    assert list(named(figure)) == ["right", *list(REASONS)[-2:], OTHERS]
    train, validation = figure.axes
    [left, *_] = [bar[0] for bar in bars(train)]
    assert left == 6.5 and sum(height for *_, height in bars(train)) == pytest.approx(1, abs=2e-3)
    assert validation.texts[0].get_text() == "not measured"


def test_outcomes_of_runs_that_did_not_count_them(folder):
    """As those in data/results from before they were counted."""
    figure = outcomes(read_metrics(folder), "a title")
    assert [axes.texts[0].get_text() for axes in figure.axes] == ["not measured"] * 2
    assert not figure.legends


def test_the_legend_of_outcomes_lies_beside_the_panels():
    figure = outcomes(COUNTED, "a title")
    figure.canvas.draw()
    [legend] = figure.legends
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    assert not any(legend.get_window_extent().overlaps(box) for box in boxes)


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
