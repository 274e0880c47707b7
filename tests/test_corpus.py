"""The base model's reading: no validation content, every format, wrong sums at the stated rate."""

import random
import re

from rlhelpers.tiny import corpus
from rlhelpers.tiny.problems import draw_solution

DOCUMENTS = [corpus.draw_document(random.Random(seed)) for seed in range(2000)]


def test_no_document_holds_a_validation_problem(monkeypatch):
    """Every problem of a document is drawn in one place, which turns validation contents away."""
    drawn = []
    monkeypatch.setattr(corpus, "draw_solution", lambda rng: drawn.append(draw_solution(rng)) or drawn[-1])
    documents = "\n".join(corpus.draw_document(random.Random(seed)) for seed in range(300))
    turned_away = [s for s in drawn if corpus.is_validation(s.content)]
    used = {s.question for s in drawn if not corpus.is_validation(s.content)}
    assert len(turned_away) > 50
    assert not any(s.question in documents for s in turned_away if s.question not in used)
    assert sum(question in documents for question in used) > 300


def test_every_ending_and_every_style_occurs():
    text = "\n".join(DOCUMENTS)
    for piece in (
        "</think> <answer> ",
        "</think>\n<answer> ",
        "<answer> The answer is ",
        "</think> \\boxed{",
        "Please put your final answer within \\boxed{}. ",
        "Question: ",
        "Solution: ",
        "Leah had 32 chocolates",
    ):
        assert piece in text


def test_wrong_sums_come_at_the_stated_rate_and_carry_through():
    rng, wrong = random.Random(0), 0
    for _ in range(2000):
        solution = draw_solution(rng)
        text, answer = corpus.reason(rng, solution)
        assert text.endswith(f"So the answer is {answer}.")
        sums = re.findall(r"(\d+)([-+*/])(\d+)=(-?\d+)", text)
        mistakes = sum(corpus.OPERATIONS[op](int(a), int(b)) != int(c) for a, op, b, c in sums)
        wrong += answer != solution.answer
        assert mistakes <= 1
    assert abs(wrong / 2000 - corpus.WRONG_SUM_RATE) < 0.04


def test_examples_keep_the_format_far_more_often_than_none():
    def share_with_tags(endings):
        return endings["tags"] / sum(endings.values())

    assert share_with_tags(corpus.FAITHFUL_ENDINGS) > 2 * share_with_tags(corpus.LOOSE_ENDINGS)
