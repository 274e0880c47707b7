"""The course's hooks exist, with the course's argument order and defaults."""

import inspect
import runpy
from pathlib import Path

import pytest

# By path, not by import: whether this folder is a package depends on what of the course lies in it.
HOOKS = runpy.run_path(str(Path(__file__).with_name("adapters.py")))

NO_DEFAULT = inspect.Parameter.empty
COURSE = {
    "run_tokenize_prompt_and_output": {"prompt_strs": NO_DEFAULT, "output_strs": NO_DEFAULT, "tokenizer": NO_DEFAULT},
    "run_get_response_log_probs": {
        "model": NO_DEFAULT,
        "input_ids": NO_DEFAULT,
        "labels": NO_DEFAULT,
        "return_token_entropy": False,
    },
    "run_compute_rollout_rewards": {
        "reward_fn": NO_DEFAULT,
        "rollout_responses": NO_DEFAULT,
        "repeated_ground_truths": NO_DEFAULT,
    },
    "run_compute_group_normalized_rewards": {
        "raw_rewards": NO_DEFAULT,
        "group_size": NO_DEFAULT,
        "baseline": "mean",
        "advantage_eps": 1e-6,
        "advantage_normalizer": "std",
    },
    "run_compute_policy_gradient_loss": {
        "raw_rewards_or_advantages": NO_DEFAULT,
        "policy_log_probs": NO_DEFAULT,
        "importance_reweighting_method": "none",
        "old_log_probs": None,
        "cliprange": None,
        "response_mask": None,
    },
    "run_aggregate_loss_across_microbatch": {
        "per_token_policy_gradient_loss": NO_DEFAULT,
        "mask": NO_DEFAULT,
        "loss_normalization": "sequence",
        "normalization_constant": None,
    },
    "run_grpo_train_step": {
        "model": NO_DEFAULT,
        "tokenizer": NO_DEFAULT,
        "optimizer": NO_DEFAULT,
        "gradient_accumulation_steps": NO_DEFAULT,
        "max_grad_norm": NO_DEFAULT,
        "reward_fn": NO_DEFAULT,
        "repeated_prompts": NO_DEFAULT,
        "rollout_responses": NO_DEFAULT,
        "repeated_ground_truths": NO_DEFAULT,
        "group_size": NO_DEFAULT,
        "baseline": "mean",
        "advantage_eps": 1e-6,
        "advantage_normalizer": "std",
        "importance_reweighting_method": "none",
        "old_log_probs": None,
        "cliprange": None,
        "loss_normalization": "sequence",
        "normalization_constant": None,
    },
    "run_parse_mmlu_response": {"mmlu_example": NO_DEFAULT, "model_output": NO_DEFAULT},
    "run_parse_gsm8k_response": {"model_output": NO_DEFAULT},
    "get_packed_sft_dataset": {
        "tokenizer": NO_DEFAULT,
        "dataset_path": NO_DEFAULT,
        "seq_length": NO_DEFAULT,
        "shuffle": NO_DEFAULT,
    },
    "run_iterate_batches": {"dataset": NO_DEFAULT, "batch_size": NO_DEFAULT, "shuffle": NO_DEFAULT},
    "run_compute_per_instance_dpo_loss": {
        "lm": NO_DEFAULT,
        "lm_ref": NO_DEFAULT,
        "tokenizer": NO_DEFAULT,
        "beta": NO_DEFAULT,
        "prompt": NO_DEFAULT,
        "response_chosen": NO_DEFAULT,
        "response_rejected": NO_DEFAULT,
    },
}


def test_there_is_no_hook_that_the_table_forgot():
    assert {name for name in HOOKS if name.startswith("run_") or name == "get_packed_sft_dataset"} == set(COURSE)


@pytest.mark.parametrize("name", COURSE)
def test_argument_order_and_defaults_are_the_courses(name):
    parameters = inspect.signature(HOOKS[name]).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(COURSE[name].items())


@pytest.mark.parametrize("name", COURSE)
def test_what_the_package_adds_is_optional_and_by_keyword(name):
    parameters = inspect.signature(HOOKS[name]).parameters.values()
    assert all(
        p.kind is p.KEYWORD_ONLY and p.default is not NO_DEFAULT for p in parameters if p.name not in COURSE[name]
    )
