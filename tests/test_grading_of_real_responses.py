"""The grader on responses as models write them: 7,914 real ones, where they are at hand, and invented ones.

The real ones are by OLMo-2-0425-1B, with the verdicts of the grader that the course hands out and, for some of them,
a person's.  The two graders differ where the course's is plainly wrong, and nowhere else: DIFFERENCES lists each case.
"""

import gzip
import json
import math
from pathlib import Path

import pytest

from rlhelpers.evidence.responses import agreement, grade_responses, read_responses
from rlhelpers.tasks import grade
from rlhelpers.tasks.grading import REASONS

REAL = Path(__file__).parents[2] / "shared/data/olmo2_rollouts/rollouts.jsonl.gz"
INVENTED = Path(__file__).parent / "data/responses.jsonl"
needs_real = pytest.mark.skipif(not REAL.exists(), reason="the responses of OLMo-2-1B are not at hand")

A_UNIT = "it holds the right number and, in at most three words, what is counted; the course's grader knows few units"
TAIL = "what follows </answer> is no part of the answer; the course's grader takes it for one and rejects it"
NO_BRACE = r"the last `\boxed` has no brace, so it is no box; the course's grader sees none in the response then"
BRACKET = "a stray bracket after the right number is no part of it"

DIFFERENCES = {  # line -> (our format, our answer, our reason, why the course's grader is wrong there)
    1696: (1, 1, "right", A_UNIT),  # 15 pupils like yellow.
    1945: (1, 1, "right", f"{A_UNIT}; and {TAIL}"),  # 160 flowers have bloomed.
    2063: (1, 1, "right", TAIL),  # 8
    3722: (1, 1, "right", TAIL),  # $2.00
    4184: (1, 0, "wrong value", NO_BRACE),  # 0.583, where 33 is right
    4805: (1, 0, "empty box", NO_BRACE),
    5710: (1, 1, "right", A_UNIT),  # 6 pints.
    7072: (1, 1, "right", A_UNIT),  # 5 books each
    7647: (1, 1, "right", BRACKET),  # 15 ]
    7665: (1, 1, "right", A_UNIT),  # 300 tons
    7709: (1, 1, "right", BRACKET),  # -3 ]
}

# Lines that are paid although their boxes do not agree.  The last is right for 1696, which writes down three steps of
# its way; 3219 goes on to another problem and 4728 lists numbers, and a person calls them wrong: paid by luck.
PAID_THOUGH_BOXES_DISAGREE = [1696, 3219, 4728]


@pytest.fixture(scope="module")
def real():
    """line -> (the row, our grade)"""
    with gzip.open(REAL, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    assert len(rows) == 7914
    return {n: (row, grade(row["response"], row["ground_truth"], row["prompt"])) for n, row in enumerate(rows, start=1)}


@needs_real
def test_the_differences_from_the_course_are_those_listed(real):
    found = {
        line: (graded.format, graded.answer, graded.reason)
        for line, (row, graded) in real.items()
        if (graded.format, graded.answer) != (row["format_reward"], row["answer_reward"])
    }
    assert found == {line: tuple(verdict) for line, (*verdict, _) in DIFFERENCES.items()}


@needs_real
def test_no_person_disagrees_with_a_difference(real):
    """Where we pay and the course's grader does not, and a person has looked: the response is right."""
    looked_at = [real[line][0]["human"]["verdict"] for line in DIFFERENCES if "human" in real[line][0]]
    assert looked_at == ["correct"] * 5


@needs_real
def test_what_is_paid_by_luck_is_counted(real):
    paid = [line for line, (_, graded) in real.items() if graded.answer and not graded.boxes_agree]
    assert paid == PAID_THOUGH_BOXES_DISAGREE


@needs_real
def test_every_grade_is_of_a_piece(real):
    for row, graded in real.values():
        assert graded.reason in REASONS
        assert graded.answer == (graded.reason == "right") <= graded.format
        assert graded.extracted is None or graded.extracted in row["response"]


@pytest.mark.slow
@needs_real
def test_the_second_opinion_against_a_person():
    """Measured: precision 59/60, recall 59/61.  The one false yes lists boxes, of which the last is right by chance."""
    table = grade_responses(read_responses(REAL))
    verdicts = table.human.map({"correct": True, "incorrect": False})
    measured = agreement(table.in_substance, verdicts)
    assert (measured["judged"], measured["right"]) == (92, 61)
    assert math.floor(100 * measured["precision"]) >= 98
    assert math.floor(100 * measured["recall"]) >= 96
    reward = agreement(table.reward == 1, verdicts)  # the grader itself asks for the form, so it finds fewer
    assert reward["recall"] < measured["recall"]


with INVENTED.open(encoding="utf-8") as lines:
    ROWS = [json.loads(line) for line in lines]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["reason"])
def test_an_invented_response(row):
    graded = grade(row["response"], row["ground_truth"], row["prompt"])
    assert (graded.format, graded.answer, graded.reason) == (row["format"], row["answer"], row["reason"])


def test_the_invented_responses_are_of_all_kinds():
    assert len(ROWS) >= 40
    assert {row["reason"] for row in ROWS} == set(REASONS) - {"timed out"}
