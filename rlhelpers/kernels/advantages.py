"""From responses to rewards, and from rewards to advantages."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rlhelpers.checks import (
    check_callable,
    check_same_length,
    check_tensors,
    check_texts,
    check_whole,
    is_number,
    shown,
)
from rlhelpers.kernels.estimators import BASELINES, NORMALIZERS, Baseline, check_eps, look_up, needs_a_group


def compute_rollout_rewards(
    reward_fn: Callable[[str, str], dict[str, float]],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
) -> tuple[Tensor, dict[str, float | Tensor]]:
    """Grade every response against its ground truth (handout, section 4.2).

    Return the total rewards, (rollouts,) float32, and metadata: `mean_reward`, `mean_format_reward`, and
    `format_rewards`, (rollouts,).  Rewards of True and False are 1 and 0.  The reward function decides what a ground
    truth may be.
    Raises ValueError when the lists differ in length, a response is no text, the reward of a response is not a finite
    number, or `reward_fn` raised for it; the error names the response.
    """
    check_callable(reward_fn=reward_fn)
    check_same_length(rollout_responses=rollout_responses, repeated_ground_truths=repeated_ground_truths)
    check_texts(rollout_responses=rollout_responses)
    pairs = zip(rollout_responses, repeated_ground_truths, strict=True)
    grades = [grade_one(reward_fn, i, *pair) for i, pair in enumerate(pairs)]
    rewards, formats = _column(grades, "reward"), _column(grades, "format_reward")
    return rewards, {
        "mean_reward": rewards.mean().item(),
        "mean_format_reward": formats.mean().item(),
        "format_rewards": formats,
    }


def grade_one(grade: Callable, i: int, response: str, ground_truth: str):
    """Call grade(response, ground_truth).  Raise ValueError naming response `i` where it raises: a reward of 0 would be
    taken for a wrong answer, and push its group away from it."""
    try:
        return grade(response, ground_truth)
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


def compute_group_normalized_rewards(
    raw_rewards: Tensor,
    group_size: int,
    baseline: str | Baseline = "mean",
    advantage_eps: float = 1e-6,
    advantage_normalizer: str | Baseline = "std",
) -> tuple[Tensor, dict[str, float]]:
    """A^(i,j) = (r(y^(i,j) | x^(i)) - b_i) / (s_i + eps), within each group of `group_size` = G responses to a prompt.

    Baseline b and normalizer s are names in `estimators.BASELINES` and `NORMALIZERS`, or functions of the grouped
    rewards, (groups, G) -> (groups, 1) or (groups, G).  GRPO: "mean", "std" (arXiv:2402.03300).  Dr. GRPO: "mean",
    "none" (arXiv:2503.20783).  RFT: "none", "none".  MaxRL: "mean", "mean".  RLOO: "leave_one_out", "none".

    raw_rewards: (rollouts,), a group's responses side by side.  Return advantages of the same shape, and metadata: std,
    min and max reward, and the mean std within a group.  A group of equal rewards whose baseline is that reward, up to
    rounding, gives exactly zero.

    Raises ValueError for an unknown name, what is no tensor of real numbers, eps below 0, a reward that is not finite,
    a number of rewards that is no multiple of the group size; for a group size of 1 where baseline or normalizer needs
    more; and, naming the group, for a normalizer that is below 0, or 0 where the rewards differ: dividing by it would
    turn or blow up every advantage.
    """
    check_eps(advantage_eps)
    grouped = _grouped(raw_rewards, group_size)
    baseline_fn = look_up("baseline", baseline, BASELINES)
    normalizer_fn = look_up("advantage_normalizer", advantage_normalizer, NORMALIZERS)
    if group_size == 1 and needs_a_group(baseline, advantage_normalizer):
        raise ValueError('group_size: got 1; baseline "mean" and advantage_normalizer "std" need at least 2')
    advantages = grouped - _per_group("baseline", baseline_fn, grouped)
    equal = (grouped == grouped[:, :1]).all(dim=1, keepdim=True)
    # The mean of equal floats may differ from them in the last bits; divided by eps, these bits would be a signal.
    rounding = 4 * group_size * torch.finfo(grouped.dtype).eps * grouped.abs()
    zero = equal & (advantages.abs() <= rounding)
    if normalizer_fn is not None:
        scale = _per_group("advantage_normalizer", normalizer_fn, grouped)
        _check_scale(scale, grouped, equal, zero)
        advantages = advantages / (scale + advantage_eps)
    advantages = advantages.masked_fill(zero, 0.0)
    if not advantages.isfinite().all():
        raise ValueError("baseline, advantage_normalizer: their advantages are not all finite numbers")
    return advantages.reshape(raw_rewards.shape), reward_statistics(grouped)


def _check_scale(scale: Tensor, grouped: Tensor, equal: Tensor, zero: Tensor) -> None:
    wrong = ((scale < 0) & ~zero) | ((scale <= 0) & ~equal)
    if wrong.any():
        i = int(wrong.any(dim=1).nonzero()[0])
        raise ValueError(
            f"advantage_normalizer: it is {scale[i].min().item():g} for group {i} with the rewards "
            f"{shown(grouped[i].tolist())}; accepted is a number above 0 where rewards differ "
            '("mean" is for rewards of at least 0)'
        )


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
    """1 - p^G - (1 - p)^G, with p the share of rewarded responses in the batch: signal_fraction if every problem were
    equally hard.  Problems differ, so the measured one tends to be lower."""
    p = (rewards > 0).double().mean().item()
    return 1 - p**group_size - (1 - p) ** group_size
