"""Exercises of notebook 03: from responses to rewards, and from rewards to advantages."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhelpers import kernels
from rlhelpers.exercises.exercise import Exercise


def word_reward(response: str, ground_truth: str) -> dict[str, float]:
    """A reward for checks: the format is one word, the answer is that word."""
    format_reward = float(len(response.split()) == 1)
    answer_reward = float(response.strip() == ground_truth) * format_reward
    return {"reward": answer_reward, "format_reward": format_reward, "answer_reward": answer_reward}


def _weighted_reward(response: str, ground_truth: str) -> dict[str, float]:
    """The same with a total that is neither part."""
    grade = word_reward(response, ground_truth)
    return grade | {"reward": 0.5 * grade["answer_reward"] + 0.25 * grade["format_reward"]}


def _format_for_reward(**given):
    _, metadata = kernels.compute_rollout_rewards(**given)
    return metadata["format_rewards"], metadata | {"mean_reward": metadata["mean_format_reward"]}


def _rewards_and_means(function: Callable, inputs: dict) -> tuple:
    rewards, metadata = function(**inputs)
    return rewards, {name: metadata[name] for name in ("mean_reward", "mean_format_reward", "format_rewards")}


compute_rollout_rewards = Exercise(
    "compute_rollout_rewards",
    kernels.compute_rollout_rewards,
    {
        "each response's reward and format reward, and their means": [
            {"reward_fn": reward_fn, "rollout_responses": responses, "repeated_ground_truths": truths}
            for responses, truths in (
                (["4"], ["4"]),
                (["4", "4 or 5"], ["4", "4"]),
                (["5", "4", "I say 4", "9"], ["4", "4", "9", "9"]),
            )
            for reward_fn in (word_reward, _weighted_reward)
        ],
    },
    {
        "giving reward_fn the ground truth first": lambda reward_fn, rollout_responses, repeated_ground_truths: (
            kernels.compute_rollout_rewards(reward_fn, repeated_ground_truths, rollout_responses)
        ),
        "paying for the format": _format_for_reward,
    },
    _rewards_and_means,
)


def _groups(*rewards: list[float]) -> dict:
    return {"raw_rewards": torch.tensor(rewards).flatten(), "group_size": len(rewards[0])}


def _with(groups: list[dict], **settings) -> list[dict]:
    return [inputs | settings for inputs in groups]


GROUPS = [
    _groups([1.0, 0.0]),
    _groups([1.0, 0.0, 0.0, 0.0]),
    _groups([1.0, 0.0, 0.0], [1.0, 1.0, 0.0]),
    _groups([0.5, 0.1, 0.9], [3.0, 1.0, 2.0]),
    _groups([0.5, 0.51]),
]
EQUAL_GROUPS = [_groups([1.0, 1.0]), _groups([0.9, 0.9, 0.9]), _groups([0.0, 0.0, 0.0], [1.0, 0.0, 0.0])]


def _advantages_with(spread: Callable[[Tensor], Tensor]) -> Callable:
    """A wrong function: `spread` of the grouped rewards in the place of the group's standard deviation."""

    def advantages(advantage_normalizer="std", **given):
        own = spread if advantage_normalizer == "std" else advantage_normalizer
        return kernels.compute_group_normalized_rewards(advantage_normalizer=own, **given)

    return advantages


def _columns(raw_rewards, group_size, **settings):
    shape = (group_size, -1)
    turned = raw_rewards.reshape(shape).T.reshape(-1)
    advantages, metadata = kernels.compute_group_normalized_rewards(turned, group_size, **settings)
    return advantages.reshape(shape[::-1]).T.reshape(-1), metadata


def _unmasked(raw_rewards, group_size, baseline="mean", advantage_eps=1e-6, advantage_normalizer="std"):
    grouped = raw_rewards.reshape(-1, group_size)
    mean = grouped.mean(dim=1, keepdim=True)
    spread = {"std": grouped.std(dim=1, keepdim=True) + advantage_eps, "mean": mean + advantage_eps, "none": 1.0}
    advantages = (grouped - (mean if baseline == "mean" else 0.0)) / spread[advantage_normalizer]
    return advantages.reshape(-1), {}


compute_group_normalized_rewards = Exercise(
    "compute_group_normalized_rewards",
    kernels.compute_group_normalized_rewards,
    {
        "GRPO: (r - mu) / (std + eps) within each group": GROUPS,
        "a group of equal rewards gives zero": EQUAL_GROUPS,
        "eps is added to the standard deviation": _with(GROUPS, advantage_eps=0.5),
        "Dr. GRPO: r - mu": _with(GROUPS, advantage_normalizer="none"),
        "RFT: r itself, also where all are right": _with(
            GROUPS + EQUAL_GROUPS, baseline="none", advantage_normalizer="none"
        ),
        "no baseline, and still a normalizer": _with(GROUPS, baseline="none"),
        "MaxRL: (r - mu) / (mu + eps)": _with(GROUPS, advantage_normalizer="mean", advantage_eps=0.1),
    },
    {
        "the population's standard deviation (n instead of n - 1)": _advantages_with(
            lambda grouped: grouped.std(dim=1, keepdim=True, correction=0)
        ),
        "one mean and one deviation for the whole batch": lambda **given: kernels.compute_group_normalized_rewards(
            **given | {"group_size": len(given["raw_rewards"])}
        ),
        "groups that are columns: a group's responses stand side by side": _columns,
        "dividing what is left of equal rewards by rounding, by eps": _unmasked,
        "the variance instead of its root": _advantages_with(lambda grouped: grouped.var(dim=1, keepdim=True)),
    },
    lambda function, inputs: function(**inputs)[0],
)
