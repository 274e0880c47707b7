"""The invariants of the step: its gradient is that of the plain sum over the batch, however the batch is cut."""

import copy
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import graded, step, weights

from rlhelpers.kernels import compute_group_normalized_rewards, grpo_train_step
from rlhelpers.kernels.estimators import ESTIMATORS, importance_ratio, no_clip
from rlhelpers.kernels.logprobs import get_response_log_probs, score_batch
from rlhelpers.kernels.losses import (
    aggregate_loss_across_microbatch,
    compute_policy_gradient_loss,
    truncated_importance_weights,
)
from rlhelpers.kernels.tokens import encode, tokenize_prompt_and_output

pytestmark = pytest.mark.usefixtures("one_thread")

Z = 40.0
WORDS = "abcdefghijklm"
# Three groups of four: one that differs, one of equals (pruned), one with a row at exactly the mean (pruned).
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.0, 0.5, 1.0, 0.5]
LENGTHS = [3, 1, 6, 2, 4, 4, 1, 5, 2, 7, 3, 1]


def make_rows(rewards=REWARDS, lengths=LENGTHS, group_size=4, seed=0):
    """(prompt, response, reward) of every rollout: random words, one prompt for each group."""
    words = random.Random(seed)
    prompts = [" ".join(words.choices(WORDS, k=words.randint(1, 4))) for _ in rewards[::group_size]]
    responses = [" ".join(words.choices(WORDS, k=n)) for n in lengths]
    return [(prompts[i // group_size], responses[i], reward) for i, reward in enumerate(rewards)]


def gradient(model, *args, **kwargs):
    """What one SGD step of learning rate 1 takes from the weights, and the metadata; the model stays as it is."""
    stepped = copy.deepcopy(model)
    _, metadata = step(stepped, *args, **kwargs)
    return weights(model) - weights(stepped), metadata


def assert_same(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def scores_of(model, tokenizer, rows, temperature=1.0):
    batch = tokenize_prompt_and_output([row[0] for row in rows], [row[1] for row in rows], tokenizer)
    return score_batch(model, batch["input_ids"], batch["labels"], 3, temperature)


def old_policy(model, tokenizer, rows, spread=0.4, seed=1):
    """log-probs of a policy that differs from the model's, token by token, by up to `spread`."""
    scores = scores_of(model, tokenizer, rows)
    noise = torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed), dtype=scores.dtype)
    return scores + spread * (2 * noise - 1)


def engine_weights(model, tokenizer, rows, cap=1.3):
    """Weights against an engine that is up to e^0.6 off: some are truncated, some are below 1."""
    scores = scores_of(model, tokenizer, rows)
    engine = old_policy(model, tokenizer, rows, spread=0.6, seed=2)
    return truncated_importance_weights(scores, engine, torch.ones_like(scores), cap)


def arguments_of(name, model, tokenizer, rows):
    """A row of the table as arguments of the step, with whatever it needs."""
    return ESTIMATORS[name].step_arguments() | {
        "normalization_constant": Z,
        "old_log_probs": old_policy(model, tokenizer, rows),
    }


def naive_gradient(model, tokenizer, rows, arguments, naive_token_losses, temperature=1.0):
    """Row by row and token by token: nothing pruned, padded or cut.

    Only the advantages are the kernel's own: they are float32 there, and have their own tests.
    """
    advantages, _ = compute_group_normalized_rewards(
        torch.tensor([row[2] for row in rows]), 4, arguments["baseline"], 1e-6, arguments["advantage_normalizer"]
    )
    loss = torch.zeros((), dtype=torch.float64)
    for i, (prompt, response, _) in enumerate(rows):
        ids, start = encode(tokenizer, prompt) + encode(tokenizer, response), len(encode(tokenizer, prompt))
        logits = model(torch.tensor([ids])).logits[0] / temperature
        new = [torch.log_softmax(logits[t - 1], dim=0)[ids[t]] for t in range(start, len(ids))]
        old = [arguments["old_log_probs"][i, t - 1] for t in range(start, len(ids))]
        losses = naive_token_losses(
            arguments["importance_reweighting_method"], advantages[i].item(), new, old, arguments["cliprange"]
        )
        if "token_weights" in arguments:
            of_row = [arguments["token_weights"][i, t - 1].item() for t in range(start, len(ids))]
            losses = [weight * token_loss for weight, token_loss in zip(of_row, losses, strict=True)]
        divisors = {"sequence": len(losses) * len(rows), "constant": Z, "token": sum(LENGTHS)}
        loss = loss + sum(losses) / divisors[arguments["loss_normalization"]]
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten() for g in grads])


@st.composite
def steps(draw):
    """(estimator's name, group size, rows, cuts) of a small random batch."""
    group_size = draw(st.integers(2, 4))
    size = group_size * draw(st.integers(1, 3))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=size, max_size=size))
    lengths = draw(st.lists(st.integers(1, 8), min_size=size, max_size=size))
    rows = make_rows(rewards, lengths, group_size, seed=draw(st.integers(0, 99)))
    return draw(st.sampled_from(list(ESTIMATORS))), group_size, rows, draw(st.integers(1, size))


# --- the gradient is that of the whole batch ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ESTIMATORS)
def test_gradient_is_that_of_the_plain_sum_over_the_whole_batch(name, tiny_gpt2, tokenizer, naive_token_losses):
    model, rows = tiny_gpt2(), make_rows()
    arguments = arguments_of(name, model, tokenizer, rows)
    expected = naive_gradient(model, tokenizer, rows, arguments, naive_token_losses)
    found, metadata = gradient(model, tokenizer, rows, cuts=3, **arguments)
    assert_same(found, expected)
    assert expected.norm() > 0.01
    assert metadata["pruned_rows"] > 0  # or the test would not speak of pruning
    if ESTIMATORS[name].cliprange is None:
        assert metadata["clip_fraction"] == 0
    else:
        assert 0 < metadata["clip_fraction"] < 1  # both branches of the clipping are in the sum


@given(case=steps())
@settings(deadline=None, max_examples=25)
def test_gradient_does_not_depend_on_the_cut(case, tiny_gpt2, tokenizer):
    name, group_size, rows, cuts = case
    model = tiny_gpt2()
    arguments = arguments_of(name, model, tokenizer, rows)
    whole, seen_whole = gradient(model, tokenizer, rows, group_size, **arguments)
    cut, seen_cut = gradient(model, tokenizer, rows, group_size, cuts=cuts, **arguments)
    assert_same(cut, whole)
    for metric in ("grad_norm", "clip_fraction", "token_entropy", "mean_response_length", "pruned_rows"):
        assert seen_cut[metric] == pytest.approx(seen_whole[metric], abs=1e-6)


@pytest.mark.parametrize("cuts", [2, 3, 5, 7, 12])
def test_uneven_cuts_too(cuts, tiny_gpt2, tokenizer):
    model, rows = tiny_gpt2(), make_rows()
    assert_same(gradient(model, tokenizer, rows, cuts=cuts)[0], gradient(model, tokenizer, rows)[0])


@given(case=steps(), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_gradient_does_not_depend_on_the_order(case, seed, tiny_gpt2, tokenizer):
    name, group_size, rows, cuts = case
    model, shuffle = tiny_gpt2(), random.Random(seed)
    arguments = arguments_of(name, model, tokenizer, rows)
    groups = [list(range(i, i + group_size)) for i in range(0, len(rows), group_size)]
    order = [i for group in shuffle.sample(groups, len(groups)) for i in shuffle.sample(group, group_size)]
    in_order, _ = gradient(model, tokenizer, rows, group_size, cuts=cuts, **arguments)
    arguments["old_log_probs"] = arguments["old_log_probs"][order]
    shuffled, _ = gradient(model, tokenizer, [rows[i] for i in order], group_size, cuts=cuts, **arguments)
    # A group's std is summed in float32 and in another order.
    assert_same(shuffled, in_order, atol=1e-6)


# The longer row has more tokens, by which the token mean divides.
@pytest.mark.parametrize("name", [name for name, row in ESTIMATORS.items() if row.loss_normalization != "token"])
def test_padding_to_a_long_row_without_advantage_changes_nothing(name, tiny_gpt2, tokenizer):
    model = tiny_gpt2()
    # Row 9 has the mean reward of its group, so no advantage; under rft it has one, and row 1 has none.
    silent = 1 if name == "rft" else 9
    longer = [20 if i == silent else n for i, n in enumerate(LENGTHS)]
    short, long = make_rows(), make_rows()
    long[silent] = make_rows(lengths=longer)[silent]
    arguments = arguments_of(name, model, tokenizer, short)
    expected, seen = gradient(model, tokenizer, short, cuts=2, **arguments)
    wide = scores_of(model, tokenizer, long)
    wide[:, : arguments["old_log_probs"].shape[1]] = arguments["old_log_probs"]
    found, seen_long = gradient(model, tokenizer, long, cuts=2, **arguments | {"old_log_probs": wide})
    assert wide.shape[1] > arguments["old_log_probs"].shape[1]
    assert_same(found, expected)
    assert seen_long["clip_fraction"] == seen["clip_fraction"]
    assert seen_long["token_entropy"] == pytest.approx(seen["token_entropy"], abs=1e-10)
    assert seen_long["mean_response_length"] == pytest.approx(sum(longer) / len(longer))


def test_a_group_of_equal_rewards_contributes_exactly_zero(tiny_gpt2, tokenizer):
    model = tiny_gpt2()
    mixed, equal = make_rows([1.0, 0, 0, 1], LENGTHS[:4]), make_rows([0.1] * 4, LENGTHS[4:8], seed=1)
    arguments = {"loss_normalization": "constant", "normalization_constant": Z}
    alone, _ = gradient(model, tokenizer, mixed, **arguments)
    beside, metadata = gradient(model, tokenizer, mixed + equal, **arguments)
    assert torch.equal(beside, alone)
    assert metadata["pruned_rows"] == 4


def test_sequence_normalization_counts_pruned_rows(tiny_gpt2, tokenizer):
    model = tiny_gpt2()
    mixed, equal = make_rows([1.0, 0, 0, 1], LENGTHS[:4]), make_rows([0.1] * 4, LENGTHS[4:8], seed=1)
    alone, _ = gradient(model, tokenizer, mixed)
    beside, _ = gradient(model, tokenizer, mixed + equal)
    assert_same(beside, alone / 2)


def test_pruning_keeps_the_one_loser_of_a_group(tiny_gpt2, tokenizer):
    seen = []

    def spy(advantages, *others):
        seen.extend(advantages.flatten().tolist())
        return no_clip(advantages, *others)

    rows = make_rows([0.0] + [0.95] * 7, [2] * 8, group_size=8)
    model = tiny_gpt2()
    old = scores_of(model, tokenizer, rows)
    _, metadata = step(model, tokenizer, rows, 8, importance_reweighting_method=spy, old_log_probs=old)
    assert metadata["pruned_rows"] == 0
    assert len(seen) == 8
    assert seen[0] < 0 < min(seen[1:])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_batch_without_signal_changes_no_bit(name, tiny_gpt2, tokenizer):
    model = tiny_gpt2(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    rows = make_rows()
    step(model, tokenizer, rows, optimizer=optimizer)  # momentum, which would move the weights by itself
    before = weights(model)
    silent = [(prompt, response, 0.0) for prompt, response, _ in rows]
    arguments = arguments_of(name, model, tokenizer, rows)
    loss, metadata = step(model, tokenizer, silent, optimizer=optimizer, cuts=3, **arguments)
    assert torch.equal(weights(model), before)
    assert loss == 0
    assert (metadata["grad_norm"], metadata["pruned_fraction"], metadata["clip_fraction"]) == (0.0, 1.0, 0.0)
    assert metadata["token_entropy"] is None
    assert metadata["skipped_update"] == 0.0


@pytest.mark.parametrize("empty", [4, 12])
def test_a_group_without_response_tokens_adds_nothing(empty, tiny_gpt2, tokenizer):
    model = tiny_gpt2()
    rows = [(prompt, "" if i < empty else response, r) for i, (prompt, response, r) in enumerate(make_rows())]
    without = [(prompt, response, 0.0 if i < empty else r) for i, (prompt, response, r) in enumerate(rows)]
    found, metadata = gradient(model, tokenizer, rows, cuts=3, loss_normalization="constant", normalization_constant=Z)
    expected, _ = gradient(model, tokenizer, without, cuts=3, loss_normalization="constant", normalization_constant=Z)
    assert_same(found, expected)
    assert metadata["skipped_update"] == 0.0 and bool(found.any()) == (empty < 12)


# --- weights against the engine --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [1, 5, 12])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_weighted_gradient_is_that_of_the_plain_weighted_sum(name, cuts, tiny_gpt2, tokenizer, naive_token_losses):
    model, rows = tiny_gpt2(), make_rows()
    plain = arguments_of(name, model, tokenizer, rows)
    weighted = plain | {"token_weights": engine_weights(model, tokenizer, rows)}
    expected = naive_gradient(model, tokenizer, rows, weighted, naive_token_losses)
    found, metadata = gradient(model, tokenizer, rows, cuts=cuts, **weighted)
    assert_same(found, expected)
    assert (found - gradient(model, tokenizer, rows, **plain)[0]).norm() > 0.01
    assert metadata["pruned_rows"] > 0


@given(case=steps(), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_weights_follow_their_rows_through_order_pruning_and_cutting(case, seed, tiny_gpt2, tokenizer):
    name, group_size, rows, cuts = case
    model, shuffle = tiny_gpt2(), random.Random(seed)
    arguments = arguments_of(name, model, tokenizer, rows) | {"token_weights": engine_weights(model, tokenizer, rows)}
    groups = [list(range(i, i + group_size)) for i in range(0, len(rows), group_size)]
    order = [i for group in shuffle.sample(groups, len(groups)) for i in shuffle.sample(group, group_size)]
    whole, _ = gradient(model, tokenizer, rows, group_size, **arguments)
    arguments |= {key: arguments[key][order] for key in ("old_log_probs", "token_weights")}
    cut, _ = gradient(model, tokenizer, [rows[i] for i in order], group_size, cuts=cuts, **arguments)
    assert_same(cut, whole, atol=1e-6)  # a group's std is summed in float32 and in another order


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 7.0])
def test_weights_outside_the_responses_reach_no_gradient(garbage, tiny_gpt2, tokenizer):
    model, rows = tiny_gpt2(), make_rows()
    clean = engine_weights(model, tokenizer, rows)
    mask = tokenize_prompt_and_output([row[0] for row in rows], [row[1] for row in rows], tokenizer)["response_mask"]
    expected, _ = gradient(model, tokenizer, rows, cuts=3, token_weights=clean)
    dirty = clean.masked_fill(~mask, garbage)
    found, metadata = gradient(model, tokenizer, rows, cuts=3, token_weights=dirty)
    assert torch.equal(found, expected)
    assert metadata["skipped_update"] == 0.0


def test_weights_are_constants_also_when_they_carry_a_gradient(tiny_gpt2, tokenizer):
    model, rows = tiny_gpt2(), make_rows()
    clean = engine_weights(model, tokenizer, rows)
    attached = clean.clone().requires_grad_()
    expected, _ = gradient(model, tokenizer, rows, token_weights=clean)
    assert torch.equal(gradient(model, tokenizer, rows, token_weights=attached)[0], expected)
    assert attached.grad is None


@pytest.mark.parametrize("name", ESTIMATORS)
def test_without_weights_the_step_is_the_kernels_composed(name, tiny_gpt2, tokenizer):
    """No row of the table has a cap, and so none has weights: one batch through the kernels by hand, every row whole
    and none pruned."""
    rows = make_rows([1.0, 0, 0, 0, 0, 1, 1, 1], LENGTHS[:8])
    stepped, by_hand = tiny_gpt2(), tiny_gpt2()
    row = ESTIMATORS[name]
    if row.baseline == "none":
        rows = [(prompt, response, reward + 1) for prompt, response, reward in rows]  # 0 would be pruned
    arguments = arguments_of(name, stepped, tokenizer, rows)
    _, metadata = step(stepped, tokenizer, rows, **arguments)
    assert metadata["pruned_rows"] == 0 and row.engine_ratio_cap is None

    optimizer = torch.optim.SGD(by_hand.parameters(), lr=1.0)
    batch = tokenize_prompt_and_output([r[0] for r in rows], [r[1] for r in rows], tokenizer)
    advantages, _ = compute_group_normalized_rewards(
        torch.tensor([r[2] for r in rows]), 4, row.baseline, row.advantage_eps, row.advantage_normalizer
    )
    loss, _ = compute_policy_gradient_loss(
        advantages,
        get_response_log_probs(by_hand, batch["input_ids"], batch["labels"])["log_probs"],
        row.importance_reweighting_method,
        arguments["old_log_probs"],
        row.cliprange,
        batch["response_mask"],
    )
    aggregate_loss_across_microbatch(loss, batch["response_mask"], row.loss_normalization, Z).backward()
    optimizer.step()
    assert_same(weights(stepped), weights(by_hand))
    ones = {"token_weights": torch.ones_like(arguments["old_log_probs"])}
    again = tiny_gpt2()
    step(again, tokenizer, rows, **arguments | ones)
    assert torch.equal(weights(again), weights(stepped))


# --- what was sampled is what is scored -----------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ratio_is_1_on_the_first_step_also_with_dropout(temperature, training, tiny_gpt2, tokenizer):
    ratios = []

    def spy(advantages, new, old, cliprange, mask):
        ratios.append(importance_ratio(new, old, mask))
        return no_clip(advantages, new, old, cliprange, mask)

    model, rows = tiny_gpt2(torch.float32, dropout=0.1).train(training), make_rows()
    old = scores_of(model, tokenizer, rows, temperature)
    arguments = {"cuts": 4, "old_log_probs": old, "temperature": temperature}
    gradient(model, tokenizer, rows, importance_reweighting_method=spy, **arguments)
    assert_same(torch.cat([r.flatten() for r in ratios]), torch.ones(sum(r.numel() for r in ratios)), atol=1e-5)
    _, metadata = step(model, tokenizer, rows, importance_reweighting_method="gspo", cliprange=3e-4, **arguments)
    assert metadata["clip_fraction"] == 0.0
    assert model.training is training


def test_temperature_is_that_of_the_samples(tiny_gpt2, tokenizer, naive_token_losses):
    model, rows = tiny_gpt2(), make_rows()
    arguments = arguments_of("grpo", model, tokenizer, rows)
    expected = naive_gradient(model, tokenizer, rows, arguments, naive_token_losses, temperature=0.7)
    found, _ = gradient(model, tokenizer, rows, temperature=0.7, **arguments)
    assert_same(found, expected)
    assert (found - gradient(model, tokenizer, rows, **arguments)[0]).norm() > 0.01


def test_token_ids_of_the_engine_are_scored_instead_of_the_text(tiny_gpt2, tokenizer):
    model, sampled = tiny_gpt2(), make_rows(seed=1)
    ids = [(encode(tokenizer, prompt), encode(tokenizer, response)) for prompt, response, _ in sampled]
    misread = [("a", "b", reward) for _, _, reward in sampled]
    found, metadata = gradient(model, tokenizer, misread, rollout_token_ids=ids)
    assert_same(found, gradient(model, tokenizer, sampled)[0])
    assert metadata["mean_response_length"] == pytest.approx(sum(LENGTHS) / 12)


def test_every_response_meets_its_own_prompt_and_truth(tiny_gpt2, tokenizer):
    graded_pairs = []

    def reward_fn(response, ground_truth):
        graded_pairs.append((response, ground_truth))
        return graded(response, ground_truth)

    rows = make_rows()
    prompts, responses, rewards = (list(column) for column in zip(*rows, strict=True))
    truths = [str(reward) for reward in rewards]
    model = tiny_gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _, metadata = grpo_train_step(model, tokenizer, optimizer, 1, None, reward_fn, prompts, responses, truths, 4)
    assert graded_pairs == list(zip(responses, truths, strict=True))
    assert metadata["rewards"].tolist() == rewards


def test_old_log_probs_follow_their_rows_through_pruning_and_cutting(tiny_gpt2, tokenizer):
    # Every row's old log-probs say which row it is; the reader's own reweighting looks.
    seen = []

    def spy(advantages, new, old, cliprange, mask):
        assert new.shape == old.shape
        seen.extend(zip(old[:, 0].tolist(), mask.sum(dim=1).tolist(), strict=True))
        return no_clip(advantages, new, new, cliprange, mask)

    model, rows = tiny_gpt2(), make_rows()
    scores = scores_of(model, tokenizer, rows)
    old = torch.arange(12.0)[:, None].expand(scores.shape)
    step(model, tokenizer, rows, cuts=5, importance_reweighting_method=spy, old_log_probs=old)
    kept = [0, 1, 2, 3, 8, 10]
    assert sorted(seen) == [(float(i), LENGTHS[i]) for i in kept]


def test_on_policy_the_loss_is_0_and_the_gradient_is_not(tiny_gpt2, tokenizer):
    model, rows = tiny_gpt2(), make_rows([1.0, 0, 0, 1], [3, 3, 3, 3])
    old = scores_of(model, tokenizer, rows)
    loss, metadata = step(
        model, tokenizer, rows, importance_reweighting_method="grpo", old_log_probs=old, cliprange=0.2
    )
    assert abs(loss) < 1e-6
    assert not loss.requires_grad
    assert metadata["grad_norm"] > 0.01


# --- one update ------------------------------------------------------------------------------------------------------


def test_gradients_are_none_after_and_stale_ones_do_not_count(tiny_gpt2, tokenizer):
    model, rows = tiny_gpt2(), make_rows()
    expected, _ = gradient(model, tokenizer, rows)
    before = weights(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    step(model, tokenizer, rows)
    assert_same(before - weights(model), expected)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("cuts", [1, 4])
def test_the_norm_is_clipped_once_and_reported_before(cuts, tiny_gpt2, tokenizer):
    model, rows = tiny_gpt2(), make_rows()
    free, _ = gradient(model, tokenizer, rows)
    clipped, metadata = gradient(model, tokenizer, rows, cuts=cuts, max_grad_norm=0.01)
    assert metadata["grad_norm"] == pytest.approx(free.norm().item())
    assert free.norm() > 0.02
    torch.testing.assert_close(clipped, free * 0.01 / free.norm(), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("max_grad_norm", [None, math.inf, 1e9])
def test_none_and_inf_mean_no_clipping(max_grad_norm, tiny_gpt2, tokenizer):
    found, metadata = gradient(tiny_gpt2(), tokenizer, make_rows(), max_grad_norm=max_grad_norm)
    assert found.norm().item() == pytest.approx(metadata["grad_norm"])


@pytest.mark.parametrize("explosion", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_leaves_the_weights_alone_and_says_so(explosion, tiny_gpt2, tokenizer):
    def exploding(advantages, new, old, cliprange, mask):
        return -advantages * new * explosion, torch.zeros_like(mask)

    model, rows = tiny_gpt2(), make_rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = weights(model)
    _, metadata = step(model, tokenizer, rows, optimizer=optimizer, importance_reweighting_method=exploding)
    assert torch.equal(weights(model), before)
    assert not optimizer.state  # a skipped step leaves no NaN in the momentum either
    assert metadata["skipped_update"] == 1.0
    assert not math.isfinite(metadata["grad_norm"])
    assert all(p.grad is None for p in model.parameters())
    _, metadata = step(model, tokenizer, rows, optimizer=optimizer)  # and training goes on
    assert metadata["skipped_update"] == 0.0
    assert not torch.equal(weights(model), before)


# --- metadata --------------------------------------------------------------------------------------------------------


def test_metadata_is_complete_and_finite(tiny_gpt2, tokenizer):
    model, rows = tiny_gpt2(), make_rows()
    loss, metadata = step(model, tokenizer, rows, cuts=4)
    assert loss.ndim == 0
    tensors = {name: metadata.pop(name) for name in ("rewards", "format_rewards")}
    assert tensors["rewards"].tolist() == REWARDS
    assert tensors["format_rewards"].tolist() == [1.0] * 12
    assert set(metadata) == {
        *("grad_norm", "token_entropy", "clip_fraction", "mean_reward", "mean_format_reward", "mean_response_length"),
        *("pass_at_k", "signal_fraction", "predicted_signal_fraction", "pruned_rows", "pruned_fraction"),
        *("skipped_update", "gradient_accumulation_steps"),
        *("reward_std_batch", "reward_std_within_groups", "reward_min", "reward_max"),
    }
    assert all(isinstance(value, float) and math.isfinite(value) for value in metadata.values())
    assert metadata["pruned_rows"] == 6.0
    assert metadata["pruned_fraction"] == 0.5
    assert metadata["mean_reward"] == pytest.approx(sum(REWARDS) / 12)
    assert metadata["mean_response_length"] == pytest.approx(sum(LENGTHS) / 12)
    assert metadata["pass_at_k"] == 1.0
    assert metadata["signal_fraction"] == pytest.approx(2 / 3)


def test_entropy_is_the_mean_over_response_tokens_that_were_seen(tiny_gpt2, tokenizer):
    model, rows = tiny_gpt2(), make_rows()
    batch = tokenize_prompt_and_output([row[0] for row in rows], [row[1] for row in rows], tokenizer)
    entropy = get_response_log_probs(model, batch["input_ids"], batch["labels"], True)["token_entropy"]
    kept = [0, 1, 2, 3, 8, 10]
    expected = entropy[kept][batch["response_mask"][kept]].mean().item()
    for cuts in (1, 4, 12):
        _, metadata = gradient(model, tokenizer, rows, cuts=cuts)
        assert metadata["token_entropy"] == pytest.approx(expected, abs=1e-10)


# --- errors ----------------------------------------------------------------------------------------------------------


def bad_rewards(value):
    return lambda response, ground_truth: {"reward": value, "format_reward": 0.0}


REWEIGHTED = {"importance_reweighting_method": "grpo", "cliprange": 0.2}
ONES = torch.ones(4, 5)  # two words of prompt, four of response


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[({"gradient_accumulation_steps": n}, "gradient_accumulation_steps: got") for n in (0, -1, 5, True, 1.0, "2")],
        ({"gradient_accumulation_steps": None}, "gradient_accumulation_steps: got None"),
        *[({"max_grad_norm": n}, "max_grad_norm: got") for n in (0, -1, math.nan, -math.inf, True, "1.0")],
        ({"group_size": 3}, "raw_rewards: got .*4.*group_size=3"),
        ({"group_size": 0}, "group_size: got 0"),
        ({"baseline": "median"}, "baseline: got 'median'"),
        ({"advantage_normalizer": "var"}, "advantage_normalizer: got 'var'"),
        ({"repeated_prompts": ["a"]}, "repeated_prompts has 1, rollout_responses has 4"),
        ({"repeated_ground_truths": ["1"]}, "rollout_responses has 4, repeated_ground_truths has 1"),
        ({"rollout_token_ids": [([3], [4])] * 3}, "rollout_token_ids: got 3 rows for 4"),
        ({"importance_reweighting_method": "ppo"}, "importance_reweighting_method: got 'ppo'"),
        ({"loss_normalization": "tokens"}, "loss_normalization: got 'tokens'"),
        ({"loss_normalization": "constant"}, "normalization_constant: got None"),
        (REWEIGHTED, "old_log_probs: got None"),
        (REWEIGHTED | {"old_log_probs": ONES, "cliprange": None}, "cliprange: got None"),
        (REWEIGHTED | {"old_log_probs": ONES[:, :4]}, r"old_log_probs: got shape \(4, 4\), wanted \(4, 5\)"),
        (REWEIGHTED | {"old_log_probs": ONES[:3]}, r"old_log_probs: got shape \(3, 5\), wanted \(4, 5\)"),
        ({"token_weights": ONES[:, :4]}, r"token_weights: got shape \(4, 4\), wanted \(4, 5\)"),
        *[({"token_weights": ONES * w}, "token_weights: not finite at a token") for w in (math.nan, math.inf)],
        ({"reward_fn": bad_rewards(None)}, "reward_fn: reward of response 0 is None"),
        ({"reward_fn": bad_rewards(math.nan)}, "reward_fn: reward of response 0 is nan"),
    ],
)
def test_errors_name_the_argument_and_leave_everything_as_it_was(changes, message, tiny_gpt2, tokenizer):
    model = tiny_gpt2().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = weights(model)
    good = {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "reward_fn": graded,
        "repeated_prompts": ["a b"] * 4,
        "rollout_responses": ["c d e f", "g h", "i", "j k l"],
        "repeated_ground_truths": ["1", "0", "0", "1"],
        "group_size": 4,
    }
    with pytest.raises(ValueError, match=message):
        grpo_train_step(model, tokenizer, optimizer, **good | changes)
    assert torch.equal(weights(model), before)
    assert not optimizer.state
    assert model.training
    assert all((p.grad == 1).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"importance_reweighting_method": "ppo"}, "importance_reweighting_method: got 'ppo'"),
        ({"loss_normalization": "constant"}, "normalization_constant: got None"),
        (REWEIGHTED, "old_log_probs: got None"),
    ],
)
def test_errors_do_not_wait_for_a_batch_with_signal(arguments, message, tiny_gpt2, tokenizer):
    silent = make_rows([0.0] * 4, LENGTHS[:4])
    with pytest.raises(ValueError, match=message):
        step(tiny_gpt2(), tokenizer, silent, **arguments)


def test_a_temperature_that_is_none_changes_no_weight(tiny_gpt2, tokenizer):
    model = tiny_gpt2().train()
    before = weights(model)
    with pytest.raises(ValueError, match=r"temperature: got 0\.0"):
        step(model, tokenizer, make_rows(), temperature=0.0)
    assert torch.equal(weights(model), before)
    assert model.training


def test_an_interrupted_step_leaves_no_half_of_a_gradient(tiny_gpt2, tokenizer):
    calls = []

    def interrupted(advantages, new, old, cliprange, mask):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return -advantages * new, torch.zeros_like(mask)

    model = tiny_gpt2().train()
    before = weights(model)
    with pytest.raises(KeyboardInterrupt):
        step(model, tokenizer, make_rows(), cuts=4, importance_reweighting_method=interrupted)
    assert torch.equal(weights(model), before)
    assert all(p.grad is None for p in model.parameters())
    assert model.training


def test_no_rollouts_at_all(tiny_gpt2, tokenizer):
    model = tiny_gpt2()
    with pytest.raises(ValueError, match="rollout_responses has 0"):
        grpo_train_step(model, tokenizer, torch.optim.SGD(model.parameters(), lr=1.0), 1, None, graded, [], [], [], 4)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_old_log_probs_that_are_not_finite_are_refused_before_anything_changes(tiny_gpt2, tokenizer, value):
    model, rows = tiny_gpt2(), make_rows()
    old = torch.zeros(
        len(rows), tokenize_prompt_and_output(*zip(*[r[:2] for r in rows], strict=True), tokenizer)["labels"].shape[1]
    )
    before = weights(model)
    with pytest.raises(ValueError, match="old_log_probs: not finite"):
        step(model, tokenizer, rows, importance_reweighting_method="noclip", old_log_probs=old + value)
    assert torch.equal(weights(model), before)


def test_a_loss_that_is_not_finite_skips_the_update(tiny_gpt2, tokenizer):
    def broken(advantages, policy_log_probs, old_log_probs, cliprange, mask):
        """The loss is NaN, its gradient 0."""
        return policy_log_probs * 0 + math.nan, torch.zeros_like(mask)

    model = tiny_gpt2()
    before = weights(model)
    _, metadata = step(model, tokenizer, make_rows(), importance_reweighting_method=broken)
    assert metadata["skipped_update"] == 1.0 and torch.equal(weights(model), before)


def test_a_bad_temperature_is_named_also_where_everything_is_pruned(tiny_gpt2, tokenizer):
    with pytest.raises(ValueError, match=r"temperature: got 0\.0"):
        step(tiny_gpt2(), tokenizer, make_rows([1.0] * 4, [2] * 4), temperature=0.0)


def test_a_frozen_submodule_stays_in_eval_mode(tiny_gpt2, tokenizer):
    model = tiny_gpt2().train()
    model.transformer.drop.eval()
    step(model, tokenizer, make_rows())
    assert model.training and not model.transformer.drop.training


@pytest.mark.parametrize("ids", [[], [([3], [4], [5])] * 12, [([3], [4])] * 11, [([], [4])] * 12])
def test_bad_token_ids_are_named(tiny_gpt2, tokenizer, ids):
    with pytest.raises(ValueError, match=r"rollout_token_ids: got|prompt 0 has no token"):
        step(tiny_gpt2(), tokenizer, make_rows(), rollout_token_ids=ids)
