"""Data files that a reader brings: what is read, and that whatever is wrong is said with its line."""

import gzip
import time

import pytest

from rlhelpers.tasks.datasets import read_csv, read_objects, read_text, read_texts, text_field, write_texts


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


@pytest.mark.parametrize("read", [read_text, read_csv, read_objects])
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


def test_a_file_of_many_lines_is_read_in_a_time_that_grows_with_it(write):
    path = write('{"a": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"}\n' * 60_000)
    started = time.process_time()
    assert len(read_objects(path)) == 60_000 and time.process_time() - started < 10
