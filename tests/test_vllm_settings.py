"""How vLLM is started and how it is asked."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhelpers.rollouts import Completion, Sampling
from rlhelpers.rollouts.processes import OWNER
from rlhelpers.rollouts.vllm_settings import (
    as_completion,
    as_flags,
    check_temperature,
    launch_arguments,
    launch_environment,
    prompt_seed,
    request_parameters,
    visible_device,
)

SEEDS = st.integers(0, 2**63 - 1)


def arguments(**changes):
    defaults = {
        "model": "a model",
        "dtype": "float32",
        "on_cpu": True,
        "context": 2048,
        "weight_backend": "shared_memory",
        "kv_cache_gib": 1.0,
        "temperature": 1.0,
        "seed": 3,
    }
    return launch_arguments(**defaults | changes)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, prompts=st.integers(2, 20), n=st.integers(1, 64))
def test_no_two_samples_of_a_call_share_a_seed(seed, prompts, n):
    """vLLM adds a sample's number to its prompt's seed.  The text of a prompt plays no part: equal ones differ too."""
    first = [request_parameters(Sampling(n=n, seed=seed), i, [])["seed"] for i in range(prompts)]
    assert len({s + sample for s in first for sample in range(n)}) == prompts * n
    assert first == [request_parameters(Sampling(n=n, seed=seed), i, [])["seed"] for i in range(prompts)]


@settings(deadline=None)
@given(seed=SEEDS, other=SEEDS, prompt=st.integers(0, 10_000))
def test_a_prompts_seed_follows_from_the_calls_seed(seed, other, prompt):
    assert 0 <= prompt_seed(seed, prompt) < 2**63 - 10_000  # int64, with the samples' numbers added
    assert (prompt_seed(seed, prompt) == prompt_seed(other, prompt)) == (seed == other)


def test_seeds_are_the_same_in_every_process():
    """Python's own hash of a text is not."""
    assert prompt_seed(0, 0) == 2220271774497122242


def test_a_request_says_all_that_the_sampling_does():
    sampling = Sampling(n=4, temperature=0.7, top_p=0.9, max_tokens=20, min_tokens=2, stop="</answer>", seed=5)
    request = request_parameters(sampling, 1, [1, 7])
    assert request == {
        "n": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 20,
        "min_tokens": 2,
        "stop": ["</answer>"],
        "include_stop_str_in_output": True,  # or no response would ever end in </answer>
        "stop_token_ids": [1, 7],
        "seed": prompt_seed(5, 1),
        "logprobs": 0,
    }
    assert request_parameters(Sampling(), 0, [])["stop"] == []


def test_flags():
    given = {"a_number": 3, "a_share": 0.9, "a_text": "bf16", "yes_please": True, "not_this": False}
    expected = ["--a-number", "3", "--a-share", "0.9", "--a-text", "bf16", "--yes-please", "--no-not-this"]
    assert as_flags(given) == expected
    flag, value = as_flags({"some_config": {"backend": "nccl", "on": True}})
    assert flag == "--some-config" and json.loads(value) == {"backend": "nccl", "on": True}


@pytest.mark.parametrize(("temperature", "mode"), [(1.0, "raw"), (1, "raw"), (0.7, "processed"), (1.5, "processed")])
def test_log_probs_are_at_the_sampling_temperature(temperature, mode):
    """At 1 those of the whole distribution; else those after the temperature."""
    assert arguments(temperature=temperature)["logprobs_mode"] == f"{mode}_logprobs"


@pytest.mark.parametrize("context", [64, 4096, 32768])
def test_on_the_cpu_a_prompt_is_read_in_one_piece(context):
    given = arguments(context=context)
    assert given["enable_chunked_prefill"] is False and given["enforce_eager"] is True
    assert given["max_num_batched_tokens"] >= context == given["max_model_len"]


def test_on_a_gpu_vllm_schedules_as_it_likes():
    given = arguments(on_cpu=False, weight_backend="nccl", kv_cache_gib=None)
    assert not {"enforce_eager", "enable_chunked_prefill", "max_num_batched_tokens"} & given.keys()
    assert "kv_cache_memory_bytes" not in given
    assert given["weight_transfer_config"] == {"backend": "nccl"}


def test_what_was_asked_for_is_what_is_started():
    given = arguments(kv_cache_gib=0.25)
    assert given["kv_cache_memory_bytes"] == 2**28 and isinstance(given["kv_cache_memory_bytes"], int)
    assert (given["model"], given["dtype"], given["seed"]) == ("a model", "float32", 3)
    assert given["generation_config"] == "vllm"  # the model's own would change how is sampled


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("backend", ["shared_memory", "nccl", "ipc"])
def test_the_environment_of_vllms_processes(on_cpu, backend):
    variables = launch_environment(on_cpu, backend)
    assert variables["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn" and OWNER in variables
    assert ("TORCHDYNAMO_DISABLE" in variables) == on_cpu
    assert ("VLLM_ALLOW_INSECURE_SERIALIZATION" in variables) == (backend == "ipc")
    assert all(isinstance(value, str) for value in variables.values())


def test_an_answer_becomes_a_completion():
    completion = as_completion("so 4</answer>", (5, 6), "stop", (-0.5, -1.0))
    assert completion == Completion("so 4</answer>", [5, 6], "stop", [-0.5, -1.0])
    assert as_completion("so", (5,), "length", (-0.5,)).finish_reason == "length"


@pytest.mark.parametrize("reason", ["abort", "error", "repetition", None])
def test_a_request_that_ended_in_another_way_is_an_error(reason):
    with pytest.raises(RuntimeError, match=f"finish_reason {reason!r}"):
        as_completion("so", [5], reason, [-0.5])


@pytest.mark.parametrize("log_probs", [[], [-0.5], [-0.5, -1.0, -1.5]])
def test_every_token_has_its_log_prob(log_probs):
    with pytest.raises(RuntimeError, match=f"{len(log_probs)} log-probs for 2 tokens"):
        as_completion("so 4", [5, 6], "stop", log_probs)


def test_temperatures_whose_log_probs_vllm_has():
    check_temperature(Sampling(top_p=0.5, min_tokens=3), 1.0)
    check_temperature(Sampling(temperature=0.7), 0.7)
    check_temperature(Sampling(temperature=0), 0.7)
    with pytest.raises(ValueError, match=r"temperature: got 1.0; this engine was started for 0.7 and 0"):
        check_temperature(Sampling(), 0.7)
    with pytest.raises(
        ValueError, match=r"top_p and min_tokens: got 0.5 and 0; vLLM at temperature 0.7 accepts 1 and 0"
    ):
        check_temperature(Sampling(temperature=0.7, top_p=0.5), 0.7)


@pytest.mark.parametrize(
    ("visible", "index", "expected"), [(None, 1, "1"), ("3,5", 1, "5"), ("GPU-a,GPU-b", 0, "GPU-a")]
)
def test_a_child_sees_the_policys_gpu_alone(monkeypatch, visible, index, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_device(index) == expected
