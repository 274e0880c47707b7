"""The exercises of the notebooks.  `check.name(my_function)` reports what holds and what does not."""

from rlhelpers.exercises.advantages import compute_group_normalized_rewards, compute_rollout_rewards
from rlhelpers.exercises.batches import off_policy_updates, rollout_rows
from rlhelpers.exercises.derivations import (
    baseline_variance,
    group_weight,
    optimal_baseline,
    pairwise_surrogate,
    second_moment,
    standard_error,
)
from rlhelpers.exercises.losses import (
    accumulated_loss,
    aggregate_loss_across_microbatch,
    compute_policy_gradient_loss,
)
from rlhelpers.exercises.preferences import dpo_loss, response_sums
from rlhelpers.exercises.prompting import count_categories, has_format, in_substance
from rlhelpers.exercises.step import grpo_train_step
from rlhelpers.exercises.tokens import get_response_log_probs, tokenize_prompt_and_output
from rlhelpers.exercises.variants import leave_one_out, maxrl_normalizer, off_policy_rows, variant_rows

__all__ = [
    "accumulated_loss",
    "aggregate_loss_across_microbatch",
    "baseline_variance",
    "compute_group_normalized_rewards",
    "compute_policy_gradient_loss",
    "compute_rollout_rewards",
    "count_categories",
    "dpo_loss",
    "get_response_log_probs",
    "group_weight",
    "grpo_train_step",
    "has_format",
    "in_substance",
    "leave_one_out",
    "maxrl_normalizer",
    "off_policy_rows",
    "off_policy_updates",
    "optimal_baseline",
    "pairwise_surrogate",
    "response_sums",
    "rollout_rows",
    "second_moment",
    "standard_error",
    "tokenize_prompt_and_output",
    "variant_rows",
]
