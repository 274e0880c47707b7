"""The template of Alpaca, the files of instructions, and the last number as the answer."""

import gzip

import pytest

from rlhelpers.tasks import Grader
from rlhelpers.tasks.datasets import ALPACA, read_instructions, read_template, render

ROW = '{"prompt": "p", "response": "r", "more": 1}\n'


def test_the_document_is_the_one_of_alpaca():
    assert render("Say {x}.\n", " {response} \n") == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSay {x}.\n\n\n### Response:\n {response} \n"
    )


@pytest.mark.parametrize(
    ("content", "accepted"),
    [
        ("no slots", "one {prompt} and, at its end, one {response}"),
        ("{response} {prompt}", "one {prompt}"),
        ("{prompt} {prompt} {response}", "one {prompt}"),
        ("{prompt} {response} and more", "at its end"),
        ("{prompt} {response} {response}", "one {response}"),
    ],
)
def test_what_is_no_template_is_an_error(tmp_path, content, accepted):
    (tmp_path / "t.txt").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"template: got .*t\.txt; accepted") as error:
        read_template(tmp_path / "t.txt")
    assert accepted in str(error.value)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_rows_of_plain_and_of_gzipped_files(tmp_path, name):
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
def test_a_broken_line_is_named_with_its_file_and_number(tmp_path, line, message):
    (tmp_path / "rows.jsonl").write_text(ROW + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_instructions(tmp_path / "rows.jsonl")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"rows\.jsonl'; there is no such file"):
        read_instructions(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("response", "reward", "reason"),
    [
        ("He has 3+4=7. So the answer is 7.", 1.0, "right"),
        ("The answer is 7. Question: what is 8?", 0.0, "wrong value"),
        ("Seven.", 0.0, "no number in the box"),
        ("", 0.0, "empty response"),
    ],
)
def test_the_last_number_is_the_answer(response, reward, reason):
    grade = Grader(ALPACA).grade(response, "7")
    assert (grade.answer, grade.reason) == (reward, reason)
    assert grade.format == float(any(c.isdigit() for c in response))
