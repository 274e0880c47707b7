"""Prompts that several rows share, read once: the same log-probs, entropies and gradients as whole rows."""

import random

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.olmo2 import modeling_olmo2

from rlhelpers import models
from rlhelpers.kernels.logprobs import get_response_log_probs, score_batch
from rlhelpers.kernels.prefix_sharing import by_length, response_states
from rlhelpers.kernels.tokens import pad_prompts_and_outputs
from rlhelpers.models import can_share, common_beginning

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = 16
SHAPES = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SHAPES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def build(model_class, config, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class(config).to(dtype).eval()


@pytest.fixture
def olmo2(monkeypatch):
    """In float64 throughout: the library computes its norms in float32, whatever the weights are."""

    def forward(norm, x):
        return norm.weight * torch.nn.functional.rms_norm(x, x.shape[-1:], eps=norm.variance_epsilon)

    monkeypatch.setattr(modeling_olmo2.Olmo2RMSNorm, "forward", forward)
    return build(Olmo2ForCausalLM, Olmo2Config(**SHAPES, initializer_range=0.5))


@pytest.fixture(params=["few passes", "many passes"], autouse=True)
def worth_a_pass(request, monkeypatch):
    """In batches as small as these no more passes than necessary are worth while, unless a pass costs little."""
    if request.param == "many passes":
        monkeypatch.setattr(models, "WORTH_A_PASS", 2)


def make_batch(groups=5, group_size=3, seed=0, lengths=range(9), prompts=range(1, 9), beginning=()):
    """Prompts of every length, one token among them, and responses of every length, none among them."""
    rng = random.Random(seed)
    rows = []
    for _ in range(groups):
        prompt = [*beginning, *rng.choices(range(WORDS), k=rng.choice(prompts))]
        rows += [(prompt, rng.choices(range(WORDS), k=rng.choice(lengths))) for _ in range(group_size)]
    return pad_prompts_and_outputs([p for p, _ in rows], [r for _, r in rows], pad_id=0)


def scores_and_gradients(model, batch, mask, response_mask):
    model.zero_grad()
    scores = get_response_log_probs(
        model, batch["input_ids"], batch["labels"], True, temperature=0.7, response_mask=response_mask
    )
    wanted = [torch.where(mask, scores[name], 0.0) for name in ("log_probs", "token_entropy")]
    slopes = torch.linspace(-1, 1, mask.numel(), dtype=torch.float64).view(mask.shape)
    (wanted[0] * slopes).sum().backward()
    return [*wanted, *[p.grad.clone() for p in model.parameters()]]


def assert_shared_is_whole(model, batch, mask=None):
    mask = batch["response_mask"] if mask is None else mask
    whole, shared = (scores_and_gradients(model, batch, mask, given) for given in (None, mask))
    for value, expected in zip(shared, whole, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", range(6))
def test_equal_to_whole_rows(olmo2, tiny_gpt2, seed):
    for model in (olmo2, tiny_gpt2()):
        assert_shared_is_whole(model, make_batch(seed=seed))


@pytest.mark.parametrize("prompts", [[1], [1, 2, 6], [5]])
def test_prompts_that_begin_alike(olmo2, tiny_gpt2, prompts):
    """Some of them have no token after the beginning but their last."""
    for model in (olmo2, tiny_gpt2()):
        assert_shared_is_whole(model, make_batch(prompts=prompts, beginning=[3, 1, 4, 1, 5]))


def test_rows_in_any_order_and_every_prompt_alone(olmo2):
    batch = make_batch(groups=4)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    assert_shared_is_whole(olmo2, {name: tensor[order] for name, tensor in batch.items()})
    assert_shared_is_whole(olmo2, make_batch(groups=6, group_size=1))


def test_prompts_of_one_token_and_no_response_at_all(olmo2):
    assert_shared_is_whole(olmo2, make_batch(prompts=[1]))
    assert_shared_is_whole(olmo2, make_batch(lengths=[0], prompts=[3, 4]))


def test_a_mask_with_holes(olmo2):
    """As after several turns: what stands between the marked tokens is read, and not scored."""
    batch = make_batch(lengths=range(4, 9))
    holes = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(0)) < 0.5
    assert_shared_is_whole(olmo2, batch, batch["response_mask"] & holes)


def test_values_elsewhere_are_zero_and_what_is_read_is_counted(olmo2):
    batch = make_batch(groups=2, group_size=4, prompts=[8], lengths=[5])
    assert can_share(olmo2)  # which reads a token
    read = []
    olmo2.model.embed_tokens.register_forward_hook(lambda module, args, output: read.append(args[0].numel()))
    scores = get_response_log_probs(
        olmo2, batch["input_ids"], batch["labels"], True, response_mask=batch["response_mask"]
    )
    for values in scores.values():
        assert not values[~batch["response_mask"]].any()
    assert read == [2 * 7, 8 * 5]  # of each prompt all but its last token, once; then from there on, every row


def test_what_is_read_of_prompts_that_begin_alike_and_of_rows_of_other_lengths(olmo2, monkeypatch):
    monkeypatch.setattr(models, "WORTH_A_PASS", 6)
    assert can_share(olmo2)
    prompts, lengths = [[5, 6, 7, 8, 9], [5, 6, 7, 9], [5, 6, 7, 4, 8]], [2, 7, 2, 6, 2, 7]
    rows = [(prompts[i // 2], [3] * n) for i, n in enumerate(lengths)]
    batch = pad_prompts_and_outputs(*zip(*rows, strict=True), pad_id=0)
    read = []
    olmo2.model.embed_tokens.register_forward_hook(lambda module, args, output: read.append(tuple(args[0].shape)))
    assert_shared_is_whole(olmo2, batch)
    # Whole rows; the beginning; the rest but for its last token, padded; short responses; long ones.
    assert read == [(6, 11), (1, 3), (3, 1), (3, 2), (3, 7)]


def test_rows_of_similar_length_together(monkeypatch):
    monkeypatch.setattr(models, "WORTH_A_PASS", 6)
    assert by_length([2, 7, 2, 6, 2, 7]) == [[0, 2, 4], [1, 3, 5]]
    assert by_length([2, 2, 2]) == [[0, 1, 2]] and by_length([9]) == [[0]]
    assert by_length([1, 6]) == [[0, 1]] and by_length([7, 1]) == [[1], [0]]
    assert by_length([30, 1, 20, 10]) == [[1], [3], [2], [0]]


def test_the_common_beginning(monkeypatch):
    monkeypatch.setattr(models, "WORTH_A_PASS", 4)
    assert common_beginning([[1, 2, 3], [1, 2, 4], [1, 2]]) == 2
    assert common_beginning([[1, 2, 3], [1, 2, 4]]) == 0  # two tokens are saved, and a pass costs as much as four
    assert common_beginning([[1, 2, 3, 4, 5]]) == 0 == common_beginning([[], [1, 2]])
    assert common_beginning([(1, 2, 3, 4)] * 2) == 4


def test_score_batch_takes_the_mask(olmo2):
    batch = make_batch()
    whole = score_batch(olmo2, batch["input_ids"], batch["labels"], 4)
    shared = score_batch(olmo2, batch["input_ids"], batch["labels"], 4, response_mask=batch["response_mask"])
    torch.testing.assert_close(shared, torch.where(batch["response_mask"], whole, 0.0), rtol=0, atol=1e-12)


def test_models_that_cannot_share_read_whole_rows(olmo2):
    """Sliding windows count places in the cache, and a capped logit is no linear map."""
    common = SHAPES | {"head_dim": 4, "initializer_range": 0.5}
    windows = build(Gemma3ForCausalLM, Gemma3TextConfig(**common, sliding_window=4))
    capped = build(Gemma2ForCausalLM, Gemma2Config(**common, layer_types=["full_attention"] * 2))
    for model in (windows, capped):
        assert not can_share(model)
        assert_shared_is_whole(model, make_batch())
    assert can_share(olmo2)


@pytest.fixture
def opt():
    """Its layers drop out by themselves, in no module of their own."""
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "num_hidden_layers": 2}
    config = OPTConfig(**sizes, num_attention_heads=4, max_position_embeddings=64, dropout=0.5, init_std=0.5)
    return build(OPTForCausalLM, config)


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@pytest.mark.parametrize("with_mask", [True, False])
@pytest.mark.parametrize("name", ["olmo2", "opt"])
def test_gradient_checkpointing_gives_the_same_in_eval_mode(name, with_mask, request):
    """Prompts are read whole then, and every layer twice."""
    model, batch = request.getfixturevalue(name), make_batch()
    given = batch["response_mask"] if with_mask else None
    expected = scores_and_gradients(model, batch, batch["response_mask"], given)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls = []
    for layer in layers_of(model):
        layer.register_forward_pre_hook(lambda layer, _: calls.append(layer.training))
    found = scores_and_gradients(model, batch, batch["response_mask"], given)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-10)
    assert len(calls) == 2 * len(layers_of(model)) == 4 and not any(module.training for module in model.modules())


def test_without_a_gradient_prompts_are_shared_with_checkpointing_too(olmo2):
    batch = make_batch()
    expected = score_batch(olmo2, batch["input_ids"], batch["labels"], 4, response_mask=batch["response_mask"])
    olmo2.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    read = []
    olmo2.model.embed_tokens.register_forward_hook(lambda module, args, output: read.append(args[0].numel()))
    found = score_batch(olmo2, batch["input_ids"], batch["labels"], 4, response_mask=batch["response_mask"])
    assert found.equal(expected) and sum(read) < batch["input_ids"].numel()


def test_states_are_those_of_the_whole_rows(olmo2):
    batch = make_batch()
    whole = olmo2.model(input_ids=batch["input_ids"]).last_hidden_state[batch["response_mask"]]
    states = response_states(olmo2, batch["input_ids"], batch["response_mask"])
    torch.testing.assert_close(states, whole, rtol=0, atol=1e-12)
