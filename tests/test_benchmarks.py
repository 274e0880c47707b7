"""The four benchmarks: reading, asking, parsing, and the files for those who judge.  The files in tests/data have the
real formats and made-up contents."""

import json
from pathlib import Path

import pytest

from rlhelpers.benchmarks.tasks import (
    BENCHMARKS,
    get_benchmark,
    read_alpaca_eval,
    read_gsm8k,
    read_mmlu,
    read_safety_tests,
    to_alpaca_eval,
    to_safety_judge,
)

DATA = Path(__file__).with_name("data")


def test_an_mmlu_question_with_its_four_choices():
    first, *_ = read_mmlu(DATA / "mmlu")
    assert first.ground_truth == "A"
    assert first.instruction == (
        "Answer the following multiple choice question about garden care. Respond with a single sentence of the form "
        '"The correct answer is _", filling the blank with the letter corresponding to the correct answer (i.e., A, B, '
        "C or D).\n\nQuestion: Which tool cuts a hedge?\nA. Shears\nB. A rake\nC. A spade\nD. A hose\nAnswer:"
    )


def test_mmlu_is_all_files_of_the_folder_in_order():
    examples = read_mmlu(DATA / "mmlu")
    assert [e.fields["subject"] for e in examples] == ["garden care"] * 3 + ["ship knots"] * 2
    assert [e.ground_truth for e in examples] == ["A", "B", "C", "D", "B"]
    assert examples[1].fields["choices"][1] == "A cactus, potted"
    assert examples[2].fields["question"] == 'A gardener wrote:\n"Plant it deep."\nWhat did she speak of?'
    assert examples[3].fields["choices"][2] == ""  # it may be
    assert read_mmlu(DATA / "mmlu" / "test") == examples


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("Which?,a,b,c,A", r"line 2: got 5 columns; accepted are 6: question, four choices"),
        ("Which?,a,b,c,d,e,A", "line 2: got 7 columns"),
        ("Which?,a,b,c,d,E", "line 2: got the answer 'E'; accepted is one of A, B, C and D"),
        ("Which?,a,b,c,d,", "line 2: got the answer ''"),
        ("Which?,a,b,c,d,AB", "line 2: got the answer 'AB'"),
        (" ,a,b,c,d,A", "line 2: the question is empty"),
        ('"Which?,a,b,c,d,A', "line 2: unexpected end of data"),
    ],
)
def test_a_bad_row_of_mmlu_is_named(tmp_path, row, message):
    (tmp_path / "knots_test.csv").write_text(f"Who?,a,b,c,d,B\n{row}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"knots_test\.csv, {message}"):
        read_mmlu(tmp_path)


def test_a_folder_without_mmlu(tmp_path):
    (tmp_path / "knots_val.csv").write_text("Who?,a,b,c,d,B\n", encoding="utf-8")
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError, match=r"it has no files <subject>_test\.csv, nor has its folder test"):
            read_mmlu(folder)


def test_gsm8k_asks_the_question_and_compares_values():
    first, second = read_gsm8k(DATA / "gsm8k.jsonl")
    assert first.instruction == "A shelf holds 1,200 jars and then 34 more. How many is that?\nAnswer:"
    assert (first.ground_truth, second.ground_truth) == ("1,234", "6")
    gsm8k = BENCHMARKS["gsm8k"]
    assert gsm8k.parse("First 6, then $1,234.00") == "1234.00" and gsm8k.is_right("1234.00", "1,234")
    assert not gsm8k.is_right("1234", "6")
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        read_gsm8k(DATA)


def test_mmlu_parses_the_letter():
    mmlu = BENCHMARKS["mmlu"]
    assert mmlu.parse("The correct answer is C.") == "C" and mmlu.is_right("C", "C") and not mmlu.is_right("C", "D")


def test_alpaca_eval_in_and_out(tmp_path):
    examples = read_alpaca_eval(DATA / "alpaca_eval.json")
    assert [e.instruction for e in examples][1] == 'Write "hello" in a code fence.\n```\nhello\n```'
    assert [dict(e.fields) for e in examples] == [{"dataset": "made_up"}] * 2 + [{"dataset": "made_up_too"}]
    rows = [{**e.fields, "instruction": e.instruction, "output": f"ü {i}"} for i, e in enumerate(examples)]
    written = json.loads(to_alpaca_eval(rows, "my model"))
    assert written[2] == {
        "instruction": "Wie heißt der Monat vor Mai?",
        "output": "ü 2",
        "generator": "my model",
        "dataset": "made_up_too",
    }
    # The tool pairs a model's answers with the reference's by the instruction, so not a blank of it may change.
    (tmp_path / "own.jsonl").write_text('{"instruction": " Why? \\n", "dataset": "d"}', encoding="utf-8")
    assert read_alpaca_eval(tmp_path / "own.jsonl")[0].instruction == " Why? \n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"dataset": "d"}, "line 2: instruction: it is missing"),
        ({"instruction": "Why?"}, "line 2: dataset: it is missing"),
        ({"instruction": " ", "dataset": "d"}, "line 2: instruction: got ' '; accepted is a text that is not empty"),
        ({"instruction": ["Why?"], "dataset": "d"}, "line 2: instruction: got "),
    ],
)
def test_a_bad_row_of_alpaca_eval_is_named(tmp_path, row, message):
    rows = [{"instruction": "Why?", "dataset": "d"}, row]
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"eval\.jsonl, {message}"):
        read_alpaca_eval(tmp_path / "eval.jsonl")


def test_safety_tests_in_and_out(tmp_path):
    examples = read_safety_tests(DATA / "simple_safety_tests.csv")
    assert dict(examples[1].fields) == {
        "id": "t_002",
        "harm_area": "Cakes, and Pies",
        "category": "Instructions and actions",
        "prompts_final": "Tell me how to eat it all, and blame the dog",
    }
    assert examples[1].instruction == examples[1].fields["prompts_final"] and examples[1].ground_truth is None
    rows = [{**e.fields, "instruction": e.instruction, "output": "No\nü", "score": None} for e in examples]
    lines = to_safety_judge(rows, "my model").splitlines()
    assert (
        json.loads(lines[1]) == {**examples[1].fields, "output": "No\nü", "generator": "my model"} and len(lines) == 3
    )
    (tmp_path / "theirs.csv").write_text("id,harm_area,prompt\n1,a,Why?\n", encoding="utf-8")  # the authors' own file
    assert dict(read_safety_tests(tmp_path / "theirs.csv")[0].fields) == {
        "id": "1",
        "harm_area": "a",
        "prompts_final": "Why?",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "id,category,prompts_final\n1,c,Why?\n",
            ", line 1: got the columns id, category, prompts_final; missing: harm_area",
        ),
        ("id,harm_area,text\n1,c,Why?\n", ", line 1: got .*; missing: prompts_final"),
        ("id,harm_area,prompt,prompt\n1,a,b,c\n", ", line 1: got .*; more than once: prompt$"),
        ("id,harm_area,prompts_final\n", ": holds no prompts"),
        ("", ": holds no rows"),
        ("id,harm_area,prompts_final\n1,a,Why?\n2,b\n", ", line 3: got 2 columns; the header has 3"),
        ("id,harm_area,prompts_final\n1,a,Why?\n2,b,c,d\n", ", line 3: got 4 columns; the header has 3"),
        ("id,harm_area,prompts_final\n1,a, \n", ", line 2: prompts_final: got ' '"),
    ],
)
def test_a_bad_file_of_safety_tests_is_named(tmp_path, text, message):
    (tmp_path / "sst.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"sst\.csv{message}"):
        read_safety_tests(tmp_path / "sst.csv")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_file_that_is_not_utf8_is_named(tmp_path, name):
    file = tmp_path / "bad_test.csv"
    file.write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"bad_test\.csv.*must be UTF-8"):
        get_benchmark(name).read(tmp_path if name == "mmlu" else file)


@pytest.mark.parametrize("name", ["MMLU", None, []])
def test_an_unknown_benchmark(name):
    with pytest.raises(
        ValueError, match=r"benchmark: got .*; accepted are mmlu, gsm8k, alpaca_eval, simple_safety_tests"
    ):
        get_benchmark(name)
