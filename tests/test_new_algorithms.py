"""A method is added from outside: each cell as a function or a row, trained with, and held to a plain loop.

The loop knows nothing of the package but its tokenizer: it goes row by row and token by token over the whole batch.
"""

import copy

import pytest
import torch
from one_step import weights

from rlhelpers.kernels.estimators import Estimator
from rlhelpers.kernels.logprobs import score_batch
from rlhelpers.kernels.microbatches import make_batch
from rlhelpers.kernels.tokens import encode
from rlhelpers.kernels.train_step import policy_gradient_step

pytestmark = pytest.mark.usefixtures("one_thread")

G = 4
TEXTS = [("a b", ["c d e", "f", "g h i j k", "l m"]), ("c", ["a a", "b c d e", "f g", "h i j k l m"])]
REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]  # the second group has no signal
EPS, LOW, HIGH, BETA = 1e-6, 0.1, 0.3, 0.05


def own_leave_one_out(rewards):
    return (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


def own_asymmetric_clip(advantages, new, old, cliprange, mask):
    ratio = torch.where(mask, new - old, 0.0).exp()
    clipped = advantages * ratio.clamp(1 - LOW, 1 + HIGH)
    return -torch.minimum(advantages * ratio, clipped), clipped < advantages * ratio


def own_token_mean(loss, mask, batch):
    return torch.where(mask, loss, 0.0).sum() / batch.tokens


def advantage(row, i):
    group = torch.tensor(REWARDS[i // G * G : i // G * G + G])
    others = [r for j, r in enumerate(group.tolist()) if j != i % G]
    base = sum(others) / len(others) if row.baseline in ("leave_one_out", own_leave_one_out) else group.mean().item()
    scale = 1.0 if row.advantage_normalizer == "none" else group.std().item() + EPS
    return 0.0 if len(set(group.tolist())) == 1 else (REWARDS[i] - base) / scale


def token_loss(row, a, new, old, ref):
    if row.importance_reweighting_method == "none":
        loss = -a * new
    else:
        ratio = (new - old).exp()
        bounded = min(max(ratio, torch.tensor(1.0 - LOW)), torch.tensor(1.0 + HIGH))
        loss = -min(a * ratio, a * bounded)
    log_ratio = new - ref
    penalty = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": (-log_ratio).exp() - 1 + log_ratio}[row.kl_estimator]
    return loss + row.kl_coefficient * penalty


def plain_loop(model, row, ids, old, ref):
    by_tokens = row.loss_normalization in ("token", own_token_mean)
    tokens = sum(len(response) for _, response in ids)
    loss = torch.zeros((), dtype=torch.float64)
    for i, (prompt, response) in enumerate(ids):
        logits = model(torch.tensor([prompt + response])).logits[0]
        for t, token in enumerate(response):
            at = len(prompt) + t - 1
            new = torch.log_softmax(logits[at], dim=0)[token]
            one = token_loss(row, advantage(row, i), new, old[i, at], ref[i, at])
            loss = loss + one / (tokens if by_tokens else len(response) * len(ids))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


ROWS = {
    "leave-one-out, a function": Estimator("mine", baseline=own_leave_one_out, advantage_normalizer="none"),
    "leave-one-out, an entry": Estimator("mine", baseline="leave_one_out", advantage_normalizer="none"),
    "asymmetric clip, a function": Estimator("mine", importance_reweighting_method=own_asymmetric_clip),
    "asymmetric clip, a pair": Estimator("mine", importance_reweighting_method="grpo", cliprange=(LOW, HIGH)),
    "token mean, a function": Estimator("mine", loss_normalization=own_token_mean),
    "token mean, an entry": Estimator("mine", loss_normalization="token"),
    **{f"KL, {k}": Estimator("mine", kl_coefficient=BETA, kl_estimator=k, prunes=False) for k in ("k1", "k2", "k3")},
    "all at once": Estimator(
        "mine", own_leave_one_out, "none", own_token_mean, own_asymmetric_clip, kl_coefficient=BETA, prunes=False
    ),
}


@pytest.fixture
def case(tiny_gpt2, tokenizer):
    """The model, its batch with an old and a reference policy that are not the model's, and the ids."""
    model = tiny_gpt2()
    ids = [(encode(tokenizer, prompt), encode(tokenizer, r)) for prompt, responses in TEXTS for r in responses]
    batch = make_batch(ids, torch.tensor(REWARDS), G, 0)
    scores = score_batch(model, batch.input_ids, batch.labels, 8)
    noise = torch.Generator().manual_seed(1)
    old, ref = (scores + torch.rand(scores.shape, generator=noise, dtype=scores.dtype) - 0.5 for _ in range(2))
    return model, make_batch(ids, torch.tensor(REWARDS), G, 0, old_log_probs=old, ref_log_probs=ref), ids


def update(model, batch, row, **settings):
    """What one SGD step of learning rate 1 takes from the weights, and the metadata."""
    stepped = copy.deepcopy(model)
    optimizer = torch.optim.SGD(stepped.parameters(), lr=1.0)
    _, metadata = policy_gradient_step(stepped, optimizer, batch, row, **settings)
    return weights(model) - weights(stepped), metadata


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("name", ROWS)
def test_the_step_equals_the_plain_loop(case, name, steps):
    model, batch, ids = case
    expected = plain_loop(model, ROWS[name], ids, batch.old_log_probs, batch.ref_log_probs)
    found, metadata = update(model, batch, ROWS[name], gradient_accumulation_steps=steps)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)  # advantages are float32
    assert expected.norm() > 0.01
    assert metadata["pruned_rows"] == (0 if ROWS[name].kl_coefficient else 4)


def test_a_penalty_reaches_rows_without_an_advantage(case):
    model, *_ = case
    silent = make_batch(
        list(zip([[3]] * 8, [[4, 5]] * 8, strict=True)), torch.ones(8), G, 0, ref_log_probs=torch.full((8, 2), -9.0)
    )
    found, metadata = update(model, silent, ROWS["KL, k3"])
    assert found.norm() > 0 and metadata["kl_to_reference"] > 0


def test_a_policy_at_its_reference_pays_no_penalty(case):
    model, batch, ids = case
    scores = score_batch(model, batch.input_ids, batch.labels, 8)
    at_reference = make_batch(ids, torch.tensor(REWARDS), G, 0, ref_log_probs=scores)
    penalised, metadata = update(model, at_reference, ROWS["KL, k3"])
    plain, _ = update(model, at_reference, Estimator("grpo"))
    torch.testing.assert_close(penalised, plain, rtol=0, atol=1e-6)
    assert metadata["kl_to_reference"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROWS["KL, k3"], "ref_log_probs: got None; mine has a KL penalty"),
        (ROWS["asymmetric clip, a pair"], "old_log_probs: got None"),
        (Estimator("mine", loss_normalization="constant"), "normalization_constant: got None"),
    ],
)
def test_what_a_row_needs_is_named(case, row, message):
    model, _, ids = case
    with pytest.raises(ValueError, match=message):
        update(model, make_batch(ids, torch.tensor(REWARDS), G, 0), row)


def test_without_a_length_bias_a_token_weighs_the_same_in_every_response(case):
    """The token mean does not depend on the microbatches, also where they hold responses of another length."""
    model, batch, _ = case
    whole, _ = update(model, batch, Estimator("dapo_loss", loss_normalization="token"))
    for steps in (2, 5, 8):
        cut, _ = update(model, batch, Estimator("l", loss_normalization="token"), gradient_accumulation_steps=steps)
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)
