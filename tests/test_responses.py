"""Responses as a table: from a file, graded, counted, held against a person."""

import gzip
import json
import math

import pandas as pd
import pytest
from bad_input import NOT_A_FOLDER, NOT_A_LIST, NOT_A_NUMBER, NOT_A_TABLE, NOT_WHOLE, Row, check_refusal, name_of

from rlhelpers import paths
from rlhelpers.evidence.responses import (
    CATEGORIES,
    FIELDS,
    REQUIRED,
    agreement,
    category_counts,
    draw_examples,
    grade_responses,
    read_responses,
)
from rlhelpers.tasks.grading import verify_answer

REAL = paths.ROOT.parent / "shared/data/olmo2_rollouts/rollouts.jsonl.gz"
ROW = {"prompt": "r1_zero", "question": "2+3?", "ground_truth": "5", "response": " 5 </think> <answer> 5 </answer>"}


def write(path, *rows):
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.write(lines)
    return path


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.jsonl.gz"])
def test_reads_plain_and_zipped_lines(tmp_path, name):
    more = {"run": "b", "finish_reason": "length", "human": {"verdict": "correct", "why": "so"}, "token_ids": [1]}
    table = read_responses(write(tmp_path / name, ROW, "", {**ROW, **more, "question": "Janet’s ducks?"}))
    assert list(table.columns) == list(FIELDS)
    assert table.run.tolist() == ["mine", "b"]
    assert table.finish_reason.tolist() == [None, "length"]
    assert table.human.tolist() == [None, "correct"]
    assert table.question.tolist() == ["2+3?", "Janet’s ducks?"]


def test_keeps_further_fields_on_demand_and_names_every_run(tmp_path):
    rows = [ROW | {"run": None, "answer_reward": 1}, ROW | {"run": 7}]
    table = read_responses(write(tmp_path / "mine.jsonl", *rows), also=["answer_reward"])
    assert list(table.columns) == [*FIELDS, "answer_reward"]
    assert table.answer_reward.tolist() == [1, None]
    assert table.run.tolist() == ["mine", "7"]


def test_a_relative_path_starts_at_the_working_directory(tmp_path, monkeypatch):
    write(tmp_path / "mine.jsonl", ROW)
    monkeypatch.chdir(tmp_path)
    assert len(read_responses("mine.jsonl")) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "Expecting property name"),
        ("[]", "got '[]'; accepted is a JSON object"),
        *[({k: v for k, v in ROW.items() if k != name}, f"the field {name} is missing") for name in REQUIRED],
        ({**ROW, "response": None}, "response: got None"),
        ({**ROW, "ground_truth": 5}, "ground_truth: got 5"),
        ({**ROW, "ground_truth": " "}, "ground_truth: got ' '"),
        ({**ROW, "prompt": "r2_zero"}, "prompt: got 'r2_zero'; accepted are r1_zero"),
        ({**ROW, "human": {"verdict": "perhaps"}}, "human: got {'verdict': 'perhaps'}"),
    ],
)
def test_a_bad_line_names_file_line_and_fields(tmp_path, line, message):
    path = write(tmp_path / "mine.jsonl", ROW, line)
    with pytest.raises(ValueError) as error:
        read_responses(path)
    assert str(error.value).startswith(f"{path}, line 2: {message}")
    assert "fields prompt, question, ground_truth, response (texts)" in str(error.value)


def test_a_line_that_is_no_utf8_or_nested_too_deeply_is_named(tmp_path):
    good = json.dumps(ROW).encode()
    for bad in (b"\xff", b"[" * 100_000):
        (tmp_path / "mine.jsonl").write_bytes(b"\n\n" + good + b"\n\n" + bad)
        with pytest.raises(ValueError, match=r"mine\.jsonl, line 5: .*; accepted is one"):
            read_responses(tmp_path / "mine.jsonl")


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    (tmp_path / "mine.jsonl").write_text(json.dumps(ROW), encoding="utf-8-sig")
    assert len(read_responses(tmp_path / "mine.jsonl")) == 1


def test_files_that_hold_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"responses: got .*no.jsonl.*there is no such file; accepted is one"):
        read_responses(tmp_path / "no.jsonl")
    with pytest.raises(ValueError, match=r"empty.jsonl: holds no objects; accepted is one"):
        read_responses(write(tmp_path / "empty.jsonl", ""))
    for name, content in (("plain.gz", b"{}"), ("torn.gz", gzip.compress(b"x" * 999)[:-9]), ("latin.jsonl", b"\xe9")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}.*; the file must be .*; accepted is one"):
            read_responses(tmp_path / name)


def table(*rows):
    names = ("run", "prompt", "response")
    return pd.DataFrame([dict(zip(names, row, strict=True)) | {"question": "?", "ground_truth": "5"} for row in rows])


RIGHT, SENTENCE, WRONG = (f"</think> <answer>{box}</answer>" for box in ("5", "It is 5.", "6"))
MIXED = table(
    ("a", "r1_zero", RIGHT),
    ("a", "r1_zero", SENTENCE),
    ("a", "r1_zero", WRONG),
    ("a", "question_only", "5"),
    ("b", "question_only", r"\boxed{5}"),
)


def test_grades_and_counts():
    graded = grade_responses(MIXED)
    one, two, three = CATEGORIES
    assert graded.category.tolist() == [one, two, two, three, one]
    assert graded.reward.tolist() == [1, 0, 0, 0, 1]
    assert graded.in_substance.tolist() == [True, True, False, True, True]
    assert graded.reason.tolist() == ["right", "sentence in the box", "wrong value", r"no \boxed", "right"]
    counts = category_counts(graded)
    assert list(counts.columns) == list(CATEGORIES)
    assert counts.loc[("a", "r1_zero")].tolist() == [1, 2, 0]
    assert counts.loc[("b", "question_only")].tolist() == [1, 0, 0]
    assert counts.to_numpy().sum() == len(MIXED)


def test_the_tasks_verdict_and_the_tables_index_are_kept():
    graded = grade_responses(MIXED[2:3], lambda answer, truth: "right" if answer == "6" else "wrong value")
    assert graded.index.tolist() == [2]
    assert graded.reward.tolist() == [1]
    assert graded.reason.tolist() == ["right"]


def test_examples_take_prompts_and_runs_in_turn():
    graded = table(*[("a", "r1_zero", "x")] * 50, *[("b", "r1_zero", "x")] * 3, ("a", "question_only", "x"))
    drawn = draw_examples(graded, 6, seed=0)
    sizes = drawn.groupby(["run", "prompt"]).size().to_dict()
    assert sizes == {("a", "question_only"): 1, ("a", "r1_zero"): 3, ("b", "r1_zero"): 2}
    assert drawn.index.tolist() == draw_examples(graded, 6, seed=0).index.tolist()
    assert drawn.index.tolist() != draw_examples(graded, 6, seed=1).index.tolist()
    assert len(draw_examples(graded, 100, seed=0)) == len(graded)
    assert len(draw_examples(graded[:0], 5, seed=0)) == 0


def test_agreement():
    rule = pd.Series([True, True, True, False, False])
    person = pd.Series([True, False, None, True, False], dtype=object)
    assert agreement(rule, person) == {
        "judged": 4,
        "right": 2,
        "rule says right": 2,
        "both": 1,
        "precision": 0.5,
        "recall": 0.5,
    }
    nobody = agreement(rule, pd.Series([None] * 5, dtype=object))
    assert nobody["judged"] == 0 and math.isnan(nobody["precision"]) and math.isnan(nobody["recall"])


@pytest.mark.slow
def test_the_real_file():
    """Responses of OLMo-2-0425-1B, where they are at hand."""
    if not REAL.is_file():
        pytest.skip("no responses of the 1B model here")
    graded = grade_responses(read_responses(REAL))
    counts = category_counts(graded)
    assert len(graded) == 7914
    assert counts.sum(axis=1).tolist() == [1319] * 6
    assert list(counts.columns) == list(CATEGORIES)
    human = graded.human.map({"correct": True, "incorrect": False})
    rejected = graded.reward == 0
    judged = agreement(graded.in_substance[rejected], human[rejected])
    assert judged["judged"] > 80
    assert judged["precision"] > 0.9 and judged["recall"] > 0.9


# ---- bad input is refused by name; a new case is a row of ROWS

GRADED = grade_responses(MIXED[:1].assign(human=None))
GOOD = {
    "read_responses": (read_responses, {"path": "no.jsonl", "also": []}),
    "grade_responses": (grade_responses, {"table": MIXED, "verify": verify_answer}),
    "category_counts": (category_counts, {"graded": GRADED}),
    "draw_examples": (draw_examples, {"graded": GRADED, "count": 1, "seed": 0}),
    "agreement": (agreement, {"rule": GRADED.in_substance, "verdicts": GRADED.human}),
}
TABLE = pd.DataFrame({"estimator": ["grpo"]})
ROWS = [
    Row("read_responses", "path", NOT_A_FOLDER, "responses: got "),
    Row("read_responses", "path", ["no.jsonl"], "responses: got 'no.jsonl'; there is no such file"),
    Row("read_responses", "also", [*NOT_A_LIST]),
    Row("grade_responses", "table", NOT_A_TABLE),
    Row("grade_responses", "table", [TABLE], "table: got a table without prompt, question, ground_truth, response"),
    Row("grade_responses", "verify", [None, 3, "judge"]),
    Row("category_counts", "graded", [*NOT_A_TABLE, TABLE]),
    Row("draw_examples", "graded", [*NOT_A_TABLE, TABLE]),
    Row("draw_examples", "count", NOT_WHOLE),
    Row("draw_examples", "seed", NOT_WHOLE),
    Row("agreement", "rule", [*NOT_A_NUMBER, TABLE]),
    Row("agreement", "verdicts", [*NOT_A_NUMBER, TABLE]),
    Row("agreement", "verdicts", [pd.Series([True, True])], "rule, verdicts: got 1 and 2 rows"),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(tmp_path, monkeypatch, row):
    monkeypatch.chdir(tmp_path)
    check_refusal(GOOD, row)
    assert list(tmp_path.rglob("*")) == []
