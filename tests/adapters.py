"""Hooks for the tests of Stanford CS336 (spring 2026), assignment 5.

In a copy of the course's repository, replace its tests/adapters.py by this file and run its tests: test_grpo.py, and of
the supplement test_metrics.py, test_data.py and test_dpo.py.
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
from rlhelpers.tasks.answers import parse_gsm8k_response, parse_mmlu_response
from rlhelpers.training.dpo import compute_per_instance_dpo_loss
from rlhelpers.training.sft import PackedSFTDataset, iterate_batches

run_tokenize_prompt_and_output = tokenize_prompt_and_output
run_get_response_log_probs = get_response_log_probs
run_compute_rollout_rewards = compute_rollout_rewards
run_compute_group_normalized_rewards = compute_group_normalized_rewards
run_compute_policy_gradient_loss = compute_policy_gradient_loss
run_aggregate_loss_across_microbatch = aggregate_loss_across_microbatch
run_grpo_train_step = grpo_train_step
run_parse_gsm8k_response = parse_gsm8k_response
get_packed_sft_dataset = PackedSFTDataset
run_iterate_batches = iterate_batches
run_compute_per_instance_dpo_loss = compute_per_instance_dpo_loss


def run_parse_mmlu_response(mmlu_example, model_output):
    return parse_mmlu_response(model_output)
