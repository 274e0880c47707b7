"""Rows of a group share one copy of their prompt while they grow: the same logits as with a cache for every row."""

import pytest
import torch
from transformers import Olmo2Config, Olmo2ForCausalLM

from rlhelpers import models
from rlhelpers.models import load_policy
from rlhelpers.rollouts import Sampling, TorchEngine, torch_engine
from rlhelpers.rollouts.group_cache import GroupCache, PlainCache
from rlhelpers.rollouts.torch_engine import can_group, tokens_with

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[3, 4, 5, 6, 7], [8], [9, 3, 4]]
# The last two have one token more than all have in common, and none less.
ALIKE = [[3, 4, 5, 6, 7], [3, 4, 5, 9], [3, 4, 5, 3]]


@pytest.fixture
def grouped_queries():
    """OLMo-2 with two query heads for each key head."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 16}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
        return Olmo2ForCausalLM(Olmo2Config(**shape, **heads, max_position_embeddings=64)).eval()


@pytest.mark.parametrize(("prompts", "common"), [(PROMPTS, 0), (ALIKE, 3), ([[3, 4, 5]] * 3, 2)])
@torch.no_grad()
def test_the_logits_of_every_step_and_after_rows_have_left(grouped_queries, tiny_gpt2, monkeypatch, prompts, common):
    monkeypatch.setattr(models, "WORTH_A_PASS", 1)
    for model, atol in ((grouped_queries, 1e-5), (tiny_gpt2(torch.float32), 1e-5)):
        shared, plain = (make(model, prompts, n=4, room=8, pad_id=0) for make in (GroupCache, PlainCache))
        assert shared.layers[0].common.shape[2] == common
        torch.testing.assert_close(shared.logits, plain.logits, rtol=0, atol=atol)
        rows = torch.arange(12)
        generator = torch.Generator().manual_seed(0)
        for step in range(8):
            tokens = torch.randint(3, 16, (len(rows),), generator=generator)
            with shared.growing(model):
                of_shared = shared.advance(model, tokens)
            torch.testing.assert_close(of_shared, plain.advance(model, tokens), rtol=0, atol=atol)
            if step == 3:  # the second group goes, and of the others a row each
                rows = torch.tensor([0, 1, 3, 8, 10, 11])
                for cache in (shared, plain):
                    cache.keep(torch.tensor([0, 2]), rows)


def test_attention_is_the_models_own_again_afterwards(grouped_queries):
    before = grouped_queries.config._attn_implementation
    cache = GroupCache(grouped_queries, PROMPTS, n=2, room=4, pad_id=0)
    with cache.growing(grouped_queries):
        cache.advance(grouped_queries, torch.full((6,), 3))
        assert grouped_queries.config._attn_implementation != before
    with pytest.raises(IndexError), cache.growing(grouped_queries):
        cache.advance(grouped_queries, torch.full((6,), 99))  # no such token
    assert grouped_queries.config._attn_implementation == before


@pytest.mark.parametrize("sampling", [{}, {"stop": "."}, {"stop": "</answer>", "min_tokens": 20}, {"n": 1}])
def test_the_same_samples_with_either_cache(monkeypatch, sampling):
    policy, tokenizer = load_policy("tiny", "cpu")
    prompts = ["Question: Ada has 3 plums. How many?\nAnswer:", "User: Ben", "Question: Iris reads 4 pages.\nAnswer:"]
    sampling = Sampling(**{"n": 6, "max_tokens": 32, "seed": 3} | sampling)
    assert can_group(policy)
    shared = TorchEngine(policy, tokenizer).generate(prompts, sampling)
    monkeypatch.setattr(torch_engine, "can_group", lambda model: False)
    plain = TorchEngine(policy, tokenizer).generate(prompts, sampling)
    for a, b in zip(shared, plain, strict=True):
        assert [(c.text, c.token_ids, c.finish_reason) for c in a.completions] == [
            (c.text, c.token_ids, c.finish_reason) for c in b.completions
        ]
        for c, d in zip(a.completions, b.completions, strict=True):
            assert c.log_probs == pytest.approx(d.log_probs, abs=1e-4)


def test_tokens_that_hold_a_sign():
    _, tokenizer = load_policy("tiny", "cpu")
    holds = tokens_with(tokenizer, ">", len(tokenizer) + 3)
    assert holds.shape == (len(tokenizer) + 3,) and not holds[len(tokenizer) :].any()
    assert 0 < holds.sum() < len(tokenizer) / 2
    assert all((">" in tokenizer.decode([i])) == bool(holds[i]) for i in range(len(tokenizer)))
    assert tokens_with(tokenizer, "é", len(tokenizer)).all()  # its bytes may come one by one
