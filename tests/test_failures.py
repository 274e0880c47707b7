"""Collapse and divergence, on made-up runs of which one knows what became of them."""

import numpy as np
import pandas as pd
import pytest

from rlhelpers.evidence.failures import read_all_signs, read_signs


def run(rewards, formats=None, lengths=None, **logged):
    """A run that is validated every five steps, and trained on at each."""
    n = len(rewards)
    validation = {"val_reward": rewards, "val_format_reward": formats, "val_response_length": lengths}
    index = pd.RangeIndex(5 * n - 4, name="step")
    metrics = pd.DataFrame({"reward": np.where(index > 0, 0.5, np.nan)}, index=index)
    for name, values in validation.items():
        metrics.loc[::5, name] = [1.0] * n if values is None else values
    metrics.loc[1:, ["loss", "grad_norm", "skipped_update"]] = 0.0
    for name, values in logged.items():
        for step, value in values.items():
            metrics.loc[step, name] = value
    return metrics


@pytest.mark.parametrize(
    ("rewards", "collapsed"),
    [
        ([0.1, 0.7, 0.8, 0.8, 0.8], False),
        ([0.1, 0.7, 0.1, 0.1, 0.1], True),
        ([0.1, 0.7, 0.3, 0.3, 0.3], True),
        ([0.1, 0.7, 0.4, 0.4, 0.4], False),
        ([0.1, 0.8, 0.3, 0.5, 0.5], False),
        ([0.1, 0.8, 0.1, 0.7, 0.7], False),  # it came back
        ([0.0, 0.0, 0.0], False),
        ([np.nan, 0.6, np.nan, 0.2, 0.1, 0.0], True),
    ],
)
def test_a_collapse_is_a_final_reward_below_half_of_the_best(rewards, collapsed):
    signs = read_signs(run(rewards))
    assert signs.collapsed is collapsed and signs.failures == ["collapsed"] * collapsed


@pytest.mark.parametrize(
    ("rewards", "formats", "lengths", "all_signs"),
    [
        ([0.01, 0.02, 0.02, 0.02], [0.1, 1, 1, 1], [300, 40, 20, 20], True),  # there was no reward to lose
        ([0.01, 0.40, 0.02, 0.02, 0.02], [0.1, 0.9, 1, 1, 1], [300, 200, 20, 20, 20], True),
        ([0.01, 0.02, 0.02, 0.02], [0.1, 0.1, 0.1, 0.1], [300, 40, 20, 20], False),  # nothing but short
        (
            [0.01, 0.02, 0.02, 0.02],
            [0.1, 1, 1, 1],
            [300, 280, 290, 300],
            False,
        ),  # the form, not yet the sums
        ([0.01, 0.50, 0.60, 0.70], [0.1, 1, 1, 1], [300, 60, 50, 40], False),  # short and right
    ],
)
def test_well_formed_short_and_wrong(rewards, formats, lengths, all_signs):
    signs = read_signs(run(rewards, formats, lengths))
    assert signs.well_formed_short_wrong is all_signs is signs.collapsed


def test_signs_by_hand():
    signs = read_signs(run([0.2, 0.6, 0.3, 0.0, 0.0], [0.5, 0.9, 1.0, 0.9, 0.8], [50, 40, 30, 20, 10]))
    assert (signs.best, signs.length_before) == (0.6, 50)
    assert (signs.reward, signs.format_reward, signs.response_length) == pytest.approx((0.1, 0.9, 20))


@pytest.mark.parametrize(
    ("logged", "steps"),
    [
        ({}, 0),
        ({"skipped_update": {3: 1.0, 4: 1 / 16}}, 2),
        ({"loss": {2: np.nan}, "grad_norm": {2: np.nan, 6: np.nan}}, 2),
        ({"skipped_update": {3: 1.0}, "grad_norm": {3: np.nan}}, 1),  # the same step
        ({"reward": {3: np.nan}, "loss": {3: np.nan}}, 0),  # nothing was trained there
    ],
)
def test_divergence_is_an_update_that_was_not_finite(logged, steps):
    signs = read_signs(run([0.1, 0.5, 0.5, 0.5], **logged))
    assert signs.not_finite == steps and signs.diverged is (steps > 0)
    assert signs.failures == ["diverged"] * (steps > 0)


def test_what_was_not_logged_is_no_failure(roots, write_run):
    """A step function of the reader's own need not say whether it skipped an update."""
    from rlhelpers.evidence.runs import list_runs

    write_run(roots[1], rewards=(0.1, 0.5, 0.5, 0.5))
    [signs] = read_all_signs(list_runs("04_grpo"), "estimator").values()
    assert signs.failures == [] and np.isnan(signs.response_length)
    own = run([0.1, 0.5, 0.5, 0.5]).drop(columns=["loss", "skipped_update"]).assign(grad_norm=np.nan)
    assert read_signs(own).failures == []
