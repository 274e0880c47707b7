"""The DPO loss: against its formula written out in loops, and what must not change it."""

import copy
import math

import pytest
import torch

from rlhelpers.kernels.dpo import compute_dpo_losses, implicit_reward_accuracy

PROMPTS = ["a b c", "d", "e f"]
CHOSEN = ["g h i", "a", "b b"]
REJECTED = ["a b c d e f g h i", "k l", ""]


@pytest.fixture
def models(tiny_gpt2):
    """A policy and a reference that differ."""
    policy, reference = tiny_gpt2(dropout=0.5), tiny_gpt2()
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
    return policy, reference


def log_prob(model, tokenizer, prompt, response):
    """log pi(response and its end | prompt), token by token."""
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    total = 0.0
    for token in [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]:
        total += model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token].item()
        ids.append(token)
    return total


def in_loops(models, tokenizer, beta, prompt, chosen, rejected):
    (win, win_ref), (lose, lose_ref) = (
        [log_prob(model, tokenizer, prompt, response) for model in models] for response in (chosen, rejected)
    )
    return beta * (win - win_ref), beta * (lose - lose_ref)


def test_it_is_equation_7_written_out(models, tokenizer):
    losses, rewards = compute_dpo_losses(*models, tokenizer, 0.3, PROMPTS, CHOSEN, REJECTED)
    for i, pair in enumerate(zip(PROMPTS, CHOSEN, REJECTED, strict=True)):
        chosen, rejected = in_loops(models, tokenizer, 0.3, *pair)
        assert rewards["chosen_rewards"][i].item() == pytest.approx(chosen, abs=1e-9)
        assert rewards["rejected_rewards"][i].item() == pytest.approx(rejected, abs=1e-9)
        assert losses[i].item() == pytest.approx(math.log(1 + math.exp(rejected - chosen)), abs=1e-9)


def test_a_pair_does_not_depend_on_the_others_of_its_batch(models, tokenizer):
    together, _ = compute_dpo_losses(*models, tokenizer, 0.3, PROMPTS, CHOSEN, REJECTED)
    alone = [
        compute_dpo_losses(*models, tokenizer, 0.3, [p], [c], [r])[0][0]
        for p, c, r in zip(PROMPTS, CHOSEN, REJECTED, strict=True)
    ]
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=1e-12)


def test_the_gradient_is_the_policys_alone(models, tokenizer):
    policy, reference = models
    compute_dpo_losses(policy, reference, tokenizer, 0.3, PROMPTS, CHOSEN, REJECTED)[0].sum().backward()
    assert all(weight.grad is None for weight in reference.parameters())
    assert any(weight.grad.abs().sum() > 0 for weight in policy.parameters())


def test_dropout_is_off_and_comes_back(models, tokenizer):
    policy, reference = models
    quiet, _ = compute_dpo_losses(policy, reference, tokenizer, 0.3, PROMPTS, CHOSEN, REJECTED)
    policy.train(), reference.train()
    loud, _ = compute_dpo_losses(policy, reference, tokenizer, 0.3, PROMPTS, CHOSEN, REJECTED)
    assert quiet.equal(loud) and policy.training and reference.training


def test_before_training_the_loss_is_log_2_and_the_accuracy_one_half(tiny_gpt2, tokenizer):
    losses, rewards = compute_dpo_losses(tiny_gpt2(), tiny_gpt2(), tokenizer, 5.0, PROMPTS, CHOSEN, REJECTED)
    assert losses.tolist() == pytest.approx([math.log(2)] * 3, abs=1e-15)
    assert implicit_reward_accuracy(rewards["chosen_rewards"] - rewards["rejected_rewards"]) == 0.5


def test_accuracy_counts_the_margins_above_zero_and_half_of_the_ties():
    assert implicit_reward_accuracy(torch.tensor([1e-9, 0.0, -5.0, 3.0])) == 0.625


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"beta": 0.0}, "beta: got 0.0; accepted is a finite number above 0"),
        ({"chosen": ["a"]}, "chosen has 1"),
        ({"prompts": ["", "a", "b"]}, "prompt 0 has no token"),
        ({"rejected": "a b c"}, "rejected: got 'a b c'; accepted is a list"),
    ],
)
def test_bad_input_is_named(tiny_gpt2, tokenizer, wrong, message):
    arguments = {"beta": 0.1, "prompts": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED} | wrong
    with pytest.raises(ValueError, match=message):
        compute_dpo_losses(tiny_gpt2(), tiny_gpt2(), tokenizer, **arguments)


def test_a_tokenizer_without_an_end(tiny_gpt2, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="tokenizer: it has no end-of-text token"):
        compute_dpo_losses(tiny_gpt2(), tiny_gpt2(), tokenizer, 0.1, PROMPTS, CHOSEN, REJECTED)
