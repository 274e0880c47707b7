"""Supervised fine-tuning: packed documents, the schedule, the loss, and that a model learns its texts."""

import json
import math

import pytest
import torch
from killable import write_model

from rlhelpers import paths
from rlhelpers.evidence.runs import read_metrics
from rlhelpers.training.sft import (
    PackedSFTDataset,
    make_sft_config,
    mean_loss,
    train,
    warmup_and_cosine,
)

pytestmark = pytest.mark.usefixtures("one_thread", "roots")


def test_the_rate_rises_in_a_line_and_falls_along_a_cosine():
    factor = warmup_and_cosine(0.2, 10)
    expected = [0.0, 0.5, *(0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8))]
    assert [factor(step) for step in range(1, 11)] == pytest.approx(expected)
    assert warmup_and_cosine(0.0, 4)(1) == 1.0


@pytest.fixture
def given(tmp_path):
    write_model(tmp_path / "model")
    row = json.dumps({"prompt": "Ada has 3.", "response": "So 3."}) + "\n"
    (tmp_path / "rows.jsonl").write_text(row * 30, encoding="utf-8")
    rows = str(tmp_path / "rows.jsonl")
    settings = {"model": str(tmp_path / "model"), "device": "cpu", "task": "none", "train_data": rows, "val_data": rows}
    return settings | {"seq_length": 32, "batch_size": 8, "learning_rate": 0.03, "epochs": 4, "eval_every": 100}


def test_it_learns_its_texts_and_follows_the_schedule(given):
    metrics = read_metrics(train(make_sft_config(**given)))
    steps = metrics.index[-1]
    assert "val_reward" not in metrics
    assert metrics["val_loss"][0] == pytest.approx(math.log(1024), abs=0.5)  # it knows nothing yet
    assert metrics["val_loss"][steps] < 0.5 * metrics["val_loss"][0]
    factor = warmup_and_cosine(0.03, steps)
    assert metrics["learning_rate"][1:].tolist() == pytest.approx([0.03 * factor(s) for s in range(1, steps + 1)])


def test_the_mean_loss_is_over_all_tokens(given, tiny_gpt2, tokenizer):
    """Whatever the batches: the last one is short."""
    pieces, model = PackedSFTDataset(tokenizer, given["train_data"], 7, shuffle=False), tiny_gpt2(dropout=0.5)
    inputs, labels = (torch.stack([piece[name] for piece in pieces]) for name in ("input_ids", "labels"))
    expected = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten()).item()
    model.train()
    assert len(pieces) % 16 and mean_loss(model, pieces) == pytest.approx(expected, abs=1e-12) and model.training


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 512}, "train_data: got .*, which is less than one batch of 512 pieces of 32 tokens"),
        ({"seq_length": 2000, "batch_size": 1}, "val_data: got .*, which is no piece of 2000 tokens"),
        ({"seq_length": 5000}, "seq_length: got 5000; accepted is at most the model's context of"),
        ({"task": "tiny", "n_val_examples": 1, "max_tokens": 5000}, "prompts: prompt 0 has .* with max_tokens=5000"),
    ],
)
def test_what_does_not_fit_is_named_before_the_folder_is_made(given, tmp_path, settings, message):
    if "val_data" in message:
        (tmp_path / "short.jsonl").write_text('{"prompt": "a", "response": "b"}\n', encoding="utf-8")
        settings = settings | {"val_data": str(tmp_path / "short.jsonl")}
    with pytest.raises(ValueError, match=message):
        train(make_sft_config(**given | settings))
    assert not paths.RUNS.exists()
