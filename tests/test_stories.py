"""The word problems made by rule: right, GSM8K-shaped, and cleanly split."""

import random
import re

from rlhelpers.tasks.gsm8k import final_answer
from rlhelpers.tiny.problems import OPERATIONS, STORIES, draw_problems, draw_solution, is_validation

SOLUTIONS = [draw_solution(random.Random(seed)) for seed in range(300)]


def test_every_sum_is_right_and_in_range():
    for solution in SOLUTIONS:
        for a, op, b, c in solution.sums:
            assert OPERATIONS[op](a, b) == c and 1 <= c <= 200
            assert op != "/" or a % b == 0


def test_every_number_of_the_chain_comes_from_the_question_or_an_earlier_sum():
    for solution in SOLUTIONS:
        known = {int(n) for n in re.findall(r"\d+", solution.question)}
        for a, _, b, c in solution.sums:
            assert {a, b} <= known
            known.add(c)


def test_rows_are_in_gsm8k_format():
    for solution in SOLUTIONS:
        row = solution.gsm8k_row()
        assert final_answer(row["answer"]) == solution.answer
        annotated = re.findall(r"(\d+)([-+*/])(\d+)=<<(\d+)\2(\d+)=(\d+)>>(\d+)", row["answer"])
        assert len(annotated) == len(solution.sums)
        assert all(a == a2 and b == b2 and c == c2 for a, _, b, a2, b2, c, c2 in annotated)


def test_one_to_three_steps_and_all_four_operations():
    assert {len(story.steps) for story in STORIES} == {1, 2, 3}
    assert {op for solution in SOLUTIONS for _, op, _, _ in solution.sums} == set("+-*/")


def test_the_split_is_by_content_and_contents_are_distinct():
    train = draw_problems(random.Random(0), 400, validation=False)
    validation = draw_problems(random.Random(0), 100, validation=True)
    contents = [p.content for p in train + validation]
    assert len(set(contents)) == 500
    assert not any(is_validation(p.content) for p in train) and all(is_validation(p.content) for p in validation)


def test_the_same_seed_gives_the_same_problems():
    assert draw_problems(random.Random(3), 50, False) == draw_problems(random.Random(3), 50, False)
