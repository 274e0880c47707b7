"""Why a response earned nothing, and whether it is right in substance."""

import random
import re
from fractions import Fraction

import pytest

from rlhelpers.tasks.diagnosis import REASONS, diagnose, is_right_in_substance, last_number, own_turn
from rlhelpers.tasks.prompts import PROMPTS

BOX = "2+3=5 </think> <answer>{}</answer>"


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        (" 5 ", "right"),
        ("$5.00", "right"),
        ("6", "wrong number"),
        (" $1,800.50. ", "wrong number"),
        ("-5", "wrong number"),
        ("6%", "wrong number"),
        ("3/4", "wrong number"),
        ("5 eggs", "unit in the box"),
        ("$5 per month", "unit in the box"),
        (r"5 \text{ eggs}", "unit in the box"),
        ("She has 5.", "sentence in the box"),
        ("5 eggs, because she ate 3", "sentence in the box"),
        ("5 eggs and 3 hens", "sentence in the box"),
        ("2+3=5", "more than a number in the box"),
        (r"\frac{10}{3}", "more than a number in the box"),
        ("five", "no number in the box"),
        ("", "empty box"),
        (" \n", "empty box"),
    ],
)
def test_a_box_that_is_there(box, reason):
    assert diagnose(BOX.format(box), "r1_zero", "5") == reason
    assert diagnose(rf"2+3=5 \boxed{{{box}}}", "question_only", "5") == reason


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("", "empty response"),
        (" \n", "empty response"),
        ("5", "no </think>"),
        ("5 <answer> 5 </answer>", "no </think>"),
        ("5 </ think> <answer> 5 </answer>", "no </think>"),
        ("5 </think> 5", "no <answer>"),
        (r"5 </think> \boxed{5}", "no <answer>"),
        ("<answer> 5 </answer> </think>", "answer before </think>"),
        ("5 </think>\n<answer> 5 </answer>", "newline between tags"),
        ("5 </think> \n\n <answer> 5 </answer>", "newline between tags"),
        ("5 </think><answer> 5 </answer>", "no single space between tags"),
        ("5 </think>  <answer> 5 </answer>", "no single space between tags"),
        ("5 </think>\nso <answer> 5 </answer>", "text between tags"),
        ("5 </think> <answer> 5", "no </answer>"),
        ("</answer> 5 </think> <answer> 5", "no </answer>"),
        ("a </think> <answer> 4 </answer> b </think> <answer> 5", "box not closed"),
    ],
)
def test_broken_tags(response, reason):
    for prompt in ("r1_zero", "r1_zero_three_shot"):
        assert diagnose(response, prompt, "5") == reason


@pytest.mark.parametrize(
    ("response", "reason"),
    [("", "empty response"), ("So 5.", r"no \boxed"), (r"\boxed{5", "box not closed"), (r"\fbox{5}", r"no \boxed")],
)
def test_no_box(response, reason):
    assert diagnose(response, "question_only", "5") == reason


def test_every_response_has_one_reason_of_the_set_and_only_the_rewarded_are_right():
    pieces = ["</think>", "<answer>", "</answer>", " ", "\n", "5", "7 eggs", "so", r"\boxed{", "}", "5.", "\nUser: 5?"]
    rng, seen = random.Random(0), set()
    for _ in range(4000):
        response = "".join(rng.choices(pieces, k=rng.randrange(9)))
        for name, prompt in PROMPTS.items():
            reason = diagnose(response, name, "5")
            grade = prompt.reward_fn(lambda answer, truth: answer.strip(" .") == truth)(response, "5")
            by_task = diagnose(response, name, "5", lambda answer, truth: answer.strip(" .") == truth)
            assert (by_task == "right") == (grade["reward"] == 1)
            seen.add(reason)
    assert seen <= set(REASONS)
    assert len(seen) > 10


def test_the_tasks_own_verdict_counts():
    assert diagnose(BOX.format("6"), "r1_zero", "5", lambda answer, truth: True) == "right"
    assert diagnose(BOX.format("5"), "r1_zero", "5", lambda answer, truth: False) == "wrong number"


def test_bad_arguments():
    with pytest.raises(ValueError, match="prompt: got 'r2_zero'"):
        diagnose("5", "r2_zero", "5")
    with pytest.raises(ValueError, match="ground_truth: got ''"):
        diagnose(BOX.format("5"), "r1_zero", "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("eighteen", None),
        ("It is 18.", 18),
        ("18 eggs, then 17", 17),
        ("It costs $1,800.50, I think", Fraction("1800.5")),
        ("That is 1,000,000.", 10**6),
        ("in 1,2345", 2345),
        ("It is -3 degrees", -3),
        ("8-5", 5),
        ("(8)-5", 5),
        ("-$5", -5),
        ("half: 3/4 cups", Fraction(3, 4)),
        ("1/0", 0),
        ("about .5", Fraction(1, 2)),
        ("2x</answer>", 2),
        ("٣", None),
        ("12 and " + "9" * 5000, 12),
    ],
)
def test_last_number(text, value):
    assert last_number(text) == value


def test_in_substance_looks_past_form_and_stops_at_an_invented_turn():
    assert is_right_in_substance("So the answer is 18.", "18")
    assert is_right_in_substance(" 18 </think>\n<answer> She makes $18.00 a day. </answer>", "18")
    assert is_right_in_substance("18 </answer>\nUser: And 3 more?\nAssistant: 21", "18")
    assert not is_right_in_substance("17 </answer>\nUser: And 1 more?\nAssistant: 18", "18")
    assert not is_right_in_substance("118", "18")
    assert not is_right_in_substance("18 eggs minus 3 makes 15", "18")
    assert is_right_in_substance("1800", " 1,800 ")
    assert not is_right_in_substance("Yes", "Yes")
    assert not is_right_in_substance("", "Yes")


def test_own_turn():
    assert own_turn("a\nb") == "a\nb"
    assert own_turn("a\nUser: b\nUser: c") == "a"
    assert own_turn("the User: a") == "the User: a"


def test_a_long_response_is_no_bomb():
    for piece in ("</think>", "<answer>", "1,", "1.", "-", "1/", r"\boxed{", " "):
        for prompt in PROMPTS:
            response = piece * 20_000
            assert re.fullmatch("|".join(map(re.escape, REASONS)), diagnose(response, prompt, "5"))
            is_right_in_substance(response, "5")
