"""Pictures of many runs: what they show is in the axes, and the number of seeds is told."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from rlhelpers.evidence.comparisons import compare_curves, compare_finals
from rlhelpers.evidence.results import list_runs, read_curves


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
        "rft, 1 seed",
    ]
    assert len(reward.lines) == 9 and len(reward.collections) == 1  # 6 seeds, 3 means, a band for three seeds
    assert reward.get_ylim()[1] < 1  # it is set by the seeds, not by the band, whose upper end is 0.95
    mean = next(line for line in reward.lines if line.get_label() == "grpo, 3 seeds")
    np.testing.assert_allclose(mean.get_ydata(), [0.1, 0.7, 0.7, 0.7, 0.7])
    assert not loss.lines and loss.texts[0].get_text() == "not measured"
    assert loss.get_xlabel() == reward.get_xlabel() == "rollout step"
    assert reward.get_ylabel() == "mean reward per response" and reward.get_title() == "validation reward"


def test_finals(runs):
    curves = read_curves(runs, "val_reward", "estimator")
    (axes,) = compare_finals(curves, "estimator", "title").axes
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "dr_grpo\n2 seeds",
        "grpo\n3 seeds",
        "rft\n1 seed",
    ]
    shown = {(line.get_marker(), round(y, 3)) for line in axes.lines for y in line.get_ydata()}
    assert {("o", 0.8), ("o", 0.6), ("x", 0.1), ("s", 0.7), ("s", 0.1)} <= shown
    assert ("o", 0.1) not in shown
