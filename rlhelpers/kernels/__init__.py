"""The mathematics of the workbook in pure torch: no files, no network, no engine."""

from rlhelpers.kernels.advantages import compute_group_normalized_rewards, compute_rollout_rewards
from rlhelpers.kernels.logprobs import get_response_log_probs
from rlhelpers.kernels.losses import aggregate_loss_across_microbatch, compute_policy_gradient_loss
from rlhelpers.kernels.tokens import tokenize_prompt_and_output
from rlhelpers.kernels.train_step import grpo_train_step, policy_gradient_step

__all__ = [
    "aggregate_loss_across_microbatch",
    "compute_group_normalized_rewards",
    "compute_policy_gradient_loss",
    "compute_rollout_rewards",
    "get_response_log_probs",
    "grpo_train_step",
    "policy_gradient_step",
    "tokenize_prompt_and_output",
]
