"""What every rollout engine promises, held against each of them: this process, vLLM, and a vLLM server, on a GPU where
there is one and else on the CPU."""

from itertools import pairwise

import pytest
import torch

from rlhelpers.models import load_policy
from rlhelpers.rollouts import Sampling
from rlhelpers.tasks import get_prompt, load_task
from rlhelpers.training.config import make_config
from rlhelpers.training.sampler import LIMITS, check_in_sync, make_engine

PROMPT = get_prompt("r1_zero")
PROMPTS = [PROMPT(problem.question) for problem in load_task("tiny", 12, 1).train]


@pytest.fixture(scope="module")
def policy_and_tokenizer():
    return load_policy("tiny")


@pytest.fixture(scope="module")
def weights(policy_and_tokenizer):
    return {name: tensor.clone() for name, tensor in policy_and_tokenizer[0].state_dict().items()}


REAL = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module", params=["torch", *(pytest.param(name, marks=REAL) for name in ("vllm", "vllm-server"))])
def started(request, policy_and_tokenizer, one_thread, tmp_path_factory):
    if request.param != "torch":
        pytest.importorskip("vllm")
    config = make_config(engine=request.param, kv_cache_gib=None if request.param == "torch" else 0.25)
    engine = make_engine(config, *policy_and_tokenizer, tmp_path_factory.mktemp("engine") / "engine.log")
    engine.sync_weights(policy_and_tokenizer[0])
    yield engine
    engine.close()


@pytest.fixture
def engine(started, policy_and_tokenizer, weights):
    """In step with the model as it was loaded, whatever an earlier test did to either."""
    yield started
    policy_and_tokenizer[0].load_state_dict(weights)
    started.sync_weights(policy_and_tokenizer[0])


def close(policy) -> float:
    """Nats.  float32: the largest of a few thousand differences was 1e-5.  bf16: see LIMITS, for means."""
    return 1e-4 if policy.dtype == torch.float32 else 5 * LIMITS[policy.dtype]


def test_it_reads_the_ids_that_the_trainer_scores(engine, policy_and_tokenizer):
    _, tokenizer = policy_and_tokenizer
    rollouts = engine.generate(PROMPTS[:3], Sampling(n=2, max_tokens=4))
    assert [r.prompt for r in rollouts] == PROMPTS[:3]
    for rollout in rollouts:
        assert rollout.prompt_token_ids == tokenizer.encode(rollout.prompt, add_special_tokens=False)
        assert len(rollout.completions) == 2


def test_texts_ids_and_reasons_belong_together(engine, policy_and_tokenizer):
    _, tokenizer = policy_and_tokenizer
    rollouts = engine.generate(PROMPTS, Sampling(n=8, max_tokens=64, stop=PROMPT.stop, seed=1))
    completions = [c for r in rollouts for c in r.completions]
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        decoded = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert decoded.startswith(completion.text)  # ids of the last token may reach beyond the stop string
        assert len(completion.log_probs) == len(completion.token_ids) <= 64
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == 64 and PROMPT.stop not in completion.text
        else:
            ended_itself = completion.token_ids[-1] == tokenizer.eos_token_id
            assert ended_itself != (completion.text.count(PROMPT.stop) == 1)
            assert ended_itself or completion.text.endswith(PROMPT.stop)
    assert any(c.text.endswith(PROMPT.stop) for c in completions)


def test_log_probs_are_the_policys_own(engine, policy_and_tokenizer, largest_difference):
    policy, _ = policy_and_tokenizer
    rollouts = engine.generate(PROMPTS, Sampling(n=8, max_tokens=64, stop=PROMPT.stop, seed=2))
    assert largest_difference(policy, rollouts) < close(policy)


@pytest.mark.parametrize("sampling", [Sampling(n=4, top_p=0.5), Sampling(n=4, min_tokens=60), Sampling(temperature=0)])
def test_log_probs_are_those_of_the_whole_distribution(engine, policy_and_tokenizer, sampling, largest_difference):
    policy, _ = policy_and_tokenizer
    assert largest_difference(policy, engine.generate(PROMPTS[:4], sampling)) < close(policy)


def test_rows_differ_and_the_same_call_repeats_them(engine):
    sampling = Sampling(n=8, max_tokens=48, seed=3)
    rollouts = engine.generate([PROMPTS[0], PROMPTS[0], PROMPTS[1]], sampling)
    first, second, _ = [[tuple(c.token_ids) for c in r.completions] for r in rollouts]
    assert len(set(first)) > 4 and len(set(second)) > 4
    assert not any(a == b for a, b in zip(first, second, strict=True))  # equal prompts, other random numbers
    again = engine.generate([PROMPTS[0], PROMPTS[0], PROMPTS[1]], sampling)
    assert [r.completions for r in again] == [r.completions for r in rollouts]
    other = engine.generate([PROMPTS[0]], Sampling(n=8, max_tokens=48, seed=4))
    assert [tuple(c.token_ids) for c in other[0].completions] != first


def test_samples_have_the_policys_distribution(engine, policy_and_tokenizer):
    """Of one token, 1024 samples: each frequency within 5 standard deviations of its probability."""
    policy, _ = policy_and_tokenizer
    [rollout] = engine.generate(["Question:"], Sampling(n=1024, max_tokens=1, seed=5))
    with torch.no_grad():
        logits = policy(torch.tensor([rollout.prompt_token_ids], device=policy.device)).logits[0, -1].float().cpu()
    probabilities = logits.softmax(-1)
    counts = torch.zeros_like(probabilities)
    for completion in rollout.completions:
        counts[completion.token_ids[0]] += 1
    likely = probabilities > 0.01
    assert likely.sum() > 4
    deviation = (probabilities * (1 - probabilities) / 1024).sqrt()
    assert ((counts / 1024 - probabilities).abs() < 5 * deviation)[likely].all()


def test_greedy_takes_the_likeliest_token(engine, policy_and_tokenizer):
    policy, _ = policy_and_tokenizer
    [rollout] = engine.generate(PROMPTS[:1], Sampling(temperature=0, max_tokens=12))
    [completion] = rollout.completions
    ids = rollout.prompt_token_ids + completion.token_ids
    with torch.no_grad():
        logits = policy(torch.tensor([ids], device=policy.device)).logits[0]
    assert logits[len(rollout.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == completion.token_ids


def test_a_nucleus_bars_the_unlikely(engine, policy_and_tokenizer):
    policy, _ = policy_and_tokenizer
    rollouts = engine.generate(["Question:"], Sampling(n=128, top_p=0.9, max_tokens=1, seed=6))
    for rollout in rollouts:
        with torch.no_grad():
            logits = policy(torch.tensor([rollout.prompt_token_ids], device=policy.device)).logits[0, -1]
        ordered, order = logits.float().softmax(-1).sort(descending=True)
        nucleus = set(order[: int((ordered.cumsum(0) < 0.9).sum()) + 1].tolist())
        assert {c.token_ids[0] for c in rollout.completions} <= nucleus
        assert 1 < len(nucleus) < len(logits) / 2


def test_no_text_ends_before_min_tokens(engine):
    [rollout] = engine.generate(PROMPTS[:1], Sampling(n=8, min_tokens=64, max_tokens=64, stop=PROMPT.stop, seed=7))
    assert [len(c.token_ids) for c in rollout.completions] == [64] * 8


def test_a_prompt_that_is_too_long_is_named(engine):
    with pytest.raises(ValueError, match=r"prompt 1 has \d+ tokens; with max_tokens=64 it must fit .* context of 2048"):
        engine.generate([PROMPTS[0], PROMPTS[0] * 40], Sampling())
    assert len(engine.generate(PROMPTS[:1], Sampling(max_tokens=2))) == 1


def test_new_weights_are_in_effect_and_old_keys_are_not(engine, policy_and_tokenizer, weights, largest_difference):
    """The same prompts before and after, so that the engine's cache holds keys and values of the old weights."""
    policy, tokenizer = policy_and_tokenizer
    sampling = Sampling(n=4, max_tokens=24, seed=8)
    before = engine.generate(PROMPTS, sampling)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.2)
    if type(engine).__name__ != "TorchEngine":  # which has the new ones already: they are the policy's
        assert largest_difference(policy, engine.generate(PROMPTS, sampling)) > 0.5
    engine.sync_weights(policy)
    after = engine.generate(PROMPTS, sampling)
    assert largest_difference(policy, after) < close(policy)
    assert largest_difference(policy, before) > 0.5
    assert check_in_sync(engine, policy, tokenizer, 1.0) < LIMITS[policy.dtype]


def test_one_changed_layer_is_enough(engine, policy_and_tokenizer, largest_difference):
    """Each kind of weight arrives: where one did not, the log-probs would not follow."""
    policy, _ = policy_and_tokenizer
    sampling = Sampling(n=2, max_tokens=16, seed=9)
    names = ["embed_tokens", "layers.0.self_attn.q_proj", "layers.1.self_attn.v_proj", "layers.2.mlp.up_proj"]
    names += ["layers.3.post_attention_layernorm", "layers.0.self_attn.k_norm", "model.norm", "lm_head"]
    tokens = [[c.log_probs for r in engine.generate(PROMPTS[:3], sampling) for c in r.completions]]
    for name in names:
        [parameter] = [p for n, p in policy.named_parameters() if name in n]
        with torch.no_grad():
            parameter.mul_(1.5)
        engine.sync_weights(policy)
        rollouts = engine.generate(PROMPTS[:3], sampling)
        assert largest_difference(policy, rollouts) < close(policy), name
        tokens.append([c.log_probs for r in rollouts for c in r.completions])
    assert all(a != b for a, b in pairwise(tokens))
