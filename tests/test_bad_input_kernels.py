"""Bad input to the kernels: refused by name before anything changes, or read rightly.  A new case is a row of ROWS."""

import copy
import math

import numpy as np
import pytest
import torch
from bad_input import (
    NOT_A_FUNCTION,
    NOT_A_LIST,
    NOT_A_NAME,
    NOT_A_NUMBER,
    NOT_A_TENSOR,
    NOT_POSITIVE,
    NOT_TEXT,
    NOT_WHOLE,
    SOMETHING_ELSE,
    Nothing,
    Row,
    check_refusal,
    name_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhelpers import kernels
from rlhelpers.kernels.estimators import Estimator, group_mean
from rlhelpers.kernels.logprobs import engine_mismatch, score_batch
from rlhelpers.kernels.losses import truncated_importance_weights
from rlhelpers.kernels.tokens import encode, pad_prompts_and_outputs, padding_id

IDS = torch.tensor([[3, 4, 5, 6], [4, 4, 5, 6]])
LABELS = torch.tensor([[4, 5, 6, 1], [4, 5, 6, 1]])
MASK = torch.tensor([[False, False, True, True], [False, True, True, False]])
LOG_PROBS = -torch.arange(20.0).reshape(4, 5) / 20
ALL = torch.ones(4, 5, dtype=torch.bool)
ROLLOUTS = [([3, 4], [3]), ([3, 4], [4]), ([3, 4], [5]), ([3, 4], [3])]
WEIGHTS = torch.ones(4, 2)
WRONG_SHAPES = [torch.zeros(4, 4), torch.zeros(4), torch.zeros(0), torch.zeros(2, 4, 5), torch.tensor(1.0)]
WRONG_IDS = [IDS.float(), IDS.bool(), IDS.to(torch.int8)]


def reward(response, ground_truth):
    return {"reward": float("a" in response), "format_reward": 1.0}


@pytest.fixture(scope="module")
def good(tokenizer, tiny_gpt2):
    """Of each function good arguments."""
    model, other = tiny_gpt2(), tiny_gpt2()
    rows = {"input_ids": IDS, "labels": LABELS, "temperature": 1.0, "response_mask": MASK}
    step = {
        "model": model,
        "tokenizer": tokenizer,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "reward_fn": reward,
        "repeated_prompts": ["a b"] * 4,
        "rollout_responses": ["a", "b", "c", "a"],
        "repeated_ground_truths": ["1"] * 4,
        "group_size": 2,
        "baseline": "mean",
        "advantage_eps": 1e-6,
        "advantage_normalizer": "std",
        "importance_reweighting_method": "grpo",
        "old_log_probs": -WEIGHTS,
        "cliprange": 0.2,
        "loss_normalization": "constant",
        "normalization_constant": 8.0,
        "rollout_token_ids": ROLLOUTS,
        "temperature": 1.0,
        "token_weights": WEIGHTS,
    }
    return {
        "compute_group_normalized_rewards": (
            kernels.compute_group_normalized_rewards,
            {
                "raw_rewards": torch.tensor([0.0, 1, 1, 0]),
                "group_size": 2,
                "baseline": "mean",
                "advantage_eps": 1e-6,
                "advantage_normalizer": "std",
            },
        ),
        "compute_rollout_rewards": (
            kernels.compute_rollout_rewards,
            {"reward_fn": reward, "rollout_responses": ["a", "b"], "repeated_ground_truths": ["1", "2"]},
        ),
        "compute_policy_gradient_loss": (
            kernels.compute_policy_gradient_loss,
            {
                "raw_rewards_or_advantages": torch.ones(4),
                "policy_log_probs": LOG_PROBS,
                "importance_reweighting_method": "grpo",
                "old_log_probs": LOG_PROBS - 0.1,
                "cliprange": 0.05,
                "response_mask": ALL,
            },
        ),
        "aggregate_loss_across_microbatch": (
            kernels.aggregate_loss_across_microbatch,
            {
                "per_token_policy_gradient_loss": LOG_PROBS,
                "mask": ALL,
                "loss_normalization": "constant",
                "normalization_constant": 3.0,
            },
        ),
        "truncated_importance_weights": (
            truncated_importance_weights,
            {"policy_log_probs": LOG_PROBS, "engine_log_probs": LOG_PROBS - 0.1, "mask": ALL, "cap": 2.0},
        ),
        "engine_mismatch": (
            engine_mismatch,
            {"trainer_log_probs": LOG_PROBS, "engine_log_probs": LOG_PROBS - 0.1, "mask": ALL},
        ),
        "get_response_log_probs": (
            kernels.get_response_log_probs,
            {"model": model, "return_token_entropy": True, **rows},
        ),
        "score_batch": (score_batch, {"model": model, "microbatch_size": 1, **rows}),
        "tokenize_prompt_and_output": (
            kernels.tokenize_prompt_and_output,
            {"prompt_strs": ["a b", "c"], "output_strs": ["d", "e f"], "tokenizer": tokenizer},
        ),
        "pad_prompts_and_outputs": (
            pad_prompts_and_outputs,
            {"prompt_ids": [[1, 2], [3]], "output_ids": [[4], [5]], "pad_id": 0},
        ),
        "encode": (encode, {"tokenizer": tokenizer, "text": "a b"}),
        "padding_id": (padding_id, {"tokenizer": tokenizer}),
        "group_mean": (group_mean, {"rewards": torch.ones(2, 2)}),
        "Estimator": (
            Estimator,
            {
                "name": "mine",
                "baseline": "mean",
                "advantage_normalizer": "std",
                "loss_normalization": "sequence",
                "importance_reweighting_method": "grpo",
                "cliprange": 0.2,
                "advantage_eps": 1e-6,
                "engine_ratio_cap": 2.0,
            },
        ),
        "grpo_train_step": (kernels.grpo_train_step, step),
        "other optimizer": torch.optim.AdamW(other.parameters()),
    }


def table_of_numbers(function: str) -> list[Row]:
    """Rows for what several functions take under one name."""
    return [
        Row(function, "baseline", NOT_A_NAME, "baseline: got "),
        Row(function, "advantage_normalizer", NOT_A_NAME),
        Row(function, "advantage_eps", [*NOT_A_NUMBER, -1, math.inf]),
    ]


GIVES_NO_COLUMN = [lambda grouped: 1.0, lambda grouped: None, lambda grouped: grouped[0], lambda grouped: [1.0]]
GIVES_NO_GRADE = [
    lambda response, truth: None,
    lambda response, truth: {"format_reward": 1.0},
    lambda response, truth: {"reward": "1", "format_reward": 1.0},
    lambda response, truth: {"reward": math.nan, "format_reward": 1.0},
    lambda response, truth: {"reward": -math.inf, "format_reward": 1.0},
    lambda response, truth: {"reward": torch.tensor(1.0), "format_reward": 1.0},
]
GIVES_NO_LOSS = [
    lambda *arguments: arguments[1],  # the loss alone
    lambda *arguments: None,
    lambda *arguments: (arguments[1].sum(dim=1), arguments[4]),
    lambda *arguments: (arguments[1], 0.0),
]
ROWS = [
    *table_of_numbers("compute_group_normalized_rewards"),
    *table_of_numbers("Estimator"),
    *table_of_numbers("grpo_train_step"),
    Row("compute_group_normalized_rewards", "raw_rewards", NOT_A_TENSOR),
    Row("compute_group_normalized_rewards", "raw_rewards", WRONG_SHAPES[:1] + WRONG_SHAPES[2:]),
    Row("compute_group_normalized_rewards", "raw_rewards", [torch.zeros(5)], "a multiple of group_size=2"),
    Row("compute_group_normalized_rewards", "raw_rewards", [torch.zeros(4, device="meta")], "raw_rewards: is on meta"),
    Row("compute_group_normalized_rewards", "raw_rewards", [torch.zeros(4) * 1j], "accepted are real numbers"),
    Row("compute_group_normalized_rewards", "raw_rewards", [torch.tensor([0, math.nan])], "reward 1 is nan"),
    Row("compute_group_normalized_rewards", "raw_rewards", [torch.tensor([math.inf, 0])], "reward 0 is inf"),
    Row("compute_group_normalized_rewards", "group_size", [*NOT_WHOLE, 0]),
    Row("compute_group_normalized_rewards", "group_size", [1], '"std" need'),
    Row("compute_group_normalized_rewards", "group_size", [3], "a multiple of group_size=3"),
    Row("compute_group_normalized_rewards", "baseline", GIVES_NO_COLUMN, "baseline: gave "),
    Row("compute_group_normalized_rewards", "advantage_normalizer", GIVES_NO_COLUMN, "advantage_normalizer: gave "),
    Row("compute_rollout_rewards", "reward_fn", NOT_A_FUNCTION),
    Row("compute_rollout_rewards", "reward_fn", GIVES_NO_GRADE, "reward of response 0 is "),
    Row("compute_rollout_rewards", "rollout_responses", NOT_A_LIST),
    Row("compute_rollout_rewards", "rollout_responses", [["a"], [], ["a"] * 3], "all must have the same length"),
    Row("compute_rollout_rewards", "rollout_responses", [["a", None], ["a", 1], ["a", b"b"]], "responses: number 1 is"),
    Row("compute_rollout_rewards", "repeated_ground_truths", NOT_A_LIST),
    Row("compute_policy_gradient_loss", "raw_rewards_or_advantages", NOT_A_TENSOR),
    Row("compute_policy_gradient_loss", "raw_rewards_or_advantages", [torch.ones(1, 4), torch.ones(5)]),
    Row("compute_policy_gradient_loss", "raw_rewards_or_advantages", [torch.ones(4, device="meta")], "is on meta"),
    Row("compute_policy_gradient_loss", "policy_log_probs", NOT_A_TENSOR),
    Row("compute_policy_gradient_loss", "policy_log_probs", WRONG_SHAPES, "policy_log_probs has ("),
    Row(
        "compute_policy_gradient_loss", "policy_log_probs", [LOG_PROBS.long()], "policy_log_probs: got dtype torch.int"
    ),
    Row("compute_policy_gradient_loss", "policy_log_probs", [LOG_PROBS.to("meta")], "policy_log_probs is on meta"),
    Row("compute_policy_gradient_loss", "importance_reweighting_method", NOT_A_NAME),
    Row("compute_policy_gradient_loss", "importance_reweighting_method", GIVES_NO_LOSS, "reweighting_method: gave "),
    Row("compute_policy_gradient_loss", "old_log_probs", NOT_A_TENSOR),
    Row("compute_policy_gradient_loss", "old_log_probs", WRONG_SHAPES, "old_log_probs has ("),
    Row("compute_policy_gradient_loss", "old_log_probs", [LOG_PROBS.to("meta")], "old_log_probs is on meta"),
    Row("compute_policy_gradient_loss", "cliprange", NOT_POSITIVE),
    Row("compute_policy_gradient_loss", "response_mask", NOT_A_TENSOR[1:]),
    Row("compute_policy_gradient_loss", "response_mask", WRONG_SHAPES, "response_mask has ("),
    Row("compute_policy_gradient_loss", "response_mask", [ALL.to("meta")], "response_mask is on meta"),
    Row("aggregate_loss_across_microbatch", "per_token_policy_gradient_loss", NOT_A_TENSOR),
    Row("aggregate_loss_across_microbatch", "per_token_policy_gradient_loss", WRONG_SHAPES, "_loss has ("),
    Row("aggregate_loss_across_microbatch", "mask", NOT_A_TENSOR),
    Row("aggregate_loss_across_microbatch", "mask", WRONG_SHAPES, "mask has ("),
    Row("aggregate_loss_across_microbatch", "mask", [ALL.to("meta")], "mask is on meta"),
    Row("aggregate_loss_across_microbatch", "loss_normalization", NOT_A_NAME),
    Row("aggregate_loss_across_microbatch", "normalization_constant", NOT_POSITIVE),
    Row("truncated_importance_weights", "policy_log_probs", NOT_A_TENSOR),
    Row("truncated_importance_weights", "engine_log_probs", NOT_A_TENSOR),
    Row("truncated_importance_weights", "engine_log_probs", WRONG_SHAPES, "engine_log_probs has ("),
    Row("truncated_importance_weights", "mask", NOT_A_TENSOR),
    Row("truncated_importance_weights", "cap", [*NOT_A_NUMBER, math.inf, 0.5, -1]),
    Row("engine_mismatch", "trainer_log_probs", NOT_A_TENSOR),
    Row("engine_mismatch", "engine_log_probs", NOT_A_TENSOR),
    Row("engine_mismatch", "mask", NOT_A_TENSOR),
    Row("engine_mismatch", "mask", [*WRONG_SHAPES, torch.ones(0, 5)], "mask has ("),
    Row("get_response_log_probs", "model", [None, Nothing(), "tiny", 3]),
    Row("get_response_log_probs", "return_token_entropy", [None, "True", 1, [], np.ones(2)]),
    Row("score_batch", "microbatch_size", [*NOT_WHOLE, 0]),
    *(
        row
        for function in ("get_response_log_probs", "score_batch")
        for row in (
            Row(function, "input_ids", NOT_A_TENSOR),
            Row(function, "input_ids", WRONG_SHAPES, "input_ids has ("),
            Row(function, "input_ids", WRONG_IDS, "input_ids: got dtype"),
            Row(function, "input_ids", [IDS + 13], "input_ids: holds the token id 19; accepted are 0 to 15"),
            Row(function, "input_ids", [IDS - 4], "input_ids: holds the token id -1"),
            Row(function, "input_ids", [IDS.to("meta")], "input_ids is on meta"),
            Row(function, "labels", NOT_A_TENSOR),
            Row(function, "labels", WRONG_SHAPES, "labels has ("),
            Row(function, "labels", WRONG_IDS, "labels: got dtype"),
            Row(function, "labels", [LABELS + 11], "labels: holds the token id 17"),
            Row(function, "labels", [torch.full_like(LABELS, -100)], "labels: holds the token id -100"),
            Row(function, "response_mask", NOT_A_TENSOR[1:]),
            Row(function, "response_mask", WRONG_SHAPES, "response_mask has ("),
            Row(function, "temperature", NOT_POSITIVE),
        )
    ),
    Row("tokenize_prompt_and_output", "prompt_strs", NOT_A_LIST),
    Row("tokenize_prompt_and_output", "prompt_strs", [["a"], []], "all must have the same length"),
    Row(
        "tokenize_prompt_and_output", "prompt_strs", [["a", None], ["a", b"b"], ["a", [3]]], "prompt_strs: number 1 is"
    ),
    Row("tokenize_prompt_and_output", "prompt_strs", [["a", ""]], "prompt 1 has no token"),
    Row("tokenize_prompt_and_output", "output_strs", NOT_A_LIST),
    Row("tokenize_prompt_and_output", "output_strs", [["a", None]], "output_strs: number 1 is None"),
    Row("tokenize_prompt_and_output", "tokenizer", SOMETHING_ELSE),
    Row("pad_prompts_and_outputs", "prompt_ids", NOT_A_LIST),
    Row("pad_prompts_and_outputs", "prompt_ids", [[[1], []]], "prompt 1 has no token"),
    Row("pad_prompts_and_outputs", "prompt_ids", [[[1]], []], "all must have the same length"),
    *(
        Row("pad_prompts_and_outputs", argument, [[[1], row]], f"{argument}, row 1: got")
        for argument in ("prompt_ids", "output_ids")
        for row in ([1.5], [True], [-1], [10**20], ["a"], [None], [[1]], "ab", 1, None, {1}, torch.ones(2))
    ),
    Row("pad_prompts_and_outputs", "pad_id", NOT_WHOLE),
    Row("encode", "tokenizer", SOMETHING_ELSE),
    Row("encode", "text", NOT_TEXT),
    Row("padding_id", "tokenizer", SOMETHING_ELSE),
    Row("Estimator", "name", NOT_TEXT),
    Row("Estimator", "loss_normalization", NOT_A_NAME),
    Row("Estimator", "importance_reweighting_method", NOT_A_NAME),
    Row("Estimator", "cliprange", NOT_POSITIVE),
    Row("Estimator", "engine_ratio_cap", [*NOT_A_NUMBER[1:], 0.5, math.inf]),
    Row("grpo_train_step", "model", SOMETHING_ELSE),
    Row("grpo_train_step", "tokenizer", SOMETHING_ELSE),
    Row("grpo_train_step", "optimizer", SOMETHING_ELSE),
    Row("grpo_train_step", "gradient_accumulation_steps", [*NOT_WHOLE, 0, 5]),
    Row("grpo_train_step", "max_grad_norm", NOT_POSITIVE[1:-2]),
    Row("grpo_train_step", "reward_fn", NOT_A_FUNCTION),
    Row("grpo_train_step", "reward_fn", GIVES_NO_GRADE, "reward of response 0 is "),
    Row("grpo_train_step", "repeated_prompts", NOT_A_LIST),
    Row("grpo_train_step", "repeated_prompts", [["a"] * 3], "all must have the same length"),
    Row("grpo_train_step", "repeated_prompts", [["a", "a", None, "a"]], "repeated_prompts: number 2 is None"),
    Row("grpo_train_step", "rollout_responses", NOT_A_LIST),
    Row("grpo_train_step", "rollout_responses", [["a", "a", None, "a"]], "rollout_responses: number 2 is None"),
    Row("grpo_train_step", "repeated_ground_truths", NOT_A_LIST),
    Row("grpo_train_step", "group_size", [*NOT_WHOLE, 0]),
    Row("grpo_train_step", "group_size", [1], '"std" need'),
    Row("grpo_train_step", "group_size", [3], "a multiple of group_size=3"),
    Row("grpo_train_step", "importance_reweighting_method", NOT_A_NAME),
    Row("grpo_train_step", "cliprange", NOT_POSITIVE),
    Row("grpo_train_step", "loss_normalization", NOT_A_NAME),
    Row("grpo_train_step", "normalization_constant", NOT_POSITIVE),
    Row("grpo_train_step", "temperature", NOT_POSITIVE),
    Row("grpo_train_step", "rollout_token_ids", NOT_A_LIST[1:]),
    Row("grpo_train_step", "rollout_token_ids", [ROLLOUTS[:3]], "got 3 rows for 4 responses"),
    Row("grpo_train_step", "rollout_token_ids", [[None] * 4, [[3]] * 4, [3] * 4], "accepted is one (prompt ids"),
    Row("grpo_train_step", "rollout_token_ids", [[([3.5, 4], [3])] * 4, ["ab"] * 4], "_ids, row 0: got"),
    Row("grpo_train_step", "rollout_token_ids", [[([3, 16], [3])] * 4], "rollout_token_ids: holds the token id 16"),
    Row("grpo_train_step", "rollout_token_ids", [[([3, 4], [16])] * 4], "labels: holds the token id 16"),
    *(
        row
        for argument in ("old_log_probs", "token_weights")
        for row in (
            Row("grpo_train_step", argument, NOT_A_TENSOR[1:]),
            Row("grpo_train_step", argument, [WEIGHTS[:, :1], WEIGHTS[:2]]),
            Row("grpo_train_step", argument, [WEIGHTS * math.nan], f"{argument}: not finite"),
            Row("grpo_train_step", argument, [WEIGHTS.to("meta")], f"{argument}: is on meta"),
        )
    ),
]


@pytest.mark.parametrize("row", [row for row in ROWS if row.function != "grpo_train_step"], ids=name_of)
def test_bad_input_is_refused_by_name(good, row):
    check_refusal(good, row)


def state_of(model, optimizer) -> list:
    gradients = [weight.grad for weight in model.parameters()]
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), gradients, model.training])


@pytest.mark.parametrize("row", [row for row in ROWS if row.function == "grpo_train_step"], ids=name_of)
def test_a_refused_step_changes_nothing(good, row):
    arguments = good["grpo_train_step"][1]
    model, optimizer = arguments["model"], arguments["optimizer"]
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    before = state_of(model, optimizer)
    check_refusal(good, row)
    torch.testing.assert_close(state_of(model, optimizer), before, rtol=0, atol=0)


def test_an_optimizer_of_another_model_is_refused(good):
    row = Row("grpo_train_step", "optimizer", [good["other optimizer"]], "it holds none of the model's parameters")
    test_a_refused_step_changes_nothing(good, row)


@pytest.mark.parametrize("length", [33, 40])
def test_rows_beyond_the_context_are_refused(good, length):
    ids = torch.full((2, length), 3)
    for mask in (None, torch.ones(2, length, dtype=torch.bool)):
        with pytest.raises(ValueError, match=f"input_ids: got rows of {length} tokens; accepted are at most 32"):
            kernels.get_response_log_probs(good["score_batch"][1]["model"], ids, ids, response_mask=mask)
    rollouts = [([3] * length, [4])] * 4
    row = Row("grpo_train_step", "rollout_token_ids", [rollouts], f"rollout_token_ids: got rows of {length} tokens")
    call, arguments = good["grpo_train_step"]
    plain = {"importance_reweighting_method": "none", "old_log_probs": None, "token_weights": None}
    test_a_refused_step_changes_nothing({"grpo_train_step": (call, arguments | plain)}, row)


def test_a_label_that_is_no_word_has_no_log_prob():
    """Where values are not looked at, on a GPU, it must not look like a number."""
    from rlhelpers.kernels.fused_logprobs import log_probs_and_entropy

    found, _ = log_probs_and_entropy(torch.ones(3, 2), torch.eye(4, 2), None, torch.tensor([1, 4, -1]))
    assert found.isfinite().tolist() == [True, False, False]


# function, argument, another way to say it, the plain way
SAME = [
    ("compute_group_normalized_rewards", "group_size", np.int64(2), 2),
    ("compute_group_normalized_rewards", "advantage_eps", np.float64(0.5), 0.5),
    ("compute_group_normalized_rewards", "raw_rewards", torch.tensor([False, True]), torch.tensor([0.0, 1.0])),
    ("compute_group_normalized_rewards", "raw_rewards", torch.tensor([0, 1]), torch.tensor([0.0, 1.0])),
    ("compute_policy_gradient_loss", "cliprange", np.float64(0.05), 0.05),
    ("compute_policy_gradient_loss", "response_mask", ALL * 0.5, ALL),
    ("compute_policy_gradient_loss", "response_mask", ALL * 2, ALL),
    ("aggregate_loss_across_microbatch", "mask", ALL * 0.5, ALL),
    ("aggregate_loss_across_microbatch", "mask", ALL * 2, ALL),
    ("aggregate_loss_across_microbatch", "normalization_constant", np.int64(3), 3.0),
    ("truncated_importance_weights", "mask", ALL * 2, ALL),
    ("engine_mismatch", "mask", ALL * 2, ALL),
    ("get_response_log_probs", "response_mask", MASK.long(), MASK),
    ("get_response_log_probs", "labels", torch.where(MASK, LABELS, -100), LABELS),  # what is not asked for is not read
    ("get_response_log_probs", "input_ids", IDS.int(), IDS),
    ("score_batch", "microbatch_size", 10**20, 2),
    ("pad_prompts_and_outputs", "prompt_ids", [torch.tensor([1, 2]), np.array([3])], [[1, 2], [3]]),
    ("pad_prompts_and_outputs", "output_ids", torch.tensor([[4], [5]]), [[4], [5]]),
    ("tokenize_prompt_and_output", "prompt_strs", np.array(["a b", "c"]), ["a b", "c"]),
]


@pytest.mark.parametrize(("function", "argument", "value", "plain"), SAME)
def test_another_way_to_say_it_gives_the_same(good, function, argument, value, plain):
    call, arguments = good[function]
    found, expected = call(**{**arguments, argument: value}), call(**{**arguments, argument: plain})
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


steady = settings(deadline=None, max_examples=25, derandomize=True)
sizes = st.integers(0, 4)


@given(groups=sizes, group_size=sizes, extra=st.integers(0, 3))
@steady
def test_advantages_of_any_size_are_those_of_a_loop_or_refused(groups, group_size, extra):
    count = groups * group_size + extra
    rewards = torch.arange(count, dtype=torch.float64) ** 2
    if group_size < 2 or not count or count % group_size:
        with pytest.raises(ValueError, match=r"group_size|raw_rewards"):
            kernels.compute_group_normalized_rewards(rewards, group_size)
        return
    found, _ = kernels.compute_group_normalized_rewards(rewards, group_size)
    for rows in range(0, count, group_size):
        group = rewards[rows : rows + group_size]
        expected = (group - group.mean()) / (group.std() + 1e-6)
        torch.testing.assert_close(found[rows : rows + group_size], expected)


shapes = st.lists(sizes, min_size=1, max_size=3).map(tuple)


@given(shape=shapes, other=st.none() | shapes, method=st.sampled_from(["none", "noclip", "grpo", "gspo", "cispo"]))
@steady
def test_a_loss_of_any_shape_is_that_of_a_loop_or_refused(naive_token_losses, shape, other, method):
    new, old = -torch.ones(shape) / 3, -torch.ones(shape if other is None else other) / 2
    mask, advantages = torch.ones(shape), torch.arange(1.0, shape[0] + 1)
    arguments = (advantages, new, method, old, 0.1, mask)
    if new.shape != old.shape or len(shape) != 2 or not shape[0]:
        with pytest.raises(ValueError, match="policy_log_probs has"):
            kernels.compute_policy_gradient_loss(*arguments)
        return
    loss, _ = kernels.compute_policy_gradient_loss(*arguments)
    rows = [
        naive_token_losses(method, advantage.item(), list(n), list(o), 0.1)
        for advantage, n, o in zip(advantages, new, old, strict=True)
        if len(n)
    ]
    torch.testing.assert_close(loss, torch.tensor(rows).reshape(shape))


@given(shape=shapes, other=st.none() | shapes, name=st.sampled_from(["sequence", "constant"]))
@steady
def test_an_aggregate_of_any_shape_is_that_of_a_loop_or_refused(shape, other, name):
    loss = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    mask = torch.ones(shape if other is None else other).cumsum(dim=-1) % 2  # every other token
    if loss.shape != mask.shape or len(shape) != 2 or not shape[0]:
        with pytest.raises(ValueError, match="per_token_policy_gradient_loss has"):
            kernels.aggregate_loss_across_microbatch(loss, mask, name, 7.0)
        return
    kept = [[x for x, m in zip(*pair, strict=True) if m] for pair in zip(loss.tolist(), mask.tolist(), strict=True)]
    means = [sum(row) / max(len(row), 1) for row in kept]
    expected = sum(means) / len(means) if name == "sequence" else sum(map(sum, kept)) / 7
    found = kernels.aggregate_loss_across_microbatch(loss, mask, name, 7.0)
    assert found.item() == pytest.approx(expected)


token = st.integers(-1, 5) | st.sampled_from([1.5, True, None, "a"])
rows_of_ids = st.lists(st.lists(token, max_size=3), max_size=3)


@given(prompts=rows_of_ids, outputs=rows_of_ids)
@settings(steady, max_examples=60)
def test_rows_of_any_ids_are_those_of_a_loop_or_refused(prompts, outputs):
    legal = len(prompts) == len(outputs) > 0 and all(prompts)
    for row in [*prompts, *outputs]:
        legal &= all(type(i) is int and i >= 0 for i in row)
    if not legal:
        with pytest.raises(ValueError, match=r"prompt_ids|output_ids"):
            pad_prompts_and_outputs(prompts, outputs, 9)
        return
    width = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    whole = [p + o + [9] * (width - len(p) - len(o)) for p, o in zip(prompts, outputs, strict=True)]
    batch = pad_prompts_and_outputs(prompts, outputs, 9)
    assert batch["input_ids"].tolist() == [row[:-1] for row in whole]
    assert batch["labels"].tolist() == [row[1:] for row in whole]
    assert batch["response_mask"].sum(dim=1).tolist() == [len(o) for o in outputs]
