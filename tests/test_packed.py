"""Packed documents: what stands in the stream, where it is cut, and what a batch is."""

import copy
import gzip
import json
import math

import pytest
import torch

from rlhelpers.tasks.prompts import render
from rlhelpers.training.sft import PackedSFTDataset, iterate_batches

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
def test_begin_and_end_tokens_stand_around_each_document(file, tokenizer, begin, end):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token, tokenizer.eos_token = begin, end
    around = [[tokenizer.convert_tokens_to_ids(token)] if token else [] for token in (begin, end)]
    stream = PackedSFTDataset(tokenizer, file, 5, shuffle=False).tokens.tolist()
    assert stream == [token for document in documents(tokenizer, *around) for token in document]


@pytest.mark.parametrize("seq_length", [1, 2, 5, 30])
def test_pieces_follow_each_other_with_the_next_as_labels(file, tokenizer, seq_length):
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


@pytest.mark.parametrize(
    "settings",
    [*({"seq_length": n} for n in (0, -1, 2.0, 2.5, True, None)), {"seed": None}, {"seed": "1"}, {"shuffle": "no"}],
)
def test_a_setting_that_would_be_guessed_is_named(file, tokenizer, settings):
    [name] = settings
    with pytest.raises(ValueError, match=f"^{name}: got .*; accepted is"):
        PackedSFTDataset(tokenizer, file, **{"seq_length": 4, "shuffle": True} | settings)


def test_bad_input_to_batches_is_named(file, tokenizer):
    dataset = PackedSFTDataset(tokenizer, file, 4, shuffle=False)
    with pytest.raises(ValueError, match="batch_size: got 0; accepted is a whole number of at least 1"):
        iterate_batches(dataset, 0, shuffle=False)
    with pytest.raises(ValueError, match="shuffle: got 'no'; accepted is True or False"):
        iterate_batches(dataset, 4, shuffle="no")


@pytest.mark.field_report("B47")
def test_line_ends_of_the_data_file_change_no_sequence(tmp_path, tokenizer):
    rows = b'{"prompt": "a {x}", "response": "b"}\n{"prompt": "c", "response": "d"}\n'
    (tmp_path / "unix.jsonl").write_bytes(rows)
    (tmp_path / "dos.jsonl").write_bytes(rows.replace(b"\n", b"\r\n"))
    (tmp_path / "zipped.jsonl.gz").write_bytes(gzip.compress(rows))
    unix, *others = (
        PackedSFTDataset(tokenizer, tmp_path / name, 4, shuffle=False).tokens.tolist()
        for name in ("unix.jsonl", "dos.jsonl", "zipped.jsonl.gz")
    )
    assert len(unix) > 8 and all(other == unix for other in others)
