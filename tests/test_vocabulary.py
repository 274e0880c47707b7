"""Log-probs and entropy in chunks: the same values and gradients as with all logits at once, in less memory."""

import math

import pytest
import torch
from torch.nn.functional import linear

from rlhelpers.kernels import fused_logprobs as vocabulary
from rlhelpers.kernels.fused_logprobs import log_probs_and_entropy

pytestmark = pytest.mark.usefixtures("one_thread")


def all_at_once(hidden, weight, bias, labels, temperature=1.0):
    logits = linear(hidden, weight, bias)
    log_distribution = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)
    entropy = torch.special.entr(log_distribution.detach().exp()).sum(dim=-1)
    return log_distribution.gather(-1, labels[:, None]).squeeze(-1), entropy


def make_inputs(tokens=37, size=8, words=50, dtype=torch.float64, with_bias=True):
    generator = torch.Generator().manual_seed(0)
    shapes = (tokens, size), (words, size), (words,)
    hidden, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_() if with_bias else None]
    return leaves, torch.randint(words, (tokens,), generator=generator)


def results(function, leaves, labels, temperature):
    log_probs, entropy = function(*leaves, labels, temperature)
    slopes = torch.linspace(-1, 1, len(labels), dtype=log_probs.dtype)
    return [log_probs, entropy, *torch.autograd.grad((log_probs * slopes).sum(), [x for x in leaves if x is not None])]


def set_chunk(monkeypatch, words, tokens):
    monkeypatch.setattr(vocabulary, "MIN_WORDS", 1)
    monkeypatch.setitem(vocabulary.CHUNK_BYTES, "cpu", 4 * words * tokens)


def count_products(monkeypatch):
    """Of hidden states and the weight of a chunk's words, in a list that grows."""
    calls, logits = [], vocabulary._logits
    monkeypatch.setattr(vocabulary, "_logits", lambda *args: calls.append(args[3]) or logits(*args))
    return calls


@pytest.mark.parametrize("words_of_a_chunk", [1, 7, 50, 1000])
@pytest.mark.parametrize("size", [8, 37, 64])  # fewer than the tokens, as many, more
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equal_to_all_logits_at_once_whatever_the_chunk(monkeypatch, words_of_a_chunk, size, with_bias, temperature):
    set_chunk(monkeypatch, words_of_a_chunk, tokens=37)
    leaves, labels = make_inputs(size=size, with_bias=with_bias)
    expected = results(all_at_once, leaves, labels, temperature)
    for got, wanted in zip(results(log_probs_and_entropy, leaves, labels, temperature), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_precision(monkeypatch, dtype, tolerance):
    """In half precision the normaliser is a float32; the gradients have the precision of what they belong to."""
    set_chunk(monkeypatch, words=100, tokens=200)
    leaves, labels = make_inputs(200, 32, 3000, dtype)
    got, wanted = (results(f, leaves, labels, 1.0) for f in (log_probs_and_entropy, all_at_once))
    assert got[0].dtype == got[1].dtype == torch.float32
    for value, expected in zip(got[:2], wanted[:2], strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    for gradient, expected in zip(got[2:], wanted[2:], strict=True):
        assert gradient.dtype == dtype
        assert (gradient - expected).abs().max() <= tolerance * expected.abs().max()


def test_a_gradient_in_half_precision_loses_nothing_to_its_chunks(monkeypatch):
    """As far from the truth as all at once: nothing is summed over chunks in half precision."""
    set_chunk(monkeypatch, words=20, tokens=200)
    leaves, labels = make_inputs(200, 32, 3000, torch.bfloat16, with_bias=False)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves[:2]] + [None]
    truth, ours, plain = (
        results(function, inputs, labels, 1.0)[2:]
        for function, inputs in [(all_at_once, exact), (log_probs_and_entropy, leaves), (all_at_once, leaves)]
    )
    for true, our, other in zip(truth, ours, plain, strict=True):
        assert (our - true).square().sum() <= 1.2 * (other - true).square().sum()


@pytest.mark.parametrize(
    ("size", "again"),
    [(64, 0), (37, 0), (18, 4), (8, 6)],  # of 7 chunks of 8 words for 37 tokens; room for size x 50 logits
)
def test_logits_are_kept_while_there_is_room_for_them(monkeypatch, size, again):
    set_chunk(monkeypatch, words=8, tokens=37)
    calls = count_products(monkeypatch)
    leaves, labels = make_inputs(size=size)
    results(log_probs_and_entropy, leaves, labels, 1.0)
    assert len(calls) == 7 + again


def test_a_second_backward_pass_gives_the_same(monkeypatch):
    set_chunk(monkeypatch, words=8, tokens=37)
    leaves, labels = make_inputs(size=64)
    log_probs = log_probs_and_entropy(*leaves, labels)[0].sum()
    first = torch.autograd.grad(log_probs, leaves, retain_graph=True)
    second = torch.autograd.grad(log_probs, leaves)
    for got, wanted in zip(second, first, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


def test_nothing_is_kept_for_a_gradient_that_nobody_wants(monkeypatch):
    monkeypatch.setattr(vocabulary, "_make_room", lambda weight: pytest.fail("there is no gradient of the weight"))
    (hidden, weight, bias), labels = make_inputs()
    log_probs_and_entropy(hidden, weight.detach(), bias, labels)[0].sum().backward()
    with torch.no_grad():
        log_probs_and_entropy(hidden, weight, bias, labels)


def test_the_gradient_by_finite_differences():
    leaves, labels = make_inputs(4, 3, 7)
    assert torch.autograd.gradcheck(lambda *leaves: log_probs_and_entropy(*leaves, labels, 0.8)[0], leaves)


def test_only_what_needs_a_gradient_gets_one():
    (hidden, weight, bias), labels = make_inputs()
    log_probs, entropy = log_probs_and_entropy(hidden, weight.detach(), bias.detach(), labels)
    assert not entropy.requires_grad
    log_probs.sum().backward()
    assert hidden.grad is not None and weight.grad is None and bias.grad is None
    with torch.no_grad():
        assert not log_probs_and_entropy(hidden, weight, bias, labels)[0].requires_grad


@pytest.mark.parametrize("words_of_a_chunk", [1, 3])
@pytest.mark.parametrize("impossible", [0, 2])
def test_a_word_that_cannot_come_adds_no_entropy(monkeypatch, words_of_a_chunk, impossible):
    """Also where it is alone in its chunk, the first or the last."""
    set_chunk(monkeypatch, words_of_a_chunk, tokens=1)
    weight = torch.zeros(3, 1)
    weight[impossible] = -math.inf
    log_probs, entropy = log_probs_and_entropy(torch.ones(1, 1), weight, None, torch.tensor([1]))
    torch.testing.assert_close(log_probs, torch.tensor([-math.log(2)]))
    torch.testing.assert_close(entropy, torch.tensor([math.log(2)]))


@pytest.mark.parametrize("words_of_a_chunk", [1, 2])
def test_a_broken_logit_is_not_hidden(monkeypatch, words_of_a_chunk):
    set_chunk(monkeypatch, words_of_a_chunk, tokens=1)
    weight = torch.tensor([[0.0], [math.nan]])
    log_probs, entropy = log_probs_and_entropy(torch.ones(1, 1), weight, None, torch.tensor([0]))
    assert log_probs.isnan().all() and entropy.isnan().all()


def test_no_token_at_all():
    leaves, _ = make_inputs()
    log_probs, entropy = log_probs_and_entropy(leaves[0][:0], *leaves[1:], torch.zeros(0, dtype=torch.long))
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert not leaves[1].grad.any()
