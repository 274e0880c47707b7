"""Pictures of many runs: what they show is in the axes, and the number of seeds is told."""

import json

import matplotlib.pyplot as plt
import numpy as np
import pytest
from bad_input import NOT_A_LIST, NOT_A_TABLE, NOT_WHOLE, Row, check_refusal, name_of

from rlhelpers.evidence.comparisons import compare_curves, compare_finals
from rlhelpers.evidence.runs import list_runs, read_curves


@pytest.fixture
def runs(roots, write_run):
    _, committed = roots
    write_run(committed, 0, rewards=(0.1, 0.8, 0.8, 0.8, 0.8))
    write_run(committed, 1, rewards=(0.1, 0.6, 0.6, 0.6, 0.6))
    write_run(committed, 2, rewards=(0.1, 0.7, 0.7, 0.7, 0.7))
    write_run(committed, 0, estimator="dr_grpo", rewards=(0.1, 0.5, 0.5, 0.5, 0.5))
    write_run(committed, 1, estimator="dr_grpo", rewards=(0.1, 0.4, 0.4, 0.4, 0.4))
    write_run(committed, 0, estimator="rft", rewards=(0.1, 0.9, 0.1, 0.1, 0.1))
    yield list_runs("04_grpo")
    plt.close("all")


def test_curves(runs):
    figure = compare_curves(runs, ["val_reward", "loss"], "estimator", "title", columns=2)
    reward, loss = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "dr_grpo, 2 seeds",
        "grpo, 3 seeds",
        "rft, 1 seed, 1 collapsed",
    ]
    assert len(reward.lines) == 10 and len(reward.collections) == 1  # 6 seeds, 3 means, a mark; a band for three seeds
    [mark] = [line for line in reward.lines if line.get_marker() == "x"]
    assert mark.get_xydata().tolist() == [[20, 0.1]]  # where the curve of the collapsed run ends
    assert reward.get_ylim()[1] < 1  # it is set by the seeds, not by the band, whose upper end is 0.95
    mean = next(line for line in reward.lines if line.get_label() == "grpo, 3 seeds")
    np.testing.assert_allclose(mean.get_ydata(), [0.1, 0.7, 0.7, 0.7, 0.7])
    assert not loss.lines and loss.texts[0].get_text() == "not measured"
    assert loss.get_xlabel() == reward.get_xlabel() == "rollout step"
    assert reward.get_ylabel() == "mean reward per response" and reward.get_title() == "validation reward"


def test_finals(runs):
    figure = compare_finals(runs, "estimator", "title")
    (axes,) = figure.axes
    assert axes.get_xlabel() == "estimator"
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "dr_grpo\n2 seeds",
        "grpo\n3 seeds",
        "rft\n1 seed",
    ]
    shown = {(line.get_marker(), round(y, 3)) for line in axes.lines for y in line.get_ydata()}
    assert {("o", 0.8), ("o", 0.6), ("x", 0.1), ("s", 0.7), ("s", 0.1)} <= shown
    assert ("o", 0.1) not in shown
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["a seed", "a seed that collapsed", "mean, 95 % t-interval"]  # nothing diverged


def test_curves_on_different_grids_are_joined_by_step(roots, write_run):
    """Seeds validated at other steps: each is drawn where it was measured, mean and band where all were."""
    _, committed = roots
    write_run(committed, 0, rewards=(0.1, 0.3, 0.5, 0.7, 0.9))  # at 0, 5, 10, 15, 20
    for seed in (1, 2):
        file = write_run(committed, seed, eval_every=10, variant="grpo") / "metrics.jsonl"
        rows = [{"step": 10 * i, "val_reward": reward, "seconds": 1.0} for i, reward in enumerate((0.1, 0.3, 0.6))]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    axes = compare_curves(list_runs("04_grpo"), ["val_reward"], "estimator", "title").axes[0]
    *seeds, mean = [line.get_xydata().tolist() for line in axes.lines]
    assert [[x for x, _ in seed] for seed in seeds] == [[0, 5, 10, 15, 20], [0, 10, 20], [0, 10, 20]]
    np.testing.assert_allclose(mean, [[0, 0.1], [10, 1.1 / 3], [20, 0.7]])
    [band] = axes.collections
    assert {x for x, _ in band.get_paths()[0].vertices} == {0, 10, 20}
    plt.close("all")


def write_steps(file, steps, value=0.5):
    rows = [{"step": step, "val_reward": value, "seconds": 1.0} for step in steps]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.field_report("B51")
def test_seeds_on_different_steps_are_joined_none_is_cut(roots, write_run):
    """Policy: every seed is drawn in full; the mean and its band stand where all seeds have a value, so the number of
    seeds in the legend is that of every point, and where that ends early the picture says so."""
    files = [write_run(roots[1], seed) / "metrics.jsonl" for seed in range(5)]
    for file, steps in zip(files, (range(11), range(8), range(0, 11, 2)), strict=False):
        write_steps(file, steps)
    files[1].write_text(files[1].read_text(encoding="utf-8").replace('"step": 3, "val_reward": 0.5', '"step": 3'))
    files[2].write_text(files[2].read_text(encoding="utf-8").replace("0.5", "null", 1))
    for file, text in zip(files[3:], ("", '{"other": 1}\n'), strict=True):
        file.write_text(text, encoding="utf-8")
    with pytest.warns(
        UserWarning, match=r"seed=[34] is left out: ValueError: .*metrics\.jsonl: it has no step"
    ) as said:
        runs = list_runs("04_grpo")
    assert len(said) == 2 and list(runs["seed"]) == [0, 1, 2]
    assert list(read_curves(runs, "val_reward", "estimator").index) == list(range(11))
    figure = compare_curves(runs, ["val_reward"], "estimator", "title")
    axes = figure.axes[0]
    *seeds, mean = [line.get_xdata().tolist() for line in axes.lines]
    assert seeds == [list(range(11)), [0, 1, 2, 4, 5, 6, 7], [2, 4, 6, 8, 10]] and mean == [2, 4, 6]
    assert [text.get_text() for text in axes.texts] == ["all 3 seeds to here"]
    assert figure.legends[0].get_texts()[0].get_text() == "grpo, 3 seeds"
    write_steps(files[1], range(1, 11, 2))
    with pytest.warns(UserWarning):
        axes = compare_curves(list_runs("04_grpo"), ["val_reward"], "estimator", "title").axes[0]
    assert [text.get_text() for text in axes.texts] == ["3 seeds, no step in common"]
    plt.close("all")


@pytest.mark.field_report("B52")
def test_one_seed_draws_no_band(roots, write_run):
    write_run(roots[1], 0, rewards=(0.1, 0.3, 0.5))
    figure = compare_curves(list_runs("04_grpo"), ["val_reward"], "estimator", "title")
    assert not figure.axes[0].collections and figure.legends[0].get_texts()[0].get_text() == "grpo, 1 seed"
    plt.close("all")


# ---- bad input is refused by name; a new case is a row of ROWS

NO_COLUMN = [None, "unknown", 3, [], ["estimator"], {}, np.ones(2)]
ROWS = [
    Row("compare_curves", "metrics", NOT_A_LIST),
    Row("compare_curves", "metrics", [[None], [3]], "metrics: number 0 is "),
    Row("compare_curves", "metrics", [["unknown"]], "metrics, number 0: got 'unknown'; accepted are val_reward, "),
    Row("compare_curves", "metrics", [[]], "metrics has 0; all must have the same length, at least 1"),
    Row("compare_curves", "columns", [*NOT_WHOLE, 0]),
    Row("compare_curves", "runs", NOT_A_TABLE),
    Row("compare_curves", "by", NO_COLUMN),
    Row("compare_finals", "runs", NOT_A_TABLE),
    Row("compare_finals", "by", NO_COLUMN),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(runs, row):
    """And no empty picture is left: in a notebook it would look like a result."""
    by = {"runs": runs, "by": "estimator", "title": "t"}
    opened = plt.get_fignums()
    check_refusal(
        {
            "compare_curves": (compare_curves, by | {"metrics": ["loss"], "columns": 1}),
            "compare_finals": (compare_finals, by),
        },
        row,
    )
    assert plt.get_fignums() == opened
