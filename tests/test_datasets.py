"""Data files that a reader brings: what is read, what is wrong with a line, and pairs of solutions."""

import gzip
import json
import time

import pytest

from rlhelpers.tasks.datasets import (
    HH,
    PreferencePair,
    load_hh,
    load_pairs,
    pair_solutions,
    read_csv,
    read_instructions,
    read_objects,
    read_text,
    read_texts,
    text_field,
    write_pairs,
    write_texts,
)


@pytest.fixture
def write(tmp_path):
    def file(content: str | bytes):
        path = tmp_path / "data.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    return file


def test_a_csv_row_has_the_number_of_its_first_line(write):
    path = write('a,"b\r\nc"\r\n\r\n"d ""e""",f\u2028g\n')
    assert read_csv(path) == [(1, ["a", "b\r\nc"]), (4, ['d "e"', "f\u2028g"])]


def test_a_quote_that_is_never_closed_swallows_no_rows(write):
    with pytest.raises(ValueError, match=r"data\.txt, line 2: unexpected end of data; the file must be CSV"):
        read_csv(write('a,b\n"c,d\ne,f\ng,h\n'))
    with pytest.raises(ValueError, match=r"data\.txt, line 1: .*the file must be CSV"):
        read_csv(write('"a"b,c\n'))


@pytest.mark.parametrize(
    "text",
    ['[{"a": 1},\n {"a": 2}]', ' \n[{"a": 1}, {"a": 2}]\n', '{"a": 1}\n\n{"a": 2}', '\ufeff{"a": 1}\r\n{"a": 2}\r\n'],
)
def test_an_array_and_lines_hold_the_same(write, text):
    assert [row for _, row in read_objects(write(text))] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_text, b"fine\ncaf\xe9\n", r"data\.txt, line 2: .*; the file must be UTF-8"),
        (read_csv, "", r"data\.txt: holds no rows"),
        (read_csv, "\n\n", r"data\.txt: holds no rows"),
        (read_objects, "", r"data\.txt: holds no objects"),
        (read_objects, "[]", r"data\.txt: holds no objects"),
        (read_objects, '{"a": 1}\n{"a": \n', r"data\.txt, line 2: .*; a line must be one JSON object"),
        (read_objects, '{"a": 1}\n3\n', r"data\.txt, line 2: got '3'; accepted is a JSON object"),
        (read_objects, '[{"a": 1},\n{"a" 2}]', r"data\.txt, line 2: .*; the file must be JSON"),
        (read_objects, "[" * 200_000, r"data\.txt.*; the file must be JSON"),
        (
            read_objects,
            '{"a": 1}\n{"a": {"b": ["\\ud83d\\ude00 \\ud83d"]}}',
            r"data\.txt, line 2: got half of a surrogate pair",
        ),
        (read_objects, '[{"a": 1}, {"\\udc00": 1}]', r"data\.txt, line 2: got half of a surrogate pair"),
        (read_objects, f'{{"a": 1}}\n{{"a": {"1" * 5000}}}', r"data\.txt, line 2: .*; a line must be one JSON object"),
        (read_objects, f'[{{"a": {"1" * 5000}}}]', r"data\.txt: .*; the file must be JSON"),
        (read_objects, '{"a": ' * 200_000, r"data\.txt, line 1: .*; a line must be one JSON object"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(write, read, content, message):
    with pytest.raises(ValueError, match=message):
        read(write(content))


@pytest.mark.parametrize("read", [read_text, read_csv, read_objects, read_instructions])
def test_a_file_that_is_not_there(tmp_path, read):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError, match="there is no such file"):
            read(path)


def test_a_text_field_is_kept_as_it_is(tmp_path):
    assert text_field(tmp_path, 3, {"a": " b \n"}, "a") == " b \n"
    for row, got in (({}, "it is missing"), ({"a": " "}, "got ' '"), ({"a": 3}, "got 3"), ({"a": None}, "got None")):
        with pytest.raises(ValueError, match=f"line 3: a: {got}; accepted is a text that is not empty"):
            text_field(tmp_path, 3, row, "a")


def test_a_name_that_ends_in_gz_is_unzipped(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": "1"}\n'))
    assert read_objects(path) == [(1, {"a": "1"})]
    for broken in (b'{"a": "1"}\n', gzip.compress(b'{"a": "1"}\n')[:-6]):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"rows\.jsonl\.gz: .*; the file must be gzipped, as its name says"):
            read_objects(path)


def test_texts_that_were_written_are_read(tmp_path):
    rows = [{"a": "’\u2028\n", "b": "", "c": "left behind"}, {"a": "1", "b": "{x}"}]
    write_texts(tmp_path / "new" / "rows.jsonl", rows)
    assert read_texts(tmp_path / "new" / "rows.jsonl", "a", "b") == [{"a": row["a"], "b": row["b"]} for row in rows]


def test_a_whole_surrogate_pair_is_one_sign(write):
    assert read_objects(write(r'{"a": "\ud83d\ude00"}')) == [(1, {"a": "\U0001f600"})]


def test_many_lines_are_read_in_linear_time(write):
    path = write('{"a": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"}\n' * 60_000)
    started = time.process_time()
    assert len(read_objects(path)) == 60_000 and time.process_time() - started < 10


ROW = '{"prompt": "p", "response": "r", "more": 1}\n'


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_instructions_of_plain_and_of_gzipped_files(tmp_path, name):
    text = ROW + "\n" + ROW.replace('"p"', '"\u2028 {x}"')
    data = text.encode("utf-8")
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert read_instructions(tmp_path / name) == [("p", "r"), ("\u2028 {x}", "r")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"rows\.jsonl, line 2: .*; a line must be one JSON object"),
        ("[1]", r"rows\.jsonl, line 2: got '\[1\]'; accepted is a JSON object"),
        ('{"prompt": "p"}', r"rows\.jsonl, line 2: response: it is missing; accepted are texts as prompt, response"),
        ('{"prompt": "p", "response": 3}', r"rows\.jsonl, line 2: response: got 3; accepted"),
    ],
)
def test_a_broken_line_of_instructions_is_named(tmp_path, line, message):
    (tmp_path / "rows.jsonl").write_text(ROW + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_instructions(tmp_path / "rows.jsonl")


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


def test_missing_files_of_hh_are_named(folder):
    (folder / "helpful-online.jsonl.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"no helpful-online\.jsonl\.gz; the four files"):
        load_hh(folder)


def test_a_broken_line_of_hh_is_named(folder):
    file = folder / "helpful-online.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"chosen": "a", "rejected": "b"}\n{"chosen": "a"}\n'))
    with pytest.raises(ValueError, match=r"helpful-online\.jsonl\.gz, line 2: rejected: it is missing"):
        load_hh(folder)


def test_pairs_that_were_written_are_read(tmp_path):
    pairs = [PreferencePair("’\n", "a", "", "tiny"), PreferencePair("b", "{c}", "d", "tiny")]
    write_pairs(tmp_path / "pairs.jsonl", pairs)
    assert load_pairs(tmp_path / "pairs.jsonl") == pairs


def test_right_solutions_are_paired_with_wrong_ones():
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
