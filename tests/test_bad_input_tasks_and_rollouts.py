"""Bad input to engines: refused by name.  A new case is a row of ROWS."""

import math

import numpy as np
import pytest
from bad_input import (
    NOT_A_LIST,
    NOT_A_NUMBER,
    NOT_WHOLE,
    SOMETHING_ELSE,
    Row,
    check_refusal,
    name_of,
)

from rlhelpers.rollouts import Sampling, TorchEngine


@pytest.fixture(scope="module")
def good(tokenizer, tiny_gpt2):
    """Of each function good arguments."""
    model = tiny_gpt2()
    return {
        "Sampling": (
            Sampling,
            {"n": 2, "temperature": 1.0, "top_p": 1.0, "max_tokens": 4, "min_tokens": 0, "stop": None, "seed": 0},
        ),
        "TorchEngine": (TorchEngine, {"model": model, "tokenizer": tokenizer, "max_rows": 4}),
        "TorchEngine.sync_weights": (TorchEngine(model, tokenizer).sync_weights, {"policy": model}),
        "TorchEngine.generate": (
            TorchEngine(model, tokenizer).generate,
            {"prompts": ["a b", "c"], "sampling": Sampling(max_tokens=2)},
        ),
    }


ROWS = [
    Row("Sampling", "n", [*NOT_WHOLE, 0]),
    Row("Sampling", "temperature", [*NOT_A_NUMBER, -1, 1e-9, math.inf]),
    Row("Sampling", "top_p", [*NOT_A_NUMBER, 0, 1.5]),
    Row("Sampling", "max_tokens", [*NOT_WHOLE, 0]),
    Row("Sampling", "min_tokens", [*NOT_WHOLE, 5]),
    Row("Sampling", "stop", [3, True, "", [], b"stop"]),
    Row("Sampling", "seed", [*NOT_WHOLE, 2**63]),
    Row("TorchEngine", "model", SOMETHING_ELSE, "policy: got "),
    Row("TorchEngine", "tokenizer", SOMETHING_ELSE),
    Row("TorchEngine", "max_rows", [*NOT_WHOLE, 0]),
    Row("TorchEngine.sync_weights", "policy", SOMETHING_ELSE),
    Row("TorchEngine.generate", "prompts", NOT_A_LIST),
    Row("TorchEngine.generate", "prompts", [["a", None], ["a", [3]], np.ones(2), [3]], "prompts: number "),
    Row("TorchEngine.generate", "prompts", [["a", ""]], "prompt 1 is empty"),
    Row("TorchEngine.generate", "prompts", [["a " * 31]], "prompt 0 has 31 tokens; with max_tokens=2 it must fit"),
    Row("TorchEngine.generate", "sampling", SOMETHING_ELSE),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(good, row):
    check_refusal(good, row)


def test_a_prompt_that_just_fits_is_sampled_from(good):
    generate, arguments = good["TorchEngine.generate"]
    [rollout] = generate(["a " * 30], arguments["sampling"])
    assert len(rollout.prompt_token_ids) == 30 and 1 <= len(rollout.completions[0].token_ids) <= 2


def test_no_prompts_give_no_rollouts(good):
    generate, arguments = good["TorchEngine.generate"]
    assert generate([], arguments["sampling"]) == []


def test_a_refused_policy_leaves_the_engine_as_it_is(good):
    sync = good["TorchEngine.sync_weights"][0]
    before = sync.__self__.model
    with pytest.raises(ValueError, match="policy: got None"):
        sync(None)
    assert sync.__self__.model is before
