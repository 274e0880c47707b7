"""The bench of graders: verdicts, agreement, files that are none, and the report; never how fast anything is."""

import importlib
import json
import math
import pkgutil

import pytest

from rlhelpers import cli, paths, tasks
from rlhelpers.bench import grader
from rlhelpers.bench.measure import Spread
from rlhelpers.bench.report import Report, conditions
from rlhelpers.tasks import grade


@pytest.mark.parametrize(
    ("response", "prompt", "verdict"),
    [
        ("3+2 </think> <answer> 5 </answer>", "r1_zero", (1, 1)),
        ("3+2 </think> <answer> 6 </answer>", "r1_zero", (1, 0)),
        ("</think> <answer> She has 5. </answer>", "r1_zero_three_shot", (1, 1)),  # ours pays no sentence
        ("3+2 = 5 </think> <answer></answer>", "r1_zero", (1, 0)),  # it sees what the box holds, and no more
        ("</think> <answer> 5 </answer> <answer>", "r1_zero", (1, 0)),
        ("</think>\n<answer> 5 </answer>", "r1_zero", (0, 0)),
        (r"\boxed{5}", "r1_zero", (0, 0)),
        (r"So \boxed{\dfrac{10}2}", "question_only", (1, 1)),  # read as LaTeX
        ("It is 5.", "question_only", (0, 0)),
    ],
)
def test_math_verify_judges_what_the_box_holds(response, prompt, verdict):
    assert grader.math_verify_verdict(response, "5", prompt) == verdict


def test_our_verdict_is_the_grade():
    assert grader.our_verdict("</think> <answer> 5 </answer>", "5", "r1_zero") == (1, 1)
    assert grader.our_verdict("</think> <answer> She has 5. </answer>", "5", "r1_zero") == (1, 0)


def test_every_cache_of_the_grader_is_emptied():
    """Else a later round would time a memory.  What is left is the process that computes, which is no memory."""
    modules = [
        importlib.import_module(f"{tasks.__name__}.{found.name}") for found in pkgutil.iter_modules(tasks.__path__)
    ]
    cached = {value for module in modules for value in vars(module).values() if hasattr(value, "cache_clear")}
    assert {value.__name__ for value in cached - set(grader.CACHES)} == {"_process_of"}
    assert set(grader.CACHES) <= cached


def test_invented_responses_are_of_several_kinds():
    table = grader.invented_responses(40)
    assert table.equals(grader.invented_responses(40))
    assert table.value_counts("prompt").to_dict() == dict.fromkeys(tasks.prompts.PROMPTS, 40)
    assert not any(grader.rewards_in(table))
    reasons = {grade(*row).reason for row in zip(table.response, table.ground_truth, table.prompt, strict=True)}
    assert {"right", "wrong value", "sentence in the box", "no </think>", r"no \boxed"} <= reasons


GRADES = [grade(f"</think> <answer>{box}</answer>", "5") for box in ("5", "6", "It is 5.")] + [grade("", "5")]


def test_agreement_of_verdicts_by_hand():
    assert grader.agreement(GRADES, [(1, 1), (1, 0), (1, 1), (0, 0)]) == {
        "responses": 4,
        "agrees": 0.75,
        "differences": 1,
        "in_format": 0,
        "in_answer": 1,
        "reasons": {"sentence in the box": 1},
    }
    other = grader.agreement(GRADES, [(0, 0), (1, 0), None, (1, 0)])
    assert other["responses"] == 3 and other["differences"] == 2 and other["agrees"] == pytest.approx(1 / 3)
    assert other["in_format"] == 2 and other["in_answer"] == 1
    assert other["reasons"] == {"right": 1, "empty response": 1}


def test_the_grader_report_from_numbers():
    names = ("a, r1_zero", "b, r1_zero")
    theirs = [(1, 1), (1, 0), (1, 1), (0, 0)]
    verdicts = {grader.MATH_VERIFY: theirs + theirs, grader.IN_THE_FILE: theirs + [None] * 4}
    measured = {
        names[0]: {grader.OURS: [10.0, 30.0, 20.0], grader.MATH_VERIFY: [1000.0, 900.0, 3000.0]},
        names[1]: {grader.OURS: [5.0, 6.0, 7.0], grader.MATH_VERIFY: [60.0, 60.0, 60.0]},
    }
    report = grader.report(
        conditions(), "mine.jsonl", {names[0]: range(4), names[1]: range(4, 8)}, GRADES + GRADES, verdicts, measured
    )
    assert report.settings == {"source": "mine.jsonl", "responses": 8, "rounds": 3}
    times = {(row["run, prompt"], row["grader"]): row for row in report.rows if "grader" in row}
    row = times[names[0], grader.MATH_VERIFY]
    assert row["ms_per_1,000"] == Spread(1000.0, 900.0, 3000.0)
    assert row["time_ratio"] == Spread(100.0, 30.0, 150.0)  # round by round
    assert times[names[0], grader.OURS]["time_ratio"].high == 1.0
    agree = {(row["verdict"], row["of"]): row for row in report.rows if "verdict" in row}
    assert agree[grader.IN_THE_FILE, names[1]]["agrees"] is None
    assert agree[grader.MATH_VERIFY, "all"]["differences"] == 2
    assert agree[grader.IN_THE_FILE, "all"]["responses"] == 4
    for part in ("source: mine.jsonl", "100 (30.0 to 150)", "0.750", "sentence in the box 2", "in one thread"):
        assert part in str(report)


@pytest.mark.parametrize("value", [0.5, "1", [1], math.nan])
def test_a_reward_in_the_file_that_is_none_is_refused(value):
    table = grader.invented_responses(1)
    table.at[1, "answer_reward"] = value
    with pytest.raises(ValueError, match=r"answer_reward: got .* in response 2; accepted is 0 or 1"):
        grader.rewards_in(table)


COURSE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Rewards:
    value: float

def r1_zero_reward_fn(response, ground_truth):
    return {"format_reward": 1.0, "answer_reward": Rewards(float(ground_truth in response)).value}

def question_only_reward_fn(response, ground_truth):
    return {"format_reward": 0.0, "answer_reward": 0.0}
"""


@pytest.fixture
def course(tmp_path):
    file = tmp_path / "their_grader.py"
    file.write_text(COURSE, encoding="utf-8")
    return file


def test_the_courses_functions_are_called_by_prompt(course):
    verdict = grader.load_course(course)
    assert verdict("5", "5", "r1_zero") == verdict("5", "5", "r1_zero_three_shot") == (1, 1)
    assert verdict("5", "5", "question_only") == (0, 0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.py", "def", "SyntaxError"),
        ("x.py", "import no_such_module", "no_such_module"),
        ("x.py", "raise SystemExit(3)", "SystemExit"),
        ("x.py", "r1_zero_reward_fn = print", "question_only_reward_fn"),
    ],
)
def test_a_course_file_that_is_none(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"course: got .*{name}'; .*{message}.*; accepted is a python file with"):
        grader.load_course(tmp_path / name)


def test_another_grader_that_fails_is_named():
    def raises(response, ground_truth, prompt):
        raise TypeError("no string")

    for broken, message in ((raises, "TypeError"), (lambda *_: (1.0, 0.5), ".*it gave"), (lambda *_: 1, "TypeError")):
        with pytest.raises(ValueError, match=rf"course: {message}.* for 'text' against '5'; accepted are the rewards"):
            grader.give_verdicts("course", broken, [("text", "5", "r1_zero")])


def test_bench_grader_measures_a_file(tmp_path, course, roots, capsys):
    row = {"prompt": "r1_zero", "question": "2+3?", "ground_truth": "5", "response": "</think> <answer>5</answer>"}
    rows = [
        row | {"format_reward": 1.0, "answer_reward": 1},
        row | {"response": "</think> <answer> It is 5. </answer>", "format_reward": 1, "answer_reward": 1},
        row | {"prompt": "question_only", "run": 3},
        row | {"prompt": "question_only", "run": None},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert cli.main(["bench", "grader", str(file), "--course", str(course)]) == 0
    assert str(paths.RUNS / "bench" / "grader.json") in capsys.readouterr().out
    report = Report.read(paths.RUNS / "bench" / "grader.json")
    assert report.settings["source"] == "mine.jsonl" and report.settings["responses"] == 4
    times = {(row["run, prompt"], row["grader"]) for row in report.rows if "grader" in row}
    groups = ("3, question_only", "mine, question_only", "mine, r1_zero")
    assert times == {(group, name) for group in groups for name in ("rlhelpers", "math-verify", "course")}
    found = {row["verdict"]: (row["responses"], row["differences"]) for row in report.rows if row.get("of") == "all"}
    assert found == {"math-verify": (4, 1), "course": (4, 1), "in the file": (2, 1)}
    assert report.settings["rounds"] == grader.ROUNDS and report.conditions["versions"]["math-verify"]


def test_bench_grader_without_a_file(monkeypatch, roots, capsys):
    few = grader.invented_responses(3)
    monkeypatch.setattr(grader, "invented_responses", lambda: few)
    assert cli.main(["bench", "grader"]) == 0
    assert "source: invented\nresponses: 9\n" in capsys.readouterr().out
    report = Report.read(paths.RUNS / "bench" / "grader.json")
    assert {row["verdict"] for row in report.rows if "verdict" in row} == {"math-verify"}


def test_bench_grader_says_what_is_wrong(tmp_path, roots, capsys):
    assert cli.main(["bench", "grader", str(tmp_path / "no.jsonl")]) == 2
    assert "responses: got" in capsys.readouterr().err
    assert cli.main(["bench", "grader", "--course", str(tmp_path / "no.py")]) == 2
    assert (
        "no.py'; FileNotFoundError(2, 'No such file or directory'); accepted is a python file with r1_zero_reward_fn"
        in capsys.readouterr().err
    )
