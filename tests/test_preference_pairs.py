"""Pairs: from Anthropic's HH, from files, and from right and wrong solutions."""

import gzip
import json

import pytest

from rlhelpers.tasks.datasets import HH, PreferencePair, load_hh, load_pairs, pair_solutions, write_pairs


def turns(*messages):
    speakers = ("Human", "Assistant") * len(messages)
    return "".join(f"\n\n{speaker}: {text}" for speaker, text in zip(speakers, messages, strict=False))


KEPT = {"chosen": turns("How?\n\nWhy? ", "So. {x}"), "rejected": turns("How?\n\nWhy? ", " No.\n")}
DROPPED = [
    {"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "b", "c", "e")},  # two turns
    {"chosen": turns("a", "b"), "rejected": turns("a", "b", "c")},  # two turns in one of them
    {"chosen": turns("a", "b"), "rejected": turns("x", "c")},  # not the same question
    {"chosen": turns("a"), "rejected": turns("a")},  # no answer
    {"chosen": "Hi." + turns("a", "b"), "rejected": turns("a", "c")},  # something before
    {"chosen": "\n\nAssistant: b", "rejected": "\n\nAssistant: c"},
]


@pytest.fixture
def folder(tmp_path):
    for name in HH:
        rows = [*DROPPED, KEPT] if name == "helpful-base" else [KEPT | {"chosen": turns("How?\n\nWhy? ", name)}]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode("utf-8")))
    return tmp_path


def test_single_turns_of_all_four_files(folder):
    pairs = load_hh(folder)
    assert pairs == load_pairs(folder) and [pair.source for pair in pairs] == list(HH)
    assert pairs[0] == PreferencePair("How?\n\nWhy?", "harmless-base", "No.", "harmless-base")
    assert pairs[1] == PreferencePair("How?\n\nWhy?", "So. {x}", "No.", "helpful-base")


def test_missing_files_are_named(folder):
    (folder / "helpful-online.jsonl.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"no helpful-online\.jsonl\.gz; the four files"):
        load_hh(folder)


def test_a_broken_line_is_named_with_its_file_and_number(folder):
    file = folder / "helpful-online.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"chosen": "a", "rejected": "b"}\n{"chosen": "a"}\n'))
    with pytest.raises(ValueError, match=r"helpful-online\.jsonl\.gz, line 2: rejected: it is missing"):
        load_hh(folder)


def test_pairs_that_were_written_are_read(tmp_path):
    pairs = [PreferencePair("’\n", "a", "", "tiny"), PreferencePair("b", "{c}", "d", "tiny")]
    write_pairs(tmp_path / "pairs.jsonl", pairs)
    assert load_pairs(tmp_path / "pairs.jsonl") == pairs


def test_right_solutions_stand_beside_wrong_ones_of_the_same_problem():
    def row(question, response, reward, finish_reason="stop"):
        return {"question": question, "response": response, "reward": reward, "finish_reason": finish_reason}

    rows = [
        row("p", "right 1", 1.0),
        row("p", "wrong 1", 0.0),
        row("p", "right 2", 1.0),
        row("q", "always right", 1.0),
        row("r", "always wrong", 0.0),
        row("p", "cut off", 0.0, "length"),
        row("p", "wrong 2", 0.0),
        row("p", "right 3", 1.0),
    ]
    assert pair_solutions(rows, "s") == [
        PreferencePair("p", "right 1", "wrong 1", "s"),
        PreferencePair("p", "right 2", "wrong 2", "s"),
    ]
