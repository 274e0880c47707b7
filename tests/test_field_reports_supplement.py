"""What went wrong for others with instruction tuning and DPO, each under the number of its report."""

import gzip
import math

import pytest
import torch

from rlhelpers.kernels import dpo as preferences
from rlhelpers.kernels.dpo import compute_dpo_losses
from rlhelpers.tasks.datasets import ALPACA, read_template, render
from rlhelpers.training.dpo import compute_per_instance_dpo_loss
from rlhelpers.training.sft import PackedSFTDataset

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


def test_b46_the_template_the_end_and_no_newline_behind_it(models, tokenizer, monkeypatch):
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


def test_b47_white_space_of_a_template_file_changes_nothing(tmp_path):
    with_crlf = ALPACA_TEXT.replace("\n", "\r\n") + "\r\n"
    file = tmp_path / "template.txt"
    for content in (ALPACA_TEXT, ALPACA_TEXT + "\n", ALPACA_TEXT + " \n", with_crlf, "\ufeff" + ALPACA_TEXT):
        file.write_bytes(content.encode("utf-8"))
        assert read_template(file) == ALPACA.template
    rendered = render("Set {x} and {response}.", "{prompt} ")
    assert rendered == ALPACA_TEXT.split("{prompt}")[0] + "Set {x} and {response}.\n\n### Response:\n{prompt} "
    with pytest.raises(ValueError, match=r"template: .*nowhere\.txt cannot be read \(FileNotFoundError"):
        read_template(tmp_path / "nowhere.txt")


def test_b47_line_ends_of_the_data_file_change_no_packed_sequence(tmp_path, tokenizer):
    rows = b'{"prompt": "a {x}", "response": "b"}\n{"prompt": "c", "response": "d"}\n'
    (tmp_path / "unix.jsonl").write_bytes(rows)
    (tmp_path / "dos.jsonl").write_bytes(rows.replace(b"\n", b"\r\n"))
    (tmp_path / "zipped.jsonl.gz").write_bytes(gzip.compress(rows))
    unix, *others = (
        PackedSFTDataset(tokenizer, tmp_path / name, 4, shuffle=False).tokens.tolist()
        for name in ("unix.jsonl", "dos.jsonl", "zipped.jsonl.gz")
    )
    assert len(unix) > 8 and all(other == unix for other in others)


def test_b48_padding_is_in_no_sum(models, tokenizer):
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


@pytest.mark.parametrize(("margin", "loss"), [(-2000.0, 200.0), (2000.0, 0.0), (0.0, math.log(2))])
def test_b48_the_loss_of_a_huge_margin_is_finite_and_the_reference_gets_no_gradient(
    models, tokenizer, monkeypatch, margin, loss
):
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
