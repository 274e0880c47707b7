"""Hooks for the tests of Stanford CS336 (spring 2026), assignment 5.

In a copy of the course's repository, replace its tests/adapters.py by this file and run its tests/test_grpo.py.
The hooks of test_data, test_dpo and test_metrics come with the supplement.
"""

from rlhelpers.kernels import (
    aggregate_loss_across_microbatch,
    compute_group_normalized_rewards,
    compute_policy_gradient_loss,
    compute_rollout_rewards,
    get_response_log_probs,
    grpo_train_step,
    tokenize_prompt_and_output,
)

run_tokenize_prompt_and_output = tokenize_prompt_and_output
run_get_response_log_probs = get_response_log_probs
run_compute_rollout_rewards = compute_rollout_rewards
run_compute_group_normalized_rewards = compute_group_normalized_rewards
run_compute_policy_gradient_loss = compute_policy_gradient_loss
run_aggregate_loss_across_microbatch = aggregate_loss_across_microbatch
run_grpo_train_step = grpo_train_step
