"""Rewards and advantages against loops, and the groups that must give no signal at all."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhelpers.kernels.advantages import (
    compute_group_normalized_rewards,
    compute_rollout_rewards,
    pass_at_k,
    predicted_signal_fraction,
    signal_fraction,
)

NAIVE_BASELINE = {"mean": statistics.fmean, "none": lambda group: 0.0}
NAIVE_NORMALIZER = {"std": statistics.stdev, "mean": statistics.fmean}  # stdev divides by n - 1


@st.composite
def batches(draw):
    """(group size, rewards of one to four groups): multiples of 1/8, where sums are exact and ties are frequent."""
    group_size = draw(st.integers(2, 5))
    size = group_size * draw(st.integers(1, 4))
    eighths = draw(st.lists(st.integers(0, 8), min_size=size, max_size=size))
    return group_size, [n / 8 for n in eighths]


@pytest.mark.parametrize("normalizer", ["std", "mean", "none"])
@pytest.mark.parametrize("baseline", ["mean", "none"])
@given(batch=batches(), eps=st.sampled_from([1e-6, 0.1]))
@settings(deadline=None, max_examples=25)
def test_against_loops(baseline, normalizer, batch, eps):
    group_size, rewards = batch
    advantages, _ = compute_group_normalized_rewards(
        torch.tensor(rewards, dtype=torch.float64), group_size, baseline, eps, normalizer
    )
    expected = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        scale = 1.0 if normalizer == "none" else NAIVE_NORMALIZER[normalizer](group) + eps
        expected += [(r - NAIVE_BASELINE[baseline](group)) / scale for r in group]
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_std_divides_by_n_minus_1_and_eps_is_added_to_it():
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    advantages, _ = compute_group_normalized_rewards(rewards, 2, "mean", 0.5, "std")
    expected = 0.5 / (math.sqrt(0.5) + 0.5)  # with n instead of n - 1 it would be 0.5
    assert advantages.tolist() == pytest.approx([expected, -expected])


@pytest.mark.parametrize("normalizer", ["std", "mean", "none"])
@given(reward=st.floats(-10, 10, width=32), group_size=st.integers(2, 20))
@settings(deadline=None, max_examples=25)
def test_equal_rewards_give_exactly_zero(normalizer, reward, group_size):
    advantages, _ = compute_group_normalized_rewards(
        torch.full((group_size,), reward), group_size, "mean", 1e-6, normalizer
    )
    assert not advantages.any()


def test_equal_rewards_whose_float32_mean_is_another_number():
    rewards = torch.full((8,), 0.1)
    assert rewards.mean() != rewards[0]  # the trap: a last bit, divided by eps, would be a signal
    advantages, _ = compute_group_normalized_rewards(rewards, 8)
    assert advantages.tolist() == [0.0] * 8


@given(batch=batches(), other=st.integers(0, 8))
@settings(deadline=None, max_examples=25)
def test_a_group_does_not_see_the_other_groups(batch, other):
    group_size, rewards = batch
    alone, _ = compute_group_normalized_rewards(torch.tensor(rewards), group_size)
    beside, _ = compute_group_normalized_rewards(torch.tensor(rewards + [other / 8] * group_size), group_size)
    assert torch.equal(beside[: len(rewards)], alone)


def test_group_size_1():
    rewards = torch.tensor([1.0, 0.0, 0.5])
    advantages, metadata = compute_group_normalized_rewards(rewards, 1, "none", advantage_normalizer="none")
    assert advantages.tolist() == [1.0, 0.0, 0.5]
    assert metadata["reward_std_within_groups"] == 0.0
    for row in ({"baseline": "mean", "advantage_normalizer": "none"}, {"baseline": "none"}):
        with pytest.raises(ValueError, match=r"group_size: got 1.*mean.*std"):
            compute_group_normalized_rewards(rewards, 1, **row)


def test_one_reward_alone_has_finite_statistics():
    _, metadata = compute_group_normalized_rewards(torch.tensor([1.0]), 1, "none", advantage_normalizer="none")
    assert all(math.isfinite(value) for value in metadata.values())


def test_functions_of_ones_own():
    def leave_one_out(rewards):  # (groups, G) -> (groups, G)
        return (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)

    def largest(rewards):  # (groups, G) -> (groups, 1)
        return rewards.amax(dim=1, keepdim=True)

    rewards = torch.tensor([2.0, 0.0, 1.0, 0.0, 0.0, 4.0])
    advantages, _ = compute_group_normalized_rewards(rewards, 3, leave_one_out, 0.0, largest)
    assert advantages.tolist() == [0.75, -0.75, 0.0, -0.5, -0.5, 1.0]


def their_leave_one_out(rewards):
    """A reader's own, (groups, G) -> (groups, G)."""
    return (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", their_leave_one_out])
@pytest.mark.parametrize("normalizer", ["std", "mean", "none"])
@given(reward=st.floats(2**-10, 10, width=32), group_size=st.integers(2, 20))
@settings(deadline=None, max_examples=25)
def test_a_baseline_that_equals_the_rewards_gives_exactly_zero(baseline, normalizer, reward, group_size):
    rewards = torch.full((group_size,), reward)
    advantages, _ = compute_group_normalized_rewards(rewards, group_size, baseline, 1e-6, normalizer)
    assert not advantages.any()


def test_leave_one_out_of_rewards_whose_rest_has_another_last_bit():
    rewards = torch.full((4,), 0.9)
    assert (their_leave_one_out(rewards[None]) != rewards).any()  # the trap: 6e-8, which a std of 0 makes 0.0596
    advantages, _ = compute_group_normalized_rewards(rewards, 4, their_leave_one_out, 1e-6, "std")
    assert advantages.tolist() == [0.0] * 4


def test_equal_rewards_far_from_their_baseline_keep_their_advantage():
    advantages, _ = compute_group_normalized_rewards(torch.full((4,), 0.9), 4, "none", advantage_normalizer="none")
    assert advantages.tolist() == pytest.approx([0.9] * 4)


@given(batch=batches())
@settings(deadline=None, max_examples=25)
def test_leave_one_out_against_loops(batch):
    group_size, rewards = batch
    advantages, _ = compute_group_normalized_rewards(
        torch.tensor(rewards, dtype=torch.float64), group_size, "leave_one_out", 0.0, "none"
    )
    expected = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        expected += [r - statistics.fmean(group[:i] + group[i + 1 :]) for i, r in enumerate(group)]
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("rewards", "row", "message"),
    [
        ([1, 0, 0, 0, -1, -1, -1, 1], ("mean", "mean"), r"-0.5 for group 1 with the rewards \[-1.0, -1.0, -1.0, 1.0\]"),
        ([1, 0, 0, 0, -2, 2, 2, -2], ("mean", "mean"), "0 for group 1 with the rewards"),
        ([1, 0, 0, 0, -1, -1, -1, -1], ("none", "mean"), "-1 for group 1 with the rewards"),
        ([0, 1, 1, 0], ("mean", lambda rewards: rewards[:, :1] - 1), "-1 for group 0 with the rewards"),
    ],
)
def test_a_normalizer_that_would_turn_advantages_is_refused(rewards, row, message):
    baseline, normalizer = row
    with pytest.raises(ValueError, match=f"advantage_normalizer: it is {message}"):
        compute_group_normalized_rewards(torch.tensor(rewards), 4, baseline, advantage_normalizer=normalizer)


@pytest.mark.parametrize("rewards", [[0.0] * 4, [-1.0] * 4])
def test_the_mean_normalizer_takes_groups_of_equal_rewards(rewards):
    advantages, _ = compute_group_normalized_rewards(torch.tensor(rewards), 4, "mean", advantage_normalizer="mean")
    assert advantages.tolist() == [0.0] * 4


@pytest.mark.parametrize("row", [("mean", "none"), ("leave_one_out", "none"), (their_leave_one_out, "none")])
def test_a_group_of_one_has_no_baseline_of_its_own(row):
    baseline, normalizer = row
    with pytest.raises(ValueError, match="group_size: got 1"):
        compute_group_normalized_rewards(torch.tensor([1.0, 0.0]), 1, baseline, advantage_normalizer=normalizer)


def test_shape_and_dtype_are_those_of_the_rewards():
    advantages, _ = compute_group_normalized_rewards(torch.rand(6, dtype=torch.float64), 3)
    assert advantages.shape == (6,)
    assert advantages.dtype == torch.float64


def test_statistics_tell_the_spread_of_the_batch_from_that_within_groups():
    _, metadata = compute_group_normalized_rewards(torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0]), 4)
    assert metadata["reward_std_batch"] == pytest.approx(0.5345, abs=1e-4)
    assert metadata["reward_std_within_groups"] == 0.0
    assert (metadata["reward_min"], metadata["reward_max"]) == (0.0, 1.0)


def test_rewards_that_make_no_whole_groups():
    with pytest.raises(ValueError, match=r"raw_rewards.*17.*8"):
        compute_group_normalized_rewards(torch.zeros(17), 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"raw_rewards": torch.zeros(0)}, r"raw_rewards: got shape \(0,\)"),
        ({"raw_rewards": torch.zeros(2, 2)}, r"raw_rewards: got shape \(2, 2\)"),
        ({"raw_rewards": torch.tensor([0.0, 0.0, math.nan, 0.0])}, "raw_rewards: reward 2 is nan"),
        ({"raw_rewards": torch.tensor([0.0, -math.inf])}, "raw_rewards: reward 1 is -inf"),
        ({"group_size": 0}, "group_size: got 0"),
        ({"group_size": 2.0}, "group_size: got 2.0"),
        ({"baseline": "median"}, "baseline: got 'median'; accepted are none, mean, leave_one_out"),
        ({"advantage_normalizer": "var"}, "advantage_normalizer: got 'var'; accepted are none, std, mean"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        compute_group_normalized_rewards(**{"raw_rewards": torch.zeros(4), "group_size": 2} | arguments)


def test_each_response_is_graded_against_its_own_truth():
    def reward_fn(response, ground_truth):
        right = float(response == ground_truth)
        return {"reward": right, "format_reward": float(response != ""), "answer_reward": right}

    rewards, metadata = compute_rollout_rewards(reward_fn, ["1", "2", "", "3"], ["1", "1", "3", "3"])
    assert rewards.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert rewards.dtype == torch.float32
    assert metadata["mean_reward"] == 0.5
    assert metadata["mean_format_reward"] == 0.75
    assert metadata["format_rewards"].tolist() == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("part", ["reward", "format_reward"])
@pytest.mark.parametrize("value", [None, math.nan, math.inf, "1"])
def test_a_reward_that_is_no_finite_number(part, value):
    def reward_fn(response, ground_truth):
        return {"reward": 0.0, "format_reward": 0.0} | ({part: value} if response == "bad" else {})

    with pytest.raises(ValueError, match=rf"reward_fn: {part} of response 1 is"):
        compute_rollout_rewards(reward_fn, ["good", "bad"], ["", ""])


def test_responses_and_truths_of_different_length():
    with pytest.raises(ValueError, match="rollout_responses has 2, repeated_ground_truths has 1"):
        compute_rollout_rewards(lambda response, truth: {}, ["a", "b"], ["a"])


def test_pass_at_k_counts_groups_with_a_reward():
    rewards = torch.tensor([0.0, 0, 1, 0, 0, 0, 1, 1])
    assert pass_at_k(rewards, 2) == 0.5  # 00 | 10 | 00 | 11
    assert pass_at_k(rewards, 8) == 1.0


def test_signal_fraction_counts_groups_that_differ_within():
    rewards = torch.tensor([0.0, 0, 1, 0, 0, 0, 1, 1])
    assert signal_fraction(rewards, 2) == 0.25
    assert signal_fraction(torch.full((8,), 0.1), 8) == 0.0


@given(batch=batches())
@settings(deadline=None, max_examples=25)
def test_signal_fraction_counts_the_groups_with_an_advantage(batch):
    group_size, rewards = batch
    advantages, _ = compute_group_normalized_rewards(torch.tensor(rewards), group_size)
    groups = advantages.reshape(-1, group_size)
    assert signal_fraction(torch.tensor(rewards), group_size) == pytest.approx(groups.any(dim=1).float().mean().item())


def test_predicted_signal_fraction_is_by_the_share_of_rewarded_responses():
    rewards = torch.tensor([1.0, 0, 0, 0, 0, 0, 0.5, 0])
    assert predicted_signal_fraction(rewards, 4) == pytest.approx(1 - 0.25**4 - 0.75**4)
    assert predicted_signal_fraction(torch.ones(8), 4) == predicted_signal_fraction(torch.zeros(8), 4) == 0.0


def test_no_eps_is_needed_where_all_rewards_are_equal():
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    for normalizer in ("std", "mean"):
        advantages, _ = compute_group_normalized_rewards(rewards, 2, "mean", 0.0, normalizer)
        assert advantages[:4].tolist() == [0.0] * 4 and advantages[4:].isfinite().all()


@pytest.mark.parametrize("eps", [-1e-6, math.nan, math.inf, "1e-6", True])
def test_a_bad_eps_is_named(eps):
    with pytest.raises(ValueError, match="advantage_eps: got"):
        compute_group_normalized_rewards(torch.rand(4), 2, advantage_eps=eps)


def test_rewards_of_other_number_types():
    rewards, _ = compute_rollout_rewards(
        lambda r, t: {"reward": np.float32(1), "format_reward": np.int64(1)}, ["a", "b"], ["1", "1"]
    )
    assert rewards.tolist() == [1.0, 1.0]
    advantages, _ = compute_group_normalized_rewards(torch.tensor([1, 0]), 2)
    torch.testing.assert_close(advantages, torch.tensor([1.0, -1.0]) / math.sqrt(2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("grade", [None, {"reward": 1e300, "format_reward": 1}, {"reward": "1", "format_reward": 1}])
def test_a_grade_that_is_none_is_named(grade):
    with pytest.raises(ValueError, match="reward_fn: reward of response 1"):
        good = {"reward": 1.0, "format_reward": 1.0}
        compute_rollout_rewards(lambda r, t: good if r == "a" else grade, ["a", "b"], ["1", "1"])
