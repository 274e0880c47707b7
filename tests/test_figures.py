"""Pictures of one run: what they show is in the axes, and where they are written."""

import json
from itertools import pairwise

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from bad_input import NOT_A_FOLDER, NOT_A_TABLE, NOT_TEXT, NOT_WHOLE, SOMETHING_ELSE, Row, check_refusal, name_of
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

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
from rlhelpers.evidence.runs import read_metrics
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


def test_the_curves_are_the_numbers(folder):
    figure = learning_curves(read_metrics(folder), "a title")
    left, right = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in left.lines}
    assert lines == {"training batch": [[1, 0.1], [2, 0.2], [3, 0.3]], "validation": [[0, 0.2], [3, 0.6]]}
    assert left.get_xlabel() == "rollout step" and right.get_ylabel() == "mean format reward per response"


def test_diagnostics_say_what_is_missing(folder):
    metrics = read_metrics(folder).drop(columns="clip_fraction")
    panels = diagnostics(metrics, "a title").axes
    drawn = {axes.get_title(): len(axes.lines) for axes in panels}
    assert drawn[METRICS["loss"][0]] == 1 and drawn[METRICS["clip_fraction"][0]] == 0
    assert panels[-1].texts[0].get_text() == "not measured"


@pytest.mark.field_report("B42")
def test_the_picture_says_that_the_loss_is_no_measure():
    assert METRICS["loss"][0] == "loss: no measure of progress"


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


def test_outcomes_have_an_order_and_colours_of_their_own():
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


# ---- bad input is refused by name; a new case is a row of ROWS

FIGURE = Figure()
METRICS_OF_A_RUN = pd.DataFrame({"loss": [1.0]})
GOOD = {
    "learning_curves": (learning_curves, {"metrics": METRICS_OF_A_RUN, "title": "t"}),
    "diagnostics": (diagnostics, {"metrics": METRICS_OF_A_RUN, "title": "t"}),
    "outcomes": (outcomes, {"metrics": METRICS_OF_A_RUN, "title": "t", "most": 3}),
    "save_figure": (save_figure, {"figure": FIGURE, "run_folder": paths.RUNS / "e", "name": "curves"}),
    "save_for_writeup": (save_for_writeup, {"figure": FIGURE, "name": "curves"}),
}
NO_FILE_NAME = ["", ".", "..", "a/b", "../a", "/a"]
ROWS = [
    Row("learning_curves", "metrics", NOT_A_TABLE),
    Row("diagnostics", "metrics", NOT_A_TABLE),
    Row("outcomes", "metrics", NOT_A_TABLE),
    Row("outcomes", "most", NOT_WHOLE),
    Row("save_figure", "figure", SOMETHING_ELSE),
    Row("save_figure", "run_folder", [*NOT_A_FOLDER, "/elsewhere", paths.RUNS / ".." / "results"]),
    Row("save_figure", "name", [*NOT_TEXT, *NO_FILE_NAME]),
    Row("save_for_writeup", "figure", SOMETHING_ELSE),
    Row("save_for_writeup", "name", [*NOT_TEXT, *NO_FILE_NAME]),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(tmp_path, monkeypatch, row):
    """And no file is written, and no empty picture is left: in a notebook it would look like a result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "FIGURES", tmp_path / "figures")
    opened = plt.get_fignums()
    check_refusal(GOOD, row)
    assert list(tmp_path.rglob("*")) == [] and plt.get_fignums() == opened
