"""What every engine takes and gives: how to sample, prompts as ids, and what cannot have been sampled."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from bad_input import NOT_A_LIST, NOT_A_NUMBER, NOT_WHOLE, Row, check_refusal, name_of

from rlhelpers.rollouts import Completion, Rollout, Sampling
from rlhelpers.rollouts.engine import encode_prompts, end_of_text_ids, inspect_rollouts

SAMPLING = {"n": 2, "temperature": 1.0, "top_p": 1.0, "max_tokens": 4, "min_tokens": 0, "stop": None, "seed": 0}
ROWS = [
    Row("Sampling", "n", [*NOT_WHOLE, 0]),
    Row("Sampling", "temperature", [*NOT_A_NUMBER, -1, 1e-9, 1e-300, math.inf]),
    Row("Sampling", "top_p", [*NOT_A_NUMBER, 0, 1.5]),
    Row("Sampling", "max_tokens", [*NOT_WHOLE, 0]),
    Row("Sampling", "min_tokens", [*NOT_WHOLE, 5]),
    Row("Sampling", "stop", [3, True, "", [], b"stop"]),
    Row("Sampling", "seed", [*NOT_WHOLE, 2**63, "a"]),
    Row("encode_prompts", "prompts", NOT_A_LIST),
    Row("encode_prompts", "prompts", [["a", None], ["a", [3]], np.ones(2), [3]], "prompts: number "),
    Row("encode_prompts", "prompts", [["a", ""]], "prompt 1 is empty"),
    Row("encode_prompts", "prompts", [["a " * 31]], "prompt 0 has 31 tokens; with max_tokens=2 it must fit"),
]


@pytest.fixture
def good(tokenizer):
    """Good arguments of each function."""
    prompts = {"tokenizer": tokenizer, "prompts": ["a b", "c"], "max_tokens": 2, "context": 32}
    return {"Sampling": (Sampling, SAMPLING), "encode_prompts": (encode_prompts, prompts)}


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(good, row):
    check_refusal(good, row)


def test_a_prompt_that_just_fits(good, tokenizer):
    encode, arguments = good["encode_prompts"]
    assert len(encode(**arguments | {"prompts": ["a " * 30]})[0]) == 30
    assert encode(**arguments) == [tokenizer.encode("a b"), tokenizer.encode("c")]


def test_all_ids_that_end_a_text(tiny_gpt2, tokenizer):
    model = tiny_gpt2(torch.float32)
    assert end_of_text_ids(model, tokenizer) == [1]
    model.generation_config.eos_token_id = [5, 9]
    assert end_of_text_ids(model, tokenizer) == [1, 5, 9]


def of_the_first(**changes):
    """The first completion is changed, by functions of what was there."""

    def spoil(rollouts):
        first, *others = rollouts[0].completions
        given = {name: new(getattr(first, name)) for name, new in changes.items()}
        return [replace(rollouts[0], completions=[replace(first, **given), *others]), *rollouts[1:]]

    return spoil


def too_few(rollouts):
    return [*rollouts[:-1], replace(rollouts[-1], completions=rollouts[-1].completions[:-1])]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rollouts: rollouts[:-1], "engine: it gave 1 rollouts, and not one for each of 2 prompts"),
        (lambda rollouts: rollouts[::-1], "engine: it gave 2 rollouts, and not one for each of 2 prompts"),
        (too_few, "engine: prompt 1 of 2: it has 1 completions; wanted are n=2"),
        (of_the_first(token_ids=lambda ids: [-1, 2]), "holds token -1; the policy knows those from 0 to 15"),
        (of_the_first(token_ids=lambda ids: [16, 2]), "holds token 16; the policy knows those from 0 to 15"),
        (of_the_first(token_ids=lambda ids: [], log_probs=lambda p: []), "a completion has 0 tokens; wanted are 1 to"),
        (of_the_first(token_ids=lambda ids: ids * 2), "has 4 tokens; wanted are 1 to max_tokens=2"),
        (of_the_first(log_probs=lambda p: p[1:]), "a completion has 1 log-probs for 2 tokens"),
        (of_the_first(log_probs=lambda p: [-float("inf"), -1]), "token 1 has the log-prob -inf"),
    ],
)
def test_what_no_engine_can_have_sampled(spoil, message):
    completions = [Completion("x", [1, token], "stop", [-1.0, -1.0]) for token in range(2)]
    good = [Rollout(prompt, [3], completions) for prompt in ("p", "q")]
    inspect_rollouts(good, ["p", "q"], Sampling(n=2, max_tokens=2), 16)
    with pytest.raises(RuntimeError, match=message):
        inspect_rollouts(spoil(good), ["p", "q"], Sampling(n=2, max_tokens=2), 16)


@pytest.mark.field_report("C14")
def test_a_group_of_copies_is_refused_unless_it_is_likely():
    """Refused rather than remarked: such a run would learn nothing."""

    def inspect(log_prob, **changes):
        copies = [Completion("x", [1, 2], "stop", [log_prob, log_prob])] * 4
        inspect_rollouts([Rollout("p", [3], copies)], ["p"], Sampling(**{"n": 4} | changes), 16)

    with pytest.raises(RuntimeError, match=r"prompt 0 of 1: its 4 completions are all the same, .* share a seed"):
        inspect(-5.0)
    inspect(-0.1)  # a policy that is sure of itself
    for changes in ({"temperature": 0}, {"top_p": 0.1}, {"min_tokens": 2}):  # nothing was drawn by these log-probs
        inspect(-5.0, **changes)
