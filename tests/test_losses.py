"""Per-token losses against loops, where they clip, and what must never reach a loss or a gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhelpers.kernels.estimators import importance_ratio
from rlhelpers.kernels.losses import (
    aggregate_loss_across_microbatch,
    compute_policy_gradient_loss,
    masked_mean,
    truncated_importance_weights,
)

METHODS = ["none", "noclip", "grpo", "gspo", "cispo"]
REWEIGHTED = METHODS[1:]


def random_batch(seed, rows=3, width=6):
    """Advantages (one of them 0), new and old log-probs that are up to e apart, and a mask of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    new = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    old = new + 2 * torch.rand(rows, width, generator=generator, dtype=torch.float64) - 1
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    return torch.tensor([1.5, -2.0, 0.0], dtype=torch.float64), new, old, torch.arange(width) < lengths


def masked_sum(loss, mask):
    return aggregate_loss_across_microbatch(loss, mask, "constant", 1.0)


def loss_and_gradient(method, advantages, new, old, mask, eps=0.2):
    """(summed loss, gradient to the new log-probs, clip fraction)."""
    new = new.clone().requires_grad_()
    loss, metadata = compute_policy_gradient_loss(advantages, new, method, old, eps, mask)
    total = masked_sum(loss, mask)
    total.backward()
    return total.detach(), new.grad, metadata["clip_fraction"].item()


def is_clipped(method, advantage, ratio, eps):
    if method == "cispo":
        return ratio > 1 + eps
    return (advantage > 0 and ratio > 1 + eps) or (advantage < 0 and ratio < 1 - eps)


@pytest.mark.parametrize("method", METHODS)
@given(seed=st.integers(0, 10**6), eps=st.sampled_from([0.05, 0.2]))
@settings(deadline=None, max_examples=25)
def test_loss_gradient_and_clip_fraction_against_loops(method, naive_token_losses, seed, eps):
    advantages, new, old, mask = random_batch(seed)
    reference = new.clone().requires_grad_()
    expected, clipped = torch.zeros((), dtype=torch.float64), []
    for a, n, o, m in zip(advantages.tolist(), reference, old, mask, strict=True):
        expected = expected + sum(naive_token_losses(method, a, list(n[m]), list(o[m]), eps))
        ratios = [math.exp(x - y) for x, y in zip(n[m].tolist(), o[m].tolist(), strict=True)]
        if method == "gspo":
            ratios = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios)
        clipped += [method in ("grpo", "gspo", "cispo") and is_clipped(method, a, r, eps) for r in ratios]
    loss, gradient, clip_fraction = loss_and_gradient(method, advantages, new, old, mask, eps)
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    (expected_gradient,) = torch.autograd.grad(expected + 0 * reference.sum(), reference)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-10)
    assert clip_fraction == pytest.approx(sum(clipped) / len(clipped))


@pytest.mark.parametrize("method", METHODS)
def test_loss_has_the_shape_of_the_log_probs(method):
    advantages, new, old, mask = random_batch(0)
    as_row, _ = compute_policy_gradient_loss(advantages, new, method, old, 0.2, mask)
    as_column, _ = compute_policy_gradient_loss(advantages[:, None], new, method, old, 0.2, mask)
    assert as_row.shape == new.shape
    assert torch.equal(as_row, as_column)


def test_gspo_ratio_of_a_long_response_neither_over_nor_underflows():
    log_ratio = torch.full((1, 2000), 0.05)
    loss, _ = compute_policy_gradient_loss(
        torch.ones(1), log_ratio, "gspo", torch.zeros(1, 2000), 0.2, torch.ones(1, 2000)
    )
    torch.testing.assert_close(-loss, torch.full((1, 2000), 1.0513), rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", REWEIGHTED)
def test_policies_far_apart_give_a_finite_loss_and_gradient(method):
    # Advantage -1 and a ratio above 1 is the side that no clip range bounds; exp(120) is no float32.
    new = torch.full((1, 4), -1.0)
    loss, gradient, _ = loss_and_gradient(method, torch.tensor([-1.0]), new, new - 120, torch.ones(1, 4))
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


def test_gspo_takes_the_geometric_mean_over_real_tokens_only():
    log_ratio = torch.tensor([[0.5, -0.5, 9.0]])
    mask = torch.tensor([[1, 1, 0]])
    loss, _ = compute_policy_gradient_loss(torch.ones(1), log_ratio, "gspo", torch.zeros(1, 3), 0.2, mask)
    assert loss[0, :2].tolist() == [-1.0, -1.0]
    _, gradient, clip_fraction = loss_and_gradient("gspo", torch.ones(1), log_ratio, torch.zeros(1, 3), mask)
    assert clip_fraction == 0.0
    # Token by token, e^0.5 would be clipped; the sequence as a whole is not, so both tokens keep their gradient.
    assert gradient.tolist() == [[-1.0, -1.0, 0.0]]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_clip_fraction_counts_the_side_that_loses_its_gradient(advantage):
    new = torch.tensor([[0.7, 1.0, 1.5]]).log()
    _, gradient, clip_fraction = loss_and_gradient(
        "grpo", torch.tensor([advantage]), new, torch.zeros(1, 3), torch.ones(1, 3)
    )
    assert clip_fraction == pytest.approx(1 / 3)
    assert (gradient == 0).sum() == 1
    assert gradient[0, 2 if advantage > 0 else 0] == 0


@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_neither_loss_nor_clip_fraction(method):
    advantages, new, old, mask = random_batch(3)
    pad = torch.full((3, 5), -7.0, dtype=torch.float64)  # a ratio of e^3.5 there, should anybody look
    wider = (torch.cat([new, pad], 1), torch.cat([old, pad / 2], 1), torch.cat([mask, pad > 0], 1))
    loss, gradient, clip_fraction = loss_and_gradient(method, advantages, new, old, mask)
    wide_loss, wide_gradient, wide_clip_fraction = loss_and_gradient(method, advantages, *wider)
    torch.testing.assert_close(wide_loss, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(wide_gradient, torch.cat([gradient, 0 * pad], 1), rtol=0, atol=1e-12)
    assert wide_clip_fraction == pytest.approx(clip_fraction)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_in_the_padding_reaches_nothing(garbage, method):
    advantages, new, old, mask = random_batch(4)
    clean = loss_and_gradient(method, advantages, new, old, mask)
    dirty_new, dirty_old = new.masked_fill(~mask, garbage), old.masked_fill(~mask, garbage)
    for n, o in ((dirty_new, old), (new, dirty_old), (dirty_new, dirty_old)):
        loss, gradient, clip_fraction = loss_and_gradient(method, advantages, n, o, mask)
        assert torch.equal(loss, clean[0])
        assert torch.equal(gradient, clean[1])
        assert clip_fraction == clean[2]


@pytest.mark.parametrize("method", REWEIGHTED)
def test_no_gradient_through_old_log_probs_that_are_the_same_tensor(method):
    advantages, new, _, mask = random_batch(5)
    new.requires_grad_()
    loss, metadata = compute_policy_gradient_loss(advantages, new, method, new, 0.2, mask)
    masked_sum(loss, mask).backward()
    # The ratio is 1, and its gradient is that of log pi: REINFORCE.  Through both tensors it would cancel to 0.
    torch.testing.assert_close(new.grad, -advantages[:, None] * mask, rtol=0, atol=1e-12)
    assert metadata["clip_fraction"] == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cispo_bounds_the_weight_and_keeps_every_gradient(advantage):
    ratios = torch.tensor([[0.5, 1.0, 1.2, 3.0]])
    _, gradient, clip_fraction = loss_and_gradient(
        "cispo", torch.tensor([advantage]), ratios.log(), torch.zeros(1, 4), torch.ones(1, 4), eps=0.5
    )
    torch.testing.assert_close(gradient, -advantage * torch.tensor([[0.5, 1.0, 1.2, 1.5]]))
    assert clip_fraction == 0.25


def test_importance_ratio_is_1_where_nothing_stands():
    ratio = importance_ratio(
        torch.tensor([[-1.0, -1.0]]), torch.tensor([[-3.0, math.nan]]), torch.tensor([[True, False]])
    )
    assert ratio.tolist() == [[pytest.approx(math.e**2), 1.0]]


def test_a_readers_own_reweighting():
    seen = {}

    def squared(advantages, policy_log_probs, old_log_probs, cliprange, mask):
        seen.update(advantages=advantages.shape, mask=mask.dtype, cliprange=cliprange)
        return -advantages * (policy_log_probs - old_log_probs) ** 2, policy_log_probs > old_log_probs

    loss, metadata = compute_policy_gradient_loss(
        torch.tensor([2.0]),
        torch.tensor([[1.0, 3.0]]),
        squared,
        torch.tensor([[2.0, 0.0]]),
        0.3,
        torch.tensor([[1, 1]]),
    )
    assert loss.tolist() == [[-2.0, -18.0]]
    assert metadata["clip_fraction"] == 0.5
    assert seen == {"advantages": (1, 1), "mask": torch.bool, "cliprange": 0.3}


GOOD = {"raw_rewards_or_advantages": torch.ones(2), "policy_log_probs": torch.zeros(2, 3)}
OLD, MASK = torch.zeros(2, 3), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"importance_reweighting_method": "ppo"},
            "importance_reweighting_method: got 'ppo'; accepted are none, noclip",
        ),
        ({"policy_log_probs": torch.zeros(2)}, r"policy_log_probs has \(2,\)"),
        ({"raw_rewards_or_advantages": torch.ones(3)}, r"raw_rewards_or_advantages: got shape \(3,\)"),
        ({"raw_rewards_or_advantages": torch.ones(2, 3)}, r"raw_rewards_or_advantages: got shape \(2, 3\)"),
        ({"old_log_probs": torch.zeros(2, 2)}, r"policy_log_probs has \(2, 3\), old_log_probs has \(2, 2\)"),
        ({"response_mask": torch.ones(3)}, r"policy_log_probs has \(2, 3\), response_mask has \(3,\)"),
        ({"importance_reweighting_method": "noclip"}, 'old_log_probs: got None.*"noclip"'),
        ({"importance_reweighting_method": "grpo", "old_log_probs": OLD}, 'cliprange: got None.*"grpo"'),
        ({"importance_reweighting_method": "cispo", "old_log_probs": OLD, "cliprange": 0.0}, "cliprange: got 0.0"),
        ({"importance_reweighting_method": "grpo", "old_log_probs": OLD, "cliprange": math.nan}, "cliprange: got nan"),
        (
            {"importance_reweighting_method": "gspo", "old_log_probs": OLD, "cliprange": 0.2},
            "response_mask: got None",
        ),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        compute_policy_gradient_loss(**GOOD | arguments)


@given(seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_aggregation_against_loops(seed):
    _, loss, _, mask = random_batch(seed)
    rows = [[x for x, m in zip(*row, strict=True) if m] for row in zip(loss.tolist(), mask.tolist(), strict=True)]
    by_sequence = sum(sum(row) / len(row) for row in rows) / len(rows)
    by_constant = sum(sum(row) for row in rows) / 42
    assert aggregate_loss_across_microbatch(loss, mask).item() == pytest.approx(by_sequence)
    assert aggregate_loss_across_microbatch(loss, mask, "constant", 42).item() == pytest.approx(by_constant)


def test_sequence_normalization_weighs_responses_and_not_tokens():
    loss = torch.tensor([[1.0, 1, 1, 1], [4, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    assert aggregate_loss_across_microbatch(loss, mask, "sequence") == 2.5  # by tokens it would be 8 / 5


@pytest.mark.parametrize("normalization", ["sequence", "constant"])
@pytest.mark.parametrize("width", [4, 8, 32])
def test_aggregation_does_not_depend_on_padding(normalization, width):
    loss, mask = torch.full((2, width), 9.0), torch.zeros(2, width, dtype=torch.bool)
    loss[0, :3], mask[0, :3] = 1.0, True
    loss[1, :1], mask[1, :1] = 2.0, True
    expected = {"sequence": 1.5, "constant": 0.5}[normalization]
    assert aggregate_loss_across_microbatch(loss, mask, normalization, 10.0) == expected


def test_a_response_without_tokens_adds_0_and_still_counts():
    loss = torch.tensor([[3.0, 5.0], [math.nan, 7.0]], requires_grad=True)
    mask = torch.tensor([[1, 1], [0, 0]])
    total = aggregate_loss_across_microbatch(loss, mask)
    total.backward()
    assert total == 2.0
    assert loss.grad.tolist() == [[0.25, 0.25], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": torch.ones(2, 2)}, r"per_token_policy_gradient_loss has \(2, 3\), mask has \(2, 2\)"),
        ({"loss_normalization": "tokens"}, "loss_normalization: got 'tokens'; accepted are sequence, constant, token"),
        ({"loss_normalization": "constant"}, "normalization_constant: got None"),
        ({"loss_normalization": "constant", "normalization_constant": 0}, "normalization_constant: got 0"),
        ({"loss_normalization": "constant", "normalization_constant": math.inf}, "normalization_constant: got inf"),
    ],
)
def test_aggregation_errors_name_the_argument(arguments, message):
    good = {"per_token_policy_gradient_loss": torch.zeros(2, 3), "mask": MASK}
    with pytest.raises(ValueError, match=message):
        aggregate_loss_across_microbatch(**good | arguments)


def test_masked_mean():
    values = torch.tensor([[1.0, math.nan], [3.0, math.inf]])
    assert masked_mean(values, torch.tensor([[1, 0], [1, 0]])) == 2.0
    assert masked_mean(values, torch.zeros(2, 2)) == 0.0


# --- weights against the engine ---------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), cap=st.sampled_from([1, 1.5, 2.0, 100.0]))
@settings(deadline=None, max_examples=25)
def test_truncated_weights_against_loops(seed, cap):
    _, trainer, engine, mask = random_batch(seed)
    weights = truncated_importance_weights(trainer, engine, mask, cap)
    for row, t, e, m in zip(weights.tolist(), trainer.tolist(), engine.tolist(), mask.tolist(), strict=True):
        expected = [min(math.exp(x) / math.exp(y), cap) if real else 1.0 for x, y, real in zip(t, e, m, strict=True)]
        assert row == pytest.approx(expected, abs=1e-10)
    assert torch.equal(weights, truncated_importance_weights(trainer, engine, mask.long(), cap))


def test_truncated_weights_are_constants():
    _, trainer, engine, mask = random_batch(6)
    weights = truncated_importance_weights(trainer.requires_grad_(), engine.requires_grad_(), mask, 2.0)
    assert not weights.requires_grad


def test_where_engine_and_trainer_agree_no_cap_weakens_a_token():
    _, trainer, _, mask = random_batch(7)
    assert torch.equal(truncated_importance_weights(trainer, trainer, mask, 1.0), torch.ones_like(trainer))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_in_the_padding_reaches_no_truncated_weight(garbage):
    _, trainer, engine, mask = random_batch(8)
    clean = truncated_importance_weights(trainer, engine, mask, 2.0)
    dirty = truncated_importance_weights(trainer, engine.masked_fill(~mask, garbage), mask, 2.0)
    assert torch.equal(dirty, clean)
    assert not mask.all() and (dirty[~mask] == 1).all()


def test_the_impossible_token_and_the_missing_one():
    """What the engine calls impossible weighs the cap; a log-prob that is no number stays none, for the step to see."""
    trainer, mask = torch.full((1, 3), -1.0), torch.ones(1, 3)
    weights = truncated_importance_weights(trainer, torch.tensor([[-math.inf, -1.0, math.nan]]), mask, 3.0)
    assert weights[0, :2].tolist() == [3.0, 1.0] and weights[0, 2].isnan()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine_log_probs": torch.zeros(2, 2)}, r"policy_log_probs has \(2, 3\), engine_log_probs has \(2, 2\)"),
        ({"mask": torch.ones(3)}, r"mask has \(3,\); all must have the same shape, \(batch, length\)"),
        (
            dict.fromkeys(("policy_log_probs", "engine_log_probs", "mask"), torch.ones(3)),
            r"policy_log_probs has \(3,\)",
        ),
        *[
            ({"cap": cap}, f"cap: got {cap!r}; accepted is a finite number of at least 1")
            for cap in (0.99, 0, -2.0, math.inf, math.nan, None, True, "2")
        ],
    ],
)
def test_errors_of_the_truncated_weights(arguments, message):
    good = {"policy_log_probs": torch.zeros(2, 3), "engine_log_probs": OLD, "mask": MASK, "cap": 2.0}
    with pytest.raises(ValueError, match=message):
        truncated_importance_weights(**good | arguments)
