"""DPO as a run: what is held out, what is logged, and that the preferred response becomes the likelier one."""

import math
from dataclasses import replace

import pytest
import torch
from killable import write_model
from transformers import AutoTokenizer

from rlhelpers import paths
from rlhelpers.evidence.runs import read_metrics
from rlhelpers.kernels import dpo as preferences
from rlhelpers.kernels.dpo import compute_dpo_losses
from rlhelpers.models import load_policy
from rlhelpers.tasks.datasets import PreferencePair, write_pairs
from rlhelpers.tasks.prompts import ALPACA
from rlhelpers.training import dpo, offline
from rlhelpers.training.dpo import (
    compute_per_instance_dpo_loss,
    describe_rewards,
    hold_out,
    losses_of,
    make_dpo_config,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread", "roots")
PAIRS = [PreferencePair(f"What is {i}+1?", f"It is {i + 1}.", f"No idea about {i}.", "made") for i in range(24)]


def test_one_pair_and_a_batch_of_pairs_are_the_same_loss(tiny_gpt2, tokenizer):
    policy, reference = tiny_gpt2(), tiny_gpt2()
    with torch.no_grad():
        policy.lm_head.weight += torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pairs = [PreferencePair("a b", "c d", "e", ""), PreferencePair("f", "g", "h i j", "")]
    batch, _ = losses_of(pairs, policy, reference, tokenizer, 0.5)
    for pair, loss in zip(pairs, batch, strict=True):
        one = compute_per_instance_dpo_loss(
            policy, reference, tokenizer, 0.5, pair.instruction, pair.chosen, pair.rejected
        )
        assert one.item() == pytest.approx(loss.item(), abs=1e-12) and one.item() != pytest.approx(math.log(2))
    kernel, _ = compute_dpo_losses(policy, reference, tokenizer, 0.5, [ALPACA("a b")], ["c d"], ["e"])
    assert kernel[0].item() == pytest.approx(batch[0].item(), abs=1e-12)


ALPACA_TEXT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{prompt}\n\n### Response:\n{response}"
)
BETA = 0.5


@pytest.fixture
def models(tiny_gpt2):
    policy, reference = tiny_gpt2(), tiny_gpt2()
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2), dtype=weight.dtype)
    return policy, reference


def whole_text_log_prob(model, ids):
    log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(log_probs[t, token] for t, token in enumerate(ids[1:]))


@pytest.mark.field_report("B46")
def test_one_pair_has_template_and_end_and_no_newline(models, tokenizer, monkeypatch):
    """The reference value scores whole texts: what both have in common cancels in the margin."""

    def value(template, end, behind=""):
        texts = [template.replace("{prompt}", "a b").replace("{response}", r) + behind for r in ("c d e", "f")]
        ids = [tokenizer.encode(text, add_special_tokens=False) + end for text in texts]
        (win, win_ref), (lose, lose_ref) = ([whole_text_log_prob(model, i) for model in models] for i in ids)
        return -torch.nn.functional.logsigmoid(BETA * (win - win_ref - lose + lose_ref)).item()

    loss = compute_per_instance_dpo_loss(*models, tokenizer, BETA, "a b", "c d e", "f")
    assert loss.shape == () and loss.item() == pytest.approx(value(ALPACA_TEXT, [1]), abs=1e-12)
    without = [
        value("{prompt} {response}", [1]),
        value(ALPACA_TEXT, []),
        value(ALPACA_TEXT, [1], " <unk>"),  # this tokenizer has no newline; any token stands for it
    ]
    assert all(abs(loss.item() - other) > 1e-3 for other in without)

    scored = []
    original = preferences.sequence_log_probs
    monkeypatch.setattr(preferences, "sequence_log_probs", lambda m, batch: scored.append(batch) or original(m, batch))
    compute_per_instance_dpo_loss(*models, tokenizer, BETA, "a b", "c d e", "f")
    for batch in scored:  # the policy's and the reference's
        assert batch["labels"][0][batch["response_mask"][0]].tolist() == [*tokenizer.encode("c d e"), 1]
        assert batch["labels"][1][batch["response_mask"][1]].tolist() == [*tokenizer.encode("f"), 1]


@pytest.mark.field_report("B48")
def test_padding_is_in_no_sum(models, tokenizer):
    chosen, rejected = "a b c", "d e f g h i j k l"
    together, rewards = compute_dpo_losses(*models, tokenizer, 0.1, ["a"] * 2, [chosen] * 2, [rejected, "d"])
    _, alone = compute_dpo_losses(*models, tokenizer, 0.1, ["a"], [chosen], [chosen])
    torch.testing.assert_close(rewards["chosen_rewards"], alone["chosen_rewards"].expand(2), rtol=0, atol=1e-12)
    _, alone = compute_dpo_losses(*models, tokenizer, 0.1, ["a"], [rejected], [rejected])
    torch.testing.assert_close(rewards["rejected_rewards"][:1], alone["rejected_rewards"], rtol=0, atol=1e-12)
    single = compute_per_instance_dpo_loss(*models, tokenizer, 0.1, "a", chosen, rejected)
    batched, _ = compute_dpo_losses(*models, tokenizer, 0.1, [ALPACA("a")] * 2, [chosen] * 2, [rejected, "d"])
    assert single.item() == pytest.approx(batched[0].item(), abs=1e-12)
    assert together.shape == (2,)


@pytest.mark.field_report("B48")
@pytest.mark.parametrize(("margin", "loss"), [(-2000.0, 200.0), (2000.0, 0.0), (0.0, math.log(2))])
def test_a_huge_margin_is_finite_and_spares_the_reference(models, tokenizer, monkeypatch, margin, loss):
    """In nats, before beta = 0.1."""
    policy, reference = models
    weight = next(policy.parameters())
    sums = {id(policy): torch.tensor([margin, 0.0]), id(reference): torch.zeros(2)}

    def log_probs(model, batch):
        return sums[id(model)] + 0.0 * next(model.parameters()).float().sum()

    monkeypatch.setattr(preferences, "sequence_log_probs", log_probs)
    found = compute_per_instance_dpo_loss(policy, reference, tokenizer, 0.1, "a", "b", "c")
    assert found.item() == pytest.approx(loss, abs=1e-6)
    found.backward()
    assert weight.grad.isfinite().all() and all(w.grad is None for w in reference.parameters())


def test_no_instruction_is_on_both_sides():
    pairs = [PreferencePair(f"q{i // 3}", str(i), "", "") for i in range(30)]
    training, validation = hold_out(pairs, 4, seed=0)
    assert len(validation) == len(set(validation)) == 4 and set(validation) < set(pairs)
    held_out = {pair.instruction for pair in validation}
    assert training == [pair for pair in pairs if pair.instruction not in held_out]
    assert hold_out(pairs, 4, seed=1)[1] != validation
    with pytest.raises(ValueError, match="n_val_pairs: got -1; accepted is a whole number of at least 0"):
        hold_out(pairs, -1, seed=0)


def test_rewards_in_numbers():
    found = [
        {"chosen_rewards": torch.tensor([1.0, 0.0]), "rejected_rewards": torch.tensor([0.0, 0.0])},
        {"chosen_rewards": torch.tensor([-1.0]), "rejected_rewards": torch.tensor([2.0])},
    ]
    assert describe_rewards(found) == pytest.approx(
        {
            "accuracy": 0.5,
            "margin": -2 / 3,
            "margin_p10": -2.4,
            "margin_p90": 0.8,
            "chosen_reward": 0.0,
            "rejected_reward": 2 / 3,
        }
    )


@pytest.mark.parametrize(("accuracies", "best"), [([0.5, 0.6, 0.9, 0.9, 0.7], 2), ([1.0, 0.2, 0.1, 0.1, 0.1], 1)])
def test_the_best_weights_are_the_first_of_the_highest_accuracy(tmp_path, monkeypatch, accuracies, best):
    """Those before the first update do not count."""
    write_model(tmp_path / "model")
    write_pairs(tmp_path / "pairs.jsonl", PAIRS)
    found, saved, validations = iter(accuracies), [], []
    describe = dpo.describe_rewards

    def described(rewards):
        metrics = describe(rewards)
        if len(rewards) == 1 and len(rewards[0]["chosen_rewards"]) == 3:  # the pairs held out, and no batch
            validations.append(None)
            metrics["accuracy"] = next(found)
        return metrics

    monkeypatch.setattr(dpo, "describe_rewards", described)
    monkeypatch.setattr(offline, "save_policy", lambda *_: saved.append((len(validations) - 1, _[2].name)))
    settings = {"model": str(tmp_path / "model"), "pairs": str(tmp_path / "pairs.jsonl"), "task": "none"}
    settings |= {"n_val_pairs": 3, "batch_size": 5, "gradient_accumulation_steps": 1, "epochs": 1, "eval_every": 1}
    train(make_dpo_config(**settings, device="cpu"))
    assert [at for at, name in saved if name == "best"][-1] == best and saved[-1] == (4, "policy")


@pytest.mark.parametrize(
    ("end", "words", "message"),
    [
        (None, 1, "tokenizer: it has no end-of-text token"),
        ("<|pad|>", 2100, "pairs: none of 24 fits the model's context"),
    ],
)
def test_what_no_pair_can_be_read_with_is_named(tmp_path, end, words, message):
    write_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.eos_token = end
    tokenizer.save_pretrained(tmp_path / "model")
    write_pairs(
        tmp_path / "pairs.jsonl", [replace(pair, instruction=pair.instruction + " a" * words) for pair in PAIRS]
    )
    settings = {"model": str(tmp_path / "model"), "pairs": str(tmp_path / "pairs.jsonl"), "task": "none"}
    with pytest.raises(ValueError, match=message):
        train(make_dpo_config(**settings, device="cpu", n_val_pairs=4, batch_size=4))
    assert not paths.RUNS.exists()


def test_the_preferred_response_becomes_the_likelier_one(tmp_path):
    write_model(tmp_path / "model")
    long = PreferencePair("a " * 2100, "b", "c", "made")  # more than the model reads
    write_pairs(tmp_path / "pairs.jsonl", [*PAIRS, long])
    config = make_dpo_config(
        model=str(tmp_path / "model"),
        device="cpu",
        task="none",
        pairs=str(tmp_path / "pairs.jsonl"),
        n_val_pairs=8,
        batch_size=8,
        learning_rate=3e-3,
        beta=0.1,
        epochs=4,
    )
    folder = train(config)
    metrics = read_metrics(folder)
    assert metrics["val_loss"][0] == pytest.approx(math.log(2)) and metrics["val_accuracy"][0] == 0.5
    last = metrics.iloc[-1]
    assert last["val_accuracy"] == 1.0 and last["val_margin"] > 0.1 and last["val_loss"] < 0.65
    assert last["val_margin_p10"] <= last["val_margin"] <= last["val_margin_p90"]
    assert last["val_margin"] == pytest.approx(last["val_chosen_reward"] - last["val_rejected_reward"], abs=1e-5)
    assert "1 pairs exceed the model's context and are left out." in (folder / "run.json").read_text(encoding="utf-8")
    policy, tokenizer = load_policy(str(folder / "policy"), "cpu")
    reference, _ = load_policy(config.model, "cpu")
    _, validation = hold_out(PAIRS, 8, config.seed)
    with torch.no_grad():
        losses, _ = losses_of(validation, policy, reference, tokenizer, config.beta)
    assert losses.mean().item() == pytest.approx(last["val_loss"], abs=1e-6)
