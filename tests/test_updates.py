"""Train batches: what they are cut from, which log-probs a row needs, and where these come from."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhelpers.kernels.estimators import Estimator
from rlhelpers.rollouts import Completion, Rollout
from rlhelpers.tasks import Problem
from rlhelpers.tasks.grading import Grade
from rlhelpers.training.config import make_config
from rlhelpers.training.updates import Batch, cut, mismatch, score, token_ids

pytestmark = pytest.mark.usefixtures("one_thread")

REWEIGHTED = Estimator("reweighted", importance_reweighting_method="noclip")
CAPPED = Estimator("capped", engine_ratio_cap=2.0)
BOTH = Estimator("both", importance_reweighting_method="noclip", engine_ratio_cap=1.5)
# Prompt and response of four samples: rows of another length each, so that there is padding.
TOKENS = [([3, 4, 5], [6, 7]), ([3, 4, 5], [8, 9, 10, 11, 1]), ([6], [7, 8, 9]), ([6], [1])]


def configuration(estimator, ahead=False, **changes):
    sizes = {"group_size": 2, "train_batch_size": 4, "rollout_batch_size": 4, "gradient_accumulation_steps": 2}
    engine = {"engine": "vllm-server", "rollouts_ahead": True} if ahead else {}
    return make_config(estimator=estimator, max_tokens=8, **sizes | engine | changes)


@pytest.fixture
def policy(tiny_gpt2):
    return tiny_gpt2(torch.float32)


@pytest.fixture
def samples():
    """The engine's log-probs are made up, and far from the policy's on either side."""
    log_probs = [-0.1, -9.0, -2.5, -2.0, -1.0]
    return [
        (Problem("?", "!"), Rollout("x", prompt, []), Completion("y", response, "stop", log_probs[: len(response)]))
        for prompt, response in TOKENS
    ]


def score_samples(policy, tokenizer, samples, config):
    """The one train batch of these samples, scored."""
    [batch] = cut(samples, [Grade(1.0, 0.0, None, "wrong", 1, True)] * len(samples), config, tokenizer)
    return score(policy, batch, config, reference=policy)


def one_by_one(policy, temperature=1.0):
    """The policy's log-probs of each response, every row alone and every token read from its own forward pass."""
    rows = []
    for prompt, response in TOKENS:
        row = []
        for i, token in enumerate(response):
            with torch.no_grad():
                logits = policy(input_ids=torch.tensor([prompt + response[:i]])).logits[0, -1]
            row.append(torch.log_softmax(logits / temperature, dim=-1)[token].item())
        rows.append(row)
    return rows


def placed(rows):
    """(4, width) with each response's values where its tokens are labels, and 0 elsewhere."""
    table = torch.zeros(4, max(len(p) + len(r) for p, r in TOKENS) - 1)
    for i, ((prompt, response), row) in enumerate(zip(TOKENS, rows, strict=True)):
        table[i, len(prompt) - 1 : len(prompt) + len(response) - 1] = torch.tensor(row)
    return table


MASK = placed([[1.0] * len(response) for _, response in TOKENS]).bool()


def flat(rows):
    return torch.tensor([value for row in rows for value in row])


def engine_rows(samples):
    return [completion.log_probs for _, _, completion in samples]


def test_what_was_read_and_what_was_sampled(samples):
    assert token_ids(samples) == TOKENS


def test_on_policy_needs_no_old_log_probs_and_only_looks_at_the_first_group(policy, tokenizer, samples):
    scores = score_samples(policy, tokenizer, samples, configuration("grpo", gradient_accumulation_steps=1))
    assert scores.tensors.old_log_probs is None and scores.tensors.token_weights is None
    torch.testing.assert_close(scores.compared[0], flat(one_by_one(policy)[:2]))
    torch.testing.assert_close(scores.compared[1], flat(engine_rows(samples)[:2]))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_reweighted_step_gets_the_trainers(policy, tokenizer, samples, temperature):
    scores = score_samples(policy, tokenizer, samples, configuration(REWEIGHTED, temperature=temperature))
    expected = one_by_one(policy, temperature)
    torch.testing.assert_close(scores.tensors.old_log_probs.where(MASK, 0.0), placed(expected))
    assert scores.tensors.token_weights is None and scores.tensors.old_log_probs.shape == MASK.shape
    torch.testing.assert_close(scores.compared[0], flat(expected))
    torch.testing.assert_close(scores.compared[1], flat(engine_rows(samples)))


def test_with_rollouts_ahead_they_are_exactly_the_engines(policy, tokenizer, samples):
    """The policy that sampled is gone; what this policy thinks of the samples plays no part."""
    scores = score_samples(policy, tokenizer, samples, configuration(REWEIGHTED, ahead=True))
    assert torch.equal(scores.tensors.old_log_probs, placed(engine_rows(samples)))
    assert scores.tensors.token_weights is None
    torch.testing.assert_close(scores.compared[0], flat(one_by_one(policy)[:2]))
    torch.testing.assert_close(scores.compared[1], flat(engine_rows(samples)[:2]))


def test_with_rollouts_ahead_a_step_that_is_not_reweighted_gets_none(policy, tokenizer, samples):
    assert score_samples(policy, tokenizer, samples, configuration("grpo", ahead=True)).tensors.old_log_probs is None


def test_a_penalty_gets_the_references(policy, tokenizer, samples):
    row = Estimator("penalised", kl_coefficient=0.1, prunes=False)
    scores = score_samples(policy, tokenizer, samples, configuration(row))
    torch.testing.assert_close(scores.tensors.ref_log_probs.where(MASK, 0.0), placed(one_by_one(policy)))
    assert scores.tensors.old_log_probs is None


def test_a_rollout_batch_is_cut_in_order(tokenizer, samples):
    grades = [Grade(1.0, float(i), None, "wrong", 1, True) for i in range(4)]
    config = configuration("grpo", train_batch_size=2, gradient_accumulation_steps=1)
    first, second = cut(samples, grades, config, tokenizer)
    assert (first.samples, second.samples) == (samples[:2], samples[2:])
    assert (first.grades, second.grades) == (grades[:2], grades[2:])
    assert second.tensors.rewards.tolist() == second.rewards.tolist() == [2.0, 3.0]
    assert second.format_rewards.tolist() == [1.0, 1.0] and second.tensors.rewards.dtype == torch.float32


@pytest.mark.parametrize("estimator", [CAPPED, BOTH])
def test_a_cap_gives_every_token_its_weight(policy, tokenizer, samples, estimator):
    scores = score_samples(policy, tokenizer, samples, configuration(estimator))
    trainer, cap = one_by_one(policy), estimator.engine_ratio_cap
    pairs = [zip(*rows, strict=True) for rows in zip(trainer, engine_rows(samples), strict=True)]
    expected = [[min(math.exp(t - e), cap) for t, e in row] for row in pairs]
    torch.testing.assert_close(scores.tensors.token_weights.where(MASK, 0.0), placed(expected))
    assert (scores.tensors.token_weights[~MASK] == 1).all()
    assert (scores.tensors.token_weights == cap).any() and (scores.tensors.token_weights < 1).any()
    assert (scores.tensors.old_log_probs is None) == (estimator is CAPPED)
    torch.testing.assert_close(scores.compared[0], flat(trainer))


def test_a_cap_with_rollouts_ahead_corrects_for_older_weights(policy, tokenizer, samples):
    """pi_0 is then the policy of now, and the weights lead to it from the engine's."""
    ahead, at_once = (score_samples(policy, tokenizer, samples, configuration(BOTH, ahead=a)) for a in (True, False))
    assert torch.equal(ahead.tensors.old_log_probs, at_once.tensors.old_log_probs)
    assert torch.equal(ahead.tensors.token_weights, at_once.tensors.token_weights)


def test_scores_depend_neither_on_padding_nor_on_the_cut(policy, tokenizer, samples):
    whole = score_samples(policy, tokenizer, samples, configuration(REWEIGHTED, gradient_accumulation_steps=1))
    pieces = score_samples(policy, tokenizer, samples, configuration(REWEIGHTED, gradient_accumulation_steps=4))
    torch.testing.assert_close(whole.compared[0], pieces.compared[0])
    torch.testing.assert_close(whole.tensors.old_log_probs[MASK], pieces.tensors.old_log_probs[MASK])


def test_nothing_is_left_to_differentiate(policy, tokenizer, samples):
    scores = score_samples(policy.train(), tokenizer, samples, configuration(BOTH))
    tensors = [t for t in (*vars(scores.tensors).values(), *scores.compared) if isinstance(t, torch.Tensor)]
    assert len(tensors) == 9 and not any(tensor.requires_grad for tensor in tensors)
    assert policy.training


LOG_PROBS = st.floats(-20, 0, width=32)


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(LOG_PROBS, LOG_PROBS), min_size=1, max_size=9), min_size=1, max_size=4))
def test_the_mismatch_is_that_of_all_tokens_of_all_batches(batches):
    scores = [Batch([], [], None, None, None, tuple(map(torch.tensor, zip(*batch, strict=True)))) for batch in batches]
    differences = [trainer - engine for batch in batches for trainer, engine in batch]
    found, sizes = mismatch(scores), sorted(abs(d) for d in differences)
    assert found["mismatch_mean"] == pytest.approx(sum(sizes) / len(sizes), abs=1e-4)
    assert found["mismatch_max"] == pytest.approx(sizes[-1], abs=1e-4)
    low, share = divmod(0.99 * (len(sizes) - 1), 1)
    between = sizes[int(low)] + share * (sizes[min(int(low) + 1, len(sizes) - 1)] - sizes[int(low)])
    assert found["mismatch_p99"] == pytest.approx(between, abs=1e-4)
    near = [d for d in differences if min(abs(math.exp(d) - 0.9), abs(math.exp(d) - 1.1)) < 1e-5]
    outside = sum(not 0.9 <= math.exp(d) <= 1.1 for d in differences)
    assert abs(found["mismatch_outside"] * len(sizes) - outside) <= len(near) + 1e-3
