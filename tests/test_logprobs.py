"""Log-probs and entropy against loops, at their numerical edges, and under padding."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhelpers.kernels.logprobs import engine_mismatch, get_response_log_probs, score_batch, token_entropy
from rlhelpers.kernels.tokens import pad_prompts_and_outputs

pytestmark = pytest.mark.usefixtures("one_thread")


def model_with(logits):
    """A model that says the same logits whatever it reads."""
    return lambda **inputs: SimpleNamespace(logits=logits)


def score_one(next_token_logits, label, dtype=torch.float32, temperature=1.0):
    """log-prob and entropy of one token under these logits."""
    logits = torch.tensor([[next_token_logits]], dtype=dtype)
    ids = torch.tensor([[label]])
    scores = get_response_log_probs(model_with(logits), ids, ids, True, temperature=temperature)
    return scores["log_probs"].item(), scores["token_entropy"].item()


def random_batch(seed=0, rows=4, pad_id=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (rows,), generator=generator).tolist()
    outputs = [torch.randint(3, 16, (n,), generator=generator).tolist() for n in lengths]
    return pad_prompts_and_outputs([[3, 4]] * rows, outputs, pad_id)


@given(seed=st.integers(0, 10**6), temperature=st.sampled_from([0.3, 1.0, 1.7]))
@settings(deadline=None, max_examples=25)
def test_against_loops(seed, temperature):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 5, (2, 3), generator=generator)
    scores = get_response_log_probs(model_with(logits), labels, labels, True, temperature=temperature)
    for i in range(2):
        for t in range(3):
            weights = [math.exp(logit / temperature) for logit in logits[i, t].tolist()]
            probs = [w / sum(weights) for w in weights]
            assert scores["log_probs"][i, t].item() == pytest.approx(math.log(probs[labels[i, t]]), abs=1e-10)
            assert scores["token_entropy"][i, t].item() == pytest.approx(
                -sum(p * math.log(p) for p in probs), abs=1e-10
            )


def test_labels_are_scored_from_what_stands_before_them(tiny_gpt2):
    model = tiny_gpt2()
    batch = random_batch()
    scores = get_response_log_probs(model, batch["input_ids"], batch["labels"])
    assert set(scores) == {"log_probs"}  # entropy only when asked
    for i, t in batch["response_mask"].nonzero().tolist():
        prefix = batch["input_ids"][i : i + 1, : t + 1]
        expected = torch.log_softmax(model(prefix).logits[0, -1], dim=-1)[batch["labels"][i, t]]
        torch.testing.assert_close(scores["log_probs"][i, t], expected, rtol=0, atol=1e-10)


# bfloat16 keeps 8 bits: logits near 4 come in steps of 1/64, and a sum in another order may land a step or two away.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_padding_does_not_change_a_real_position(dtype, tolerance, tiny_gpt2):
    model = tiny_gpt2(dtype)
    batch = random_batch()
    together = get_response_log_probs(model, batch["input_ids"], batch["labels"])["log_probs"]
    assert together.dtype == torch.float32
    for i, mask in enumerate(batch["response_mask"]):
        width = int(mask.nonzero().max()) + 1
        alone = get_response_log_probs(model, batch["input_ids"][i : i + 1, :width], batch["labels"][i : i + 1, :width])
        torch.testing.assert_close(together[i, :width], alone["log_probs"][0], rtol=0, atol=tolerance)


def test_what_stands_in_the_padding_does_not_matter(tiny_gpt2):
    model = tiny_gpt2()
    with_zeros, with_tens = random_batch(pad_id=0), random_batch(pad_id=10)
    real = with_zeros["response_mask"]
    assert not torch.equal(with_zeros["input_ids"], with_tens["input_ids"])
    a = get_response_log_probs(model, with_zeros["input_ids"], with_zeros["labels"])["log_probs"]
    b = get_response_log_probs(model, with_tens["input_ids"], with_tens["labels"])["log_probs"]
    assert torch.equal(a[real], b[real])


def test_entropy_of_a_certain_token_is_0():
    assert score_one([0.0, -math.inf], label=0) == (0.0, 0.0)


def test_entropy_of_two_of_three_tokens_is_log_2():
    log_prob, entropy = score_one([0.0, 0.0, -math.inf], label=1)
    assert log_prob == pytest.approx(-0.6931, abs=1e-4)
    assert entropy == pytest.approx(0.6931, abs=1e-4)


def test_the_largest_half_precision_logits_stay_finite():
    log_prob, entropy = score_one([65504.0, -65504.0], label=1, dtype=torch.float16)
    assert log_prob == pytest.approx(-131008.0)
    assert entropy == 0.0
    # Divided while still float16, they would overflow.
    assert score_one([65504.0, -65504.0], 1, torch.float16, temperature=0.5)[0] == pytest.approx(-262016.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_are_float32_at_least(dtype):
    ids = torch.tensor([[0]])
    scores = get_response_log_probs(model_with(torch.zeros(1, 1, 3, dtype=dtype)), ids, ids, True)
    assert {tensor.dtype for tensor in scores.values()} == {torch.float32}
    # Normalised in half precision, log 3 would be off in the third decimal.
    assert scores["log_probs"].item() == pytest.approx(-math.log(3), abs=1e-6)


def test_temperature_divides_the_logits():
    log_prob, _ = score_one([2.0, 0.0, -1.0], label=0, temperature=0.5)
    assert log_prob == pytest.approx(-0.0206, abs=1e-4)


def test_gradient_flows_to_log_probs_and_not_to_entropy(tiny_gpt2):
    batch = random_batch()
    scores = get_response_log_probs(tiny_gpt2(), batch["input_ids"], batch["labels"], True)
    assert scores["log_probs"].requires_grad
    assert not scores["token_entropy"].requires_grad


def test_token_entropy_of_a_uniform_distribution():
    log_distribution = torch.full((2, 3, 7), -math.log(7))
    torch.testing.assert_close(token_entropy(log_distribution), torch.full((2, 3), math.log(7)))


@pytest.mark.parametrize("temperature", [0, -1.0, math.inf, math.nan])
def test_a_temperature_that_is_none(temperature):
    ids = torch.tensor([[0]])
    with pytest.raises(ValueError, match="temperature: got"):
        get_response_log_probs(model_with(torch.zeros(1, 1, 3)), ids, ids, temperature=temperature)


@pytest.mark.parametrize(("inputs", "labels"), [((2, 3), (2, 4)), ((3,), (3,))])
def test_shapes_that_do_not_fit(inputs, labels):
    inputs, labels = torch.zeros(inputs, dtype=torch.long), torch.zeros(labels, dtype=torch.long)
    with pytest.raises(ValueError, match=r"input_ids has \(.*, labels has \(|input_ids has \(3,\)"):
        get_response_log_probs(model_with(torch.zeros(2, 3, 3)), inputs, labels)


def test_a_mask_that_does_not_fit():
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"response_mask has \(2, 4\)"):
        get_response_log_probs(
            model_with(torch.zeros(2, 3, 3)), ids, ids, response_mask=torch.ones(2, 4, dtype=torch.bool)
        )


@pytest.mark.parametrize("microbatch_size", [1, 3, 4, 100])
def test_score_batch_equals_the_whole_batch_at_once(microbatch_size, tiny_gpt2):
    model = tiny_gpt2()
    batch = random_batch()
    whole = get_response_log_probs(model, batch["input_ids"], batch["labels"], temperature=0.7)["log_probs"]
    scored = score_batch(model, batch["input_ids"], batch["labels"], microbatch_size, temperature=0.7)
    torch.testing.assert_close(scored, whole.detach(), rtol=0, atol=1e-10)
    assert not scored.requires_grad


@pytest.mark.parametrize("training", [True, False])
def test_score_batch_is_without_dropout_and_restores_the_mode(training, tiny_gpt2):
    batch = random_batch()
    plain, dropping = tiny_gpt2(), tiny_gpt2(dropout=0.5).train(training)
    scores = [score_batch(model, batch["input_ids"], batch["labels"], 2) for model in (plain, dropping)]
    assert torch.equal(*scores)
    assert dropping.training is training


def test_score_batch_restores_the_mode_after_an_error(tiny_gpt2):
    model = tiny_gpt2().train()
    batch = random_batch()
    with pytest.raises(ValueError, match="temperature"):
        score_batch(model, batch["input_ids"], batch["labels"], 2, temperature=0.0)
    assert model.training


def apart(seed, spread, rows=4, width=9):
    """Two policies' log-probs that are up to `spread` apart, and a mask of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    trainer = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    engine = trainer + spread * (2 * torch.rand(rows, width, generator=generator, dtype=torch.float64) - 1)
    return trainer, engine, torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=generator)


@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.01, 0.15, 2.0]))
@settings(deadline=None, max_examples=25)
def test_mismatch_against_loops(seed, spread):
    trainer, engine, mask = apart(seed, spread)
    rows = zip(trainer.flatten().tolist(), engine.flatten().tolist(), mask.flatten().tolist(), strict=True)
    pairs = [(t, e) for t, e, real in rows if real]
    found = engine_mismatch(trainer, engine, mask)
    if not pairs:
        assert set(found.values()) == {None}
        return
    sizes = sorted(abs(t - e) for t, e in pairs)
    place = 0.99 * (len(sizes) - 1)
    below, share = int(place), place - int(place)
    above = min(below + 1, len(sizes) - 1)
    outside = [not 0.9 <= math.exp(t) / math.exp(e) <= 1.1 for t, e in pairs]
    assert found == pytest.approx(
        {
            "mismatch_mean": sum(sizes) / len(sizes),
            "mismatch_p99": sizes[below] * (1 - share) + sizes[above] * share,
            "mismatch_max": sizes[-1],
            "mismatch_outside": sum(outside) / len(outside),
        },
        abs=1e-6,
    )


def test_the_same_policy_has_no_mismatch():
    trainer, _, mask = apart(0, 1.0)
    assert engine_mismatch(trainer.requires_grad_(), trainer, mask.long()) == {
        "mismatch_mean": 0.0,
        "mismatch_p99": 0.0,
        "mismatch_max": 0.0,
        "mismatch_outside": 0.0,
    }


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_in_the_padding_is_no_mismatch(garbage):
    trainer, engine, mask = apart(1, 1.0)
    assert engine_mismatch(trainer, engine.masked_fill(~mask, garbage), mask) == engine_mismatch(trainer, engine, mask)


def test_a_log_prob_that_is_no_number_is_not_hidden():
    found = engine_mismatch(torch.zeros(1, 4), torch.tensor([[0.0, math.nan, 0.05, 0.0]]), torch.ones(1, 4))
    assert found["mismatch_outside"] == 0.25
    assert all(math.isnan(found[name]) for name in ("mismatch_mean", "mismatch_p99", "mismatch_max"))


def test_without_a_token_nothing_was_measured():
    trainer, engine, mask = apart(2, 1.0)
    assert engine_mismatch(trainer, engine, torch.zeros_like(mask)) == dict.fromkeys(
        ("mismatch_mean", "mismatch_p99", "mismatch_max", "mismatch_outside")
    )


def test_mismatch_of_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"trainer_log_probs has \(2, 3\), engine_log_probs has \(2, 4\)"):
        engine_mismatch(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3))
