"""From responses to rewards, and from rewards to advantages."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rlhelpers.checks import (
    check_callable,
    check_one_of,
    check_same_length,
    check_texts,
    check_whole,
    is_number,
    refused,
    shown,
)
from rlhelpers.kernels.checks import check_tensors

Baseline = Callable[[Tensor], Tensor]
"""A reader's own baseline or normalizer: grouped rewards (groups, G) -> (groups, 1) or (groups, G)."""


def compute_rollout_rewards(
    reward_fn: Callable[[str, str], dict[str, float]],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
) -> tuple[Tensor, dict[str, float | Tensor]]:
    """Grade every response against its ground truth (handout, section 4.2).

    Returns the total rewards, (rollouts,) float32, and metadata: `mean_reward`, `mean_format_reward`,
    and the format rewards themselves, (rollouts,).  Rewards of True and False are 1 and 0.  What a ground truth
    may be is the reward function's to say.
    Raises ValueError when the lists differ in length, a response is no text, or naming the first response whose reward
    is not a finite number, or for which `reward_fn` raised, with the beginning of its text.  That is no reward of 0: a
    0 would be taken for a wrong answer, and its group be pushed away from it.
    """
    check_callable(reward_fn=reward_fn)
    check_same_length(rollout_responses=rollout_responses, repeated_ground_truths=repeated_ground_truths)
    check_texts(rollout_responses=rollout_responses)
    pairs = zip(rollout_responses, repeated_ground_truths, strict=True)
    grades = [_grade(reward_fn, i, *pair) for i, pair in enumerate(pairs)]
    rewards, formats = _column(grades, "reward"), _column(grades, "format_reward")
    return rewards, {
        "mean_reward": rewards.mean().item(),
        "mean_format_reward": formats.mean().item(),
        "format_rewards": formats,
    }


def _grade(reward_fn: Callable[[str, str], dict[str, float]], i: int, response: str, ground_truth: str):
    try:
        return reward_fn(response, ground_truth)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"reward_fn: it raised for response {i}, which begins {response[:60]!r}: {said}") from error


def _column(grades: Sequence[Mapping[str, float]], part: str) -> Tensor:
    """One part of every grade, (rollouts,) float32."""
    largest = torch.finfo(torch.float32).max
    values = [grade.get(part) if isinstance(grade, Mapping) else grade for grade in grades]
    for i, value in enumerate(values):
        if not (is_number(value) or isinstance(value, bool)) or not abs(value) <= largest:
            raise ValueError(f"reward_fn: {part} of response {i} is {value!r}; it must be a finite number")
    return torch.tensor([float(value) for value in values], dtype=torch.float32)


def group_mean(rewards: Tensor) -> Tensor:
    """mu_i, the mean reward of group i (handout, eq. 29).  (groups, G) -> (groups, 1)."""
    return rewards.mean(dim=1, keepdim=True)


def group_std(rewards: Tensor) -> Tensor:
    """std_i with n - 1, as torch computes it (handout, eq. 30 has n, and asks for torch.std).  Undefined for G = 1."""
    return rewards.std(dim=1, keepdim=True)


BASELINES: dict[str, Baseline] = {"mean": group_mean, "none": lambda rewards: torch.zeros_like(rewards[:, :1])}
NORMALIZERS: dict[str, Baseline | None] = {"std": group_std, "mean": group_mean, "none": None}


def compute_group_normalized_rewards(
    raw_rewards: Tensor,
    group_size: int,
    baseline: str | Baseline = "mean",
    advantage_eps: float = 1e-6,
    advantage_normalizer: str | Baseline = "std",
) -> tuple[Tensor, dict[str, float]]:
    """A^(i,j) = (r(y^(i,j) | x^(i)) - b_i) / (s_i + eps), within each group of `group_size` = G responses to a prompt.

    GRPO: baseline "mean", normalizer "std" (arXiv:2402.03300).  Dr. GRPO: "mean", "none" (arXiv:2503.20783).
    RFT: "none", "none".  MaxRL: "mean", "mean".  Either may be a function of the grouped rewards (groups, G).

    raw_rewards: (rollouts,), a group's responses side by side.  Returns advantages of the same shape, and metadata:
    std, min and max reward, and the mean std within a group.  A group of equal rewards under a mean baseline gives
    exactly zero: the mean of equal floats may differ from them in the last bit, and dividing by eps would make that
    bit a signal.

    Raises ValueError for an unknown name, what is no tensor of real numbers, eps below 0, a reward that is not finite,
    a number of rewards that is no multiple of the group size, and group size 1 with a std, which it does not have, or
    with its mean as the baseline, which would leave no advantage to learn from.
    """
    check_eps(advantage_eps)
    grouped = _grouped(raw_rewards, group_size)
    baseline_fn = look_up("baseline", baseline, BASELINES)
    normalizer_fn = look_up("advantage_normalizer", advantage_normalizer, NORMALIZERS)
    if group_size == 1 and (baseline_fn is group_mean or normalizer_fn is group_std):
        raise ValueError('group_size: got 1; baseline "mean" and advantage_normalizer "std" need at least 2')
    advantages = grouped - _per_group("baseline", baseline_fn, grouped)
    if normalizer_fn is not None:
        advantages = advantages / (_per_group("advantage_normalizer", normalizer_fn, grouped) + advantage_eps)
    if baseline_fn is group_mean:
        all_equal = (grouped == grouped[:, :1]).all(dim=1, keepdim=True)
        advantages = advantages.masked_fill(all_equal, 0.0)
    if not advantages.isfinite().all():
        raise ValueError("baseline, advantage_normalizer: their advantages are not all finite numbers")
    return advantages.reshape(raw_rewards.shape), reward_statistics(grouped)


def check_eps(advantage_eps: float) -> None:
    if not is_number(advantage_eps) or not 0 <= advantage_eps < math.inf:
        raise refused("advantage_eps", advantage_eps, "a finite number of at least 0")


def _grouped(raw_rewards: Tensor, group_size: int) -> Tensor:
    check_whole(1, group_size=group_size)
    check_tensors(raw_rewards=raw_rewards)
    if raw_rewards.ndim != 1 or not len(raw_rewards) or len(raw_rewards) % group_size:
        raise ValueError(
            f"raw_rewards: got shape {tuple(raw_rewards.shape)}; it must be (rollouts,) "
            f"with a multiple of group_size={group_size}"
        )
    if not torch.isfinite(raw_rewards).all():
        index = int((~torch.isfinite(raw_rewards)).nonzero()[0])
        raise ValueError(f"raw_rewards: reward {index} is {raw_rewards[index].item()}; all must be finite")
    return (raw_rewards if raw_rewards.is_floating_point() else raw_rewards.float()).reshape(-1, group_size)


def look_up(argument: str, choice, table: dict):
    """The function that a name of the table stands for; a function stands for itself."""
    if callable(choice):
        return choice
    check_one_of(table, " or a function", **{argument: choice})
    return table[choice]


def _per_group(argument: str, function: Baseline, grouped: Tensor) -> Tensor:
    """The function's values, which must not broadcast along the wrong axis."""
    values = function(grouped)
    groups, size = grouped.shape
    if not isinstance(values, Tensor) or values.shape not in ((groups, 1), (groups, size)):
        raise ValueError(f"{argument}: gave {shown(values)}; it must be a tensor of {(groups, 1)} or {(groups, size)}")
    return values


def reward_statistics(grouped: Tensor) -> dict[str, float]:
    """Spread of the rewards (groups, G) over the batch and, on average, within a group; smallest and largest."""
    # One response alone has no spread; 0 keeps the log free of NaN.
    within = grouped.std(dim=1).mean().item() if grouped.shape[1] > 1 else 0.0
    return {
        "reward_std_batch": grouped.std().item() if grouped.numel() > 1 else 0.0,
        "reward_std_within_groups": within,
        "reward_min": grouped.min().item(),
        "reward_max": grouped.max().item(),
    }


def pass_at_k(rewards: Tensor, group_size: int) -> float:
    """The fraction of groups with at least one rewarded response (k = G, the whole group)."""
    return (rewards.reshape(-1, group_size) > 0).any(dim=1).float().mean().item()


def signal_fraction(rewards: Tensor, group_size: int) -> float:
    """The fraction of groups whose rewards are not all equal.  Under a mean baseline the others give no gradient."""
    grouped = rewards.reshape(-1, group_size)
    return (grouped != grouped[:, :1]).any(dim=1).float().mean().item()


def predicted_signal_fraction(rewards: Tensor, group_size: int) -> float:
    """1 - p^G - (1 - p)^G, with p the share of rewarded responses in the batch.

    What signal_fraction is expected to be if every problem is equally hard.  Problems differ, so the measured one
    tends to be lower.
    """
    p = (rewards > 0).double().mean().item()
    return 1 - p**group_size - (1 - p) ** group_size
