"""Supervised fine-tuning: packed documents, the schedule, the loss, and that a model learns its texts."""

import copy
import json
import math

import pytest
import torch
from killable import write_model

from rlhelpers import paths
from rlhelpers.evidence.runs import read_metrics
from rlhelpers.tasks.datasets import render
from rlhelpers.training.sft import (
    PackedSFTDataset,
    iterate_batches,
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


# --- packed documents ------------------------------------------------------------------------------------------------

ROWS = [("a b", "c d"), ("e", "f g h i"), ("j k", "l"), ("m", "a")]
END = 1


@pytest.fixture
def file(tmp_path):
    lines = (json.dumps({"prompt": prompt, "response": response}) + "\n" for prompt, response in ROWS)
    (tmp_path / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path / "rows.jsonl"


def documents(tokenizer, begin=(), end=(END,)):
    return [[*begin, *tokenizer.encode(render(*row), add_special_tokens=False), *end] for row in ROWS]


@pytest.mark.parametrize(("begin", "end"), [(None, "<eos>"), ("a", "<eos>"), (None, None)])
def test_bos_and_eos_stand_around_each_document(file, tokenizer, begin, end):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token, tokenizer.eos_token = begin, end
    around = [[tokenizer.convert_tokens_to_ids(token)] if token else [] for token in (begin, end)]
    stream = PackedSFTDataset(tokenizer, file, 5, shuffle=False).tokens.tolist()
    assert stream == [token for document in documents(tokenizer, *around) for token in document]


@pytest.mark.parametrize("seq_length", [1, 2, 5, 30])
def test_labels_are_the_tokens_that_follow(file, tokenizer, seq_length):
    dataset = PackedSFTDataset(tokenizer, file, seq_length, shuffle=False)
    stream = dataset.tokens
    assert len(dataset) == len(list(dataset)) == (len(stream) - 1) // seq_length > 1
    for i, piece in enumerate(dataset):
        start = i * seq_length
        assert piece["input_ids"].equal(stream[start : start + seq_length])
        assert piece["labels"].equal(stream[start + 1 : start + 1 + seq_length])
        assert piece["input_ids"].dtype == piece["labels"].dtype == torch.int64
    assert dataset[-1]["labels"].equal(dataset[len(dataset) - 1]["labels"])


def test_a_last_piece_without_its_last_label_is_dropped(file, tokenizer):
    tokens = len(PackedSFTDataset(tokenizer, file, 1, shuffle=False).tokens)
    assert len(PackedSFTDataset(tokenizer, file, tokens, shuffle=False)) == 0
    assert len(PackedSFTDataset(tokenizer, file, tokens - 1, shuffle=False)) == 1


def test_documents_are_shuffled_whole_and_by_the_seed(file, tokenizer):
    whole = {tuple(document) for document in documents(tokenizer)}

    def order(**options):
        stream, found = PackedSFTDataset(tokenizer, file, 4, **options).tokens.tolist(), []
        while stream:
            end = stream.index(END) + 1
            found.append(tuple(stream[:end]))
            stream = stream[end:]
        assert set(found) == whole and len(found) == len(ROWS)
        return found

    orders = [order(shuffle=True, seed=seed) for seed in range(8)]
    assert len({tuple(o) for o in orders}) > 2 and orders[3] == order(shuffle=True, seed=3)
    assert order(shuffle=False) == [tuple(document) for document in documents(tokenizer)]


@pytest.mark.parametrize("batch_size", [1, 4, 7, 1000])
def test_batches_are_stacked_pieces_the_short_last_one_kept(file, tokenizer, batch_size):
    dataset = PackedSFTDataset(tokenizer, file, 3, shuffle=False)
    batches = iterate_batches(dataset, batch_size, shuffle=False)
    found = list(batches)
    assert len(batches) == len(found) == math.ceil(len(dataset) / batch_size)
    for name in ("input_ids", "labels"):
        assert torch.cat([batch[name] for batch in found]).equal(torch.stack([piece[name] for piece in dataset]))
        assert all(len(batch[name]) == min(batch_size, len(dataset)) for batch in found[:-1])


def test_shuffled_batches_hold_each_piece_once(file, tokenizer):
    dataset = PackedSFTDataset(tokenizer, file, 3, shuffle=False)
    torch.manual_seed(0)
    rows = torch.cat([batch["input_ids"] for batch in iterate_batches(dataset, 2, shuffle=True)]).tolist()
    pieces = [piece["input_ids"].tolist() for piece in dataset]
    assert sorted(rows) == sorted(pieces) and rows != pieces


@pytest.mark.parametrize("seq_length", [0, -1, 2.0, True, None])
def test_a_length_that_there_is_not(file, tokenizer, seq_length):
    with pytest.raises(ValueError, match=r"seq_length: got .*; accepted is a whole number of at least 1"):
        PackedSFTDataset(tokenizer, file, seq_length, shuffle=False)


@pytest.mark.parametrize(
    "settings", [{"seq_length": 0}, {"seq_length": 2.5}, {"seed": None}, {"seed": "1"}, {"shuffle": "no"}]
)
def test_a_setting_that_would_be_guessed_is_named(file, tokenizer, settings):
    [name] = settings
    with pytest.raises(ValueError, match=f"^{name}: got .*; accepted is"):
        PackedSFTDataset(tokenizer, file, **{"seq_length": 4, "shuffle": True} | settings)


def test_what_no_batch_is_made_of_is_named(file, tokenizer):
    dataset = PackedSFTDataset(tokenizer, file, 4, shuffle=False)
    with pytest.raises(ValueError, match="batch_size: got 0; accepted is a whole number of at least 1"):
        iterate_batches(dataset, 0, shuffle=False)
    with pytest.raises(ValueError, match="shuffle: got 'no'; accepted is True or False"):
        iterate_batches(dataset, 4, shuffle="no")


@pytest.mark.parametrize("name", ["instruction", "response"])
def test_only_texts_are_rendered(name):
    with pytest.raises(ValueError, match=f"^{name}: got None"):
        render(**{"instruction": "a", "response": "b"} | {name: None})
