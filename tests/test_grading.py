"""What an answer is worth against the ground truth, what a response earns, and why."""

import inspect
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from bad_input import NOT_A_FUNCTION, NOT_A_NAME, NOT_POSITIVE, NOT_TEXT, SOMETHING_ELSE, Row, check_refusal, name_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhelpers import paths
from rlhelpers.kernels import compute_rollout_rewards
from rlhelpers.tasks import Grader, algebra, get_prompt, grade, grading, question_only_reward_fn, r1_zero_reward_fn
from rlhelpers.tasks.answers import MAX_CHARS, find_boxes
from rlhelpers.tasks.grading import (
    REASONS,
    Grade,
    is_formula,
    is_right,
    own_turn,
    probably_right,
    read_truth,
    verify_answer,
)
from rlhelpers.tasks.gsm8k import final_answer
from rlhelpers.tasks.prompts import PROMPTS
from rlhelpers.training.evaluation import reason_counts

REPORTS = Path(__file__).parents[2] / "shared/cases/field_reports.jsonl"
RESPONSE = "18 </think> <answer> 18 </answer>"


EQUAL = [
    ("18", "18"),
    (" 18. ", "18"),
    ("$18", "18"),
    ("18 dollars", "18"),
    ("18.00", "18"),
    ("1,800", "1800"),
    ("1800", "1,800"),
    ("1 800", "1800"),
    ("-3", "-3"),
    ("1/2", "0.5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac12", "1/2"),
    ("2 1/2", "2.5"),
    ("4/6", "2/3"),
    ("x = 18", "18"),
    (r"\boxed{18}.", "18"),
    ("18%", "18"),
    ("\u22123", "-3"),
    ("１８", "18"),
    ("5 m", "5 m"),
    # Where the ground truth is a formula, sympy compares.
    (r"2\sqrt{2}", r"\sqrt{8}"),
    ("sqrt(8)", r"2\sqrt{2}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    ("3*pi/4", r"\frac{3\pi}{4}"),
    ("e^2-1", "e^{2}-1"),
    ("0.5x", r"\frac{x}{2}"),
    ("-y + 5x", "5x-y"),
    (r"\frac{3a}{b}", "3a/b"),
    ("(x+1)^2", "x^2 + 2x + 1"),
    ("y = 2x + 1", "1 + 2x"),
    ("2, 7, 5", "2,5,7"),
    ("[0,1)", "[0, 1)"),
    (r"(-\infty,-\frac 12)\cup(-\frac 12,\infty)", r"(-\infty,-\frac{1}{2})\cup(-\frac{1}{2},\infty)"),
    # What is neither has to repeat it: a word in any case, a letter in its own.
    ("yes", "Yes"),
    (r"\text{Monday}", "Monday"),
    ("(C)", "C"),
    ("3x + 4y = 0", "3x + 4y = 0"),
    (r"m \ge \sqrt{2}", r"m \ge \sqrt{2}"),
    ("5!", "5!"),
    ("12:30", "12:30"),
]

NOT_EQUAL = [
    ("17", "18", "wrong value"),
    ("-18", "18", "wrong value"),
    ("181", "18", "wrong value"),
    ("31/4", "3 1/4", "wrong value"),
    ("5 m", "5 s", "wrong value"),
    ("18 eggs", "18 hens", "wrong value"),
    ("18%", "0.18", "wrong value"),
    ("0.333", "1/3", "wrong value"),
    ("18", "Monday", "wrong value"),
    ("5", r"\sqrt{24}", "wrong value"),
    ("5", "5xy", "wrong value"),  # the letters are factors, no unit
    ("5", "5x-y", "wrong value"),
    ("3", "3a/b", "wrong value"),
    ("", "18", "empty box"),
    ("  \n", "18", "empty box"),
    ("{}", "18", "empty box"),
    ("$$", "18", "empty box"),
    (r"\text{ }", "18", "empty box"),
    ("eighteen", "18", "no number in the box"),
    ("nan", "5", "no number in the box"),
    ("Infinity", "5", "no number in the box"),
    ("Tuesday", "Monday", "no number in the box"),
    ("?", "18", "no number in the box"),
    ("Tom has 18", "18", "sentence in the box"),
    ("18 and a half", "18", "sentence in the box"),
    ("18 eggs, because she ate 3", "18", "sentence in the box"),
    ("She has 18 eggs. " * 20, "18", "sentence in the box"),
    ("18 or 19", "18", "several answers"),
    ("1,2", "12", "several answers"),
    ("7,00,00", "70000", "several answers"),
    ("17 and 18", "18", "several answers"),
    ("18 (or 19)", "18", "several answers"),
    ("(18, 19)", "18", "several answers"),
    (r"\pm 18", "18", "several answers"),
    ("84 - 63 = 21", "21", "equation in the box"),
    ("3=18", "18", "equation in the box"),
    ("x > 18", "18", "equation in the box"),
    ("12 + 12", "24", "not computed"),
    ("2^{10}", "1024", "not computed"),
    (r"\sqrt{16}", "4", "not computed"),
    ("5x", "5", "not computed"),
    ("1e3", "1000", "not computed"),
    ("12+", "12", "unfinished formula"),
    ("18,", "18", "unfinished formula"),
    ("(18", "18", "unfinished formula"),
    (r"\frac1", "1", "unfinished formula"),
    ("18!", "18", "unreadable"),
    ("18\x00", "18", "unreadable"),
    ("1_000", "1000", "unreadable"),
    ("12:30", "2:30", "unreadable"),
    ("1" * 5000, "7", "too long"),
    ("(a)", "(c)", "wrong value"),
    ("A", "a", "wrong value"),
    ("2x + 1", "3x + 1", "wrong value"),
    ("y = 2x + 1", "y = 3x + 1", "wrong value"),
    ("2, 5, 7", "1, 5, 7", "wrong value"),
    ("[0,1]", "[0,1)", "wrong value"),
    (r"\frac{1}{2^{90}}", r"\frac{1}{2^{91}}", "wrong value"),  # both nearly 0
    ("0.333333333333333x", r"\frac{x}{3}", "wrong value"),
    ("3x+4y+14=0", "3x-y+13=0", "equation in the box"),  # no equation is reduced to its last number
    ("4! + 96", "5!", "unreadable"),
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_equal(answer, truth):
    assert verify_answer(answer, truth) == "right"
    assert is_right(answer, truth) is True


@pytest.mark.parametrize(("answer", "truth", "reason"), NOT_EQUAL)
def test_not_equal(answer, truth, reason):
    assert verify_answer(answer, truth) == reason
    assert is_right(answer, truth) is False


def test_sympy_is_asked_about_formulas_only(monkeypatch):
    """A number needs no backend, so none can fail on it; whatever a backend finds is a reason."""
    monkeypatch.setattr(algebra, "compare", lambda *_: pytest.fail("nobody should ask"))
    assert verify_answer(r"7.41\%", r"7.41\%") == "right"
    assert verify_answer(r"\sqrt{2}", r"\sqrt{2}") == "right"  # the same text
    assert verify_answer(r"\sqrt{2}", "2") == "not computed"
    assert verify_answer("2", "Monday") == "wrong value"
    for backend, reason in ((algebra.UNREADABLE, "unreadable"), (algebra.TIMED_OUT, "timed out")):
        monkeypatch.setattr(algebra, "compare", lambda *_, backend=backend: backend)
        assert verify_answer(r"\sqrt{2}", r"\sqrt{3}") == reason


def test_a_time_limit_reaches_sympy():
    assert verify_answer(r"\sin(\sin(x))", "x+1", 0.001) == "timed out"
    assert verify_answer(r"\sin(\sin(x))", "x+1", 60) == "wrong value"


@pytest.mark.parametrize(
    "bomb",
    [
        *("99999999999!", "9**9**9**9", "3**40**5", "9^{9^{9}}", "9^{9^9}", "(9^9)^9", "9^{99999999}", "x^{99}"),
        *("1" * 5000, "9" * 16, "0." + "1" * 16, "(" * 5 + "1" + ")" * 5, "((a+1)(a+2)(a+3)(a+4)(a+5))^{9}"),
        *("(x+1)^{9999}", "(a+b)(c+d)", r"\binom{99999999}{9999999}", r"\Gamma(9999)", r"\int_0^1 x^{x^x} dx"),
        *(r"\sum_{n=1}^{99999999} n", r"\sqrt" * 30, r"\frac" * 30, "x" * 100_000, "2 3x", r"\sqrt{2} 3"),
        *('open("pwned","w")', '__import__("os")', "exit()", "().__class__", "x\nimport os", "x;y", "[x for x in y]"),
    ],
)
def test_what_sympy_never_sees(bomb):
    assert not is_formula(bomb)
    assert not is_right(bomb, "x+1")


@pytest.mark.parametrize("text", ["x+1", r"\frac{x}{2}", "2^{10}", r"-\sqrt{2}", "(0, 1]", "pi/2", r"\sin(2x)", "e^2"])
def test_what_sympy_may_see(text):
    assert is_formula(text)


@pytest.mark.parametrize("truth", ["18", " 1,800 ", "-3/4", "18%", "Monday", r"\sqrt{2}", "x = 3", "A", "9" * 200, "é"])
def test_ground_truths(truth):
    assert verify_answer(truth, truth) == "right"


NUMBERS = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.integers(-999, 999).map("{:,}.50 eggs".format),
    st.fractions(-99, 99, max_denominator=9).map(str),
)


@given(NUMBERS, NUMBERS)
def test_two_numbers_may_change_places(one, other):
    assert verify_answer(one, other) == verify_answer(other, one)
    assert verify_answer(one, one) == "right"


@given(
    st.text(st.sampled_from(r"0123456789.,/-+*^=$%{}()[]\ fracsqtxy") | st.characters(), max_size=250),
    st.sampled_from(["18", "1/2", "Monday", "3x = 2"]),
)
@settings(max_examples=500, deadline=None)
def test_verify_raises_for_no_answer(answer, truth):
    assert verify_answer(answer, truth) in REASONS


@given(
    st.lists(st.sampled_from([*"0123456789.,/-+*^{}()[] xye", r"\frac", r"\sqrt", r"\pi "]), max_size=12).map("".join),
    st.sampled_from([r"\sqrt{2}", "x+1", "(0,1)"]),
)
@settings(max_examples=100, deadline=None)
def test_verify_raises_for_no_formula(answer, truth):
    assert verify_answer(answer, truth, 0.5) in REASONS


def test_the_table_in_the_readme():
    """Ground truth, what is right, what is not: every spelling in backticks."""
    section = (paths.ROOT / "README.md").read_text(encoding="utf-8").partition("## What counts as right")[2]
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    assert len(lines) > 10
    for line in lines:
        truth, right, wrong = (re.findall("`(.+?)`", cell) for cell in line.split("|")[1:-1])
        assert len(truth) == 1 and right and wrong
        assert {answer: verify_answer(answer, *truth) for answer in right} == dict.fromkeys(right, "right")
        assert not [answer for answer in wrong if verify_answer(answer, *truth) == "right"]


def test_signs_of_operations_part_two_numbers():
    assert verify_answer(r"3\cdot 6", "18") == "not computed"
    assert verify_answer(r"3^x\cdot 2", r"2\times 3^x") == "right"
    assert verify_answer(r"x\div 2", r"\frac{x}{2}") == "right"
    assert verify_answer(r"3 \times", "18") == "unfinished formula"


UNREADABLE_TRUTHS = [
    *("", "  ", "\n", "$", "$$", "()", "{}", r"\text{ }", "...", "####", "_", r"\boxed{", "18}", "9" * 201),
    *("18\x00", "\x0crac12", "\tfrac12", "7\x0crac12", "1\n8", "18\x7f", "18\ud800", "?", "a" * 300, "{18", "1\x0c8"),
    *(18, 18.0, float("nan"), b"18", ["18"], {"18": 1}, None),
]


@pytest.mark.parametrize("truth", UNREADABLE_TRUTHS)
def test_an_unreadable_truth_is_an_error(truth):
    """Whatever the answer or the response: it must not stay unseen."""
    for function in (verify_answer, is_right, lambda _, truth: read_truth(truth), probably_right):
        with pytest.raises(ValueError, match=r"ground_truth: got .*; accepted is an answer of 1 to 200 characters"):
            function("18", truth)
    for reward_fn in (r1_zero_reward_fn, question_only_reward_fn, grade):
        for response in ("", "5", " </think> <answer>5</answer>", r"\boxed{5}", r"\boxed{"):
            with pytest.raises(ValueError, match="ground_truth: got"):
                reward_fn(response, truth)


GRADED = {"response": RESPONSE, "ground_truth": "18"}
GOOD = {
    "verify_answer": (verify_answer, {"answer": "18", "ground_truth": "18", "time_limit": 1.0}),
    "grade": (grade, {**GRADED, "prompt": "r1_zero"}),
    "r1_zero_reward_fn": (r1_zero_reward_fn, GRADED),
    "question_only_reward_fn": (question_only_reward_fn, GRADED),
    "probably_right": (probably_right, GRADED),
    "Grader": (Grader, {"prompt": get_prompt("r1_zero"), "verify": verify_answer}),
}
ROWS = [
    Row("verify_answer", "answer", NOT_TEXT),
    Row("verify_answer", "time_limit", NOT_POSITIVE),
    Row("grade", "response", NOT_TEXT),
    Row("grade", "prompt", NOT_A_NAME, "; accepted are r1_zero, "),
    Row("r1_zero_reward_fn", "response", NOT_TEXT),
    Row("question_only_reward_fn", "response", NOT_TEXT),
    Row("probably_right", "response", NOT_TEXT),
    Row("Grader", "prompt", [*SOMETHING_ELSE, "r1_zero"]),
    Row("Grader", "verify", NOT_A_FUNCTION),
    *(Row(name, "ground_truth", UNREADABLE_TRUTHS) for name in list(GOOD)[:5]),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(row):
    check_refusal(GOOD, row)


@pytest.mark.parametrize("value", [None, 18, b"18", ["18"]])
def test_the_type_of_what_is_no_text_is_named(value):
    named = rf"got .*, a {type(value).__name__}; accepted is a text"
    with pytest.raises(ValueError, match=f"answer: {named}"):
        verify_answer(value, "18")
    for function in (r1_zero_reward_fn, question_only_reward_fn, grade, probably_right):
        with pytest.raises(ValueError, match=f"response: {named}"):
            function(value, "5")


def test_an_unknown_prompt_is_an_error():
    with pytest.raises(ValueError, match="prompt: got 'r2_zero'; accepted are r1_zero"):
        grade("5", "5", "r2_zero")
    with pytest.raises(ValueError, match="prompt: got 'r1_zero'; accepted is a Prompt"):
        Grader("r1_zero")


# What stands in the box -> the reason, for the ground truth 5.
BOXES = {
    " 5 ": "right",
    "$5.00": "right",
    "5 eggs": "right",
    "$5 per month": "right",
    r"5 \text{ eggs}": "right",
    "6": "wrong value",
    " $1,800.50. ": "wrong value",
    "-5": "wrong value",
    "6%": "wrong value",
    "3/4": "wrong value",
    r"\frac{10}{3}": "wrong value",
    "She has 5.": "sentence in the box",
    "5 eggs, because she ate 3": "sentence in the box",
    "5 eggs and 3 hens": "sentence in the box",
    "2+3=5": "equation in the box",
    "2+3": "not computed",
    "5 or 6": "several answers",
    "five": "no number in the box",
    "2+": "unfinished formula",
    "5:00": "unreadable",
    "5" * 201: "too long",
    "": "empty box",
    " \n": "empty box",
}

# A response to an r1 prompt -> the reason.
TAGS = {
    "": "empty response",
    " \n": "empty response",
    "5": "no </think>",
    "5 <answer> 5 </answer>": "no </think>",
    "5 </ think> <answer> 5 </answer>": "no </think>",
    "5 </think> 5": "no <answer>",
    r"5 </think> \boxed{5}": "no <answer>",
    "5 </think> <Answer> 5 </Answer>": "no <answer>",
    "<answer> 5 </answer> </think>": "answer before </think>",
    "5 </think>\n<answer> 5 </answer>": "newline between tags",
    "5 </think> \n\n <answer> 5 </answer>": "newline between tags",
    "5 </think><answer> 5 </answer>": "no single space between tags",
    "5 </think>  <answer> 5 </answer>": "no single space between tags",
    "5 </think>\t<answer> 5 </answer>": "no single space between tags",
    "5 </think>\nso <answer> 5 </answer>": "text between tags",
    "5 </think> <answer> 5": "no </answer>",
    "</answer> 5 </think> <answer> 5": "no </answer>",
    "a </think> <answer> 5 </answer> b </think> <answer> 5": "box not closed",
}

# A response to question_only -> the reason.
NO_BOX = {
    "": "empty response",
    "So 5.": r"no \boxed",
    r"\fbox{5}": r"no \boxed",
    r"\boxed 5": r"no \boxed",
    r"\boxed{5": "box not closed",
    r"\boxed{5} or \boxed{5": "box not closed",
}


@pytest.mark.parametrize(("box", "reason"), BOXES.items())
def test_a_box_that_is_there(box, reason):
    right = float(reason == "right")
    for prompt, form in (("r1_zero", "2+3=5 </think> <answer>{}</answer>"), ("question_only", r"2+3=5 \boxed{{{}}}")):
        graded = grade(form.format(box), "5", prompt)
        assert graded == Grade(1.0, right, box, reason, boxes=1, boxes_agree=True)
        assert graded.rewards == {"format_reward": 1.0, "answer_reward": right, "reward": right}


@pytest.mark.parametrize(("response", "reason"), TAGS.items())
def test_broken_tags(response, reason):
    for prompt in ("r1_zero", "r1_zero_three_shot"):
        graded = grade(response, "5", prompt)
        assert (graded.reason, graded.answer) == (reason, 0.0)
        assert graded.format == (reason == "box not closed")  # an earlier answer has the format


@pytest.mark.parametrize(("response", "reason"), NO_BOX.items())
def test_no_box(response, reason):
    graded = grade(response, "5", "question_only")
    assert (graded.format, graded.answer, graded.extracted, graded.reason) == (0.0, 0.0, None, reason)


def test_every_reason_is_reached_by_an_example():
    hurried = Grader(get_prompt("r1_zero"), partial(verify_answer, time_limit=0.001))
    timed_out = hurried.grade(r"so </think> <answer>\sin(\sin(x))</answer>", "x+1")
    assert (timed_out.format, timed_out.answer, timed_out.reason) == (1.0, 0.0, "timed out")
    assert {*BOXES.values(), *TAGS.values(), *NO_BOX.values(), timed_out.reason} == set(REASONS)


@pytest.mark.parametrize(
    ("response", "format_reward", "reward"),
    [
        (" 2+2=4 </think> <answer> 4 </answer>", 1, 1),
        ("<think> 2+2=4 </think> <answer> 4 </answer>", 1, 1),
        ("line\nline\n</think> <answer>4</answer>", 1, 1),
        (" </think> <answer> 5 </answer>", 1, 0),
        (" </think>\n<answer> 4 </answer>", 0, 0),
        (" 4 <answer> 4 </answer>", 0, 0),
        (" </think> <answer> 4", 0, 0),
        ("</answer></think> <answer>4", 0, 0),
        (" </think> <answer> 4 </answer><|endoftext|>", 1, 1),
        (" </think> <answer> 4 </answer>\nUser: And 2 more?\nAssistant: 6", 1, 1),
        (" </think> <answer> 5 </answer> </think> <answer> 4 </answer>", 1, 1),
        (" </think> <answer> 4 </answer> </think> <answer> 5 </answer>", 1, 0),
        (" </think> <answer> 4 </answer> </think> <answer> 4", 1, 0),
        (" </think> <answer> The answer is 4. </answer>", 1, 0),
        (r"4 \boxed{4}", 0, 0),
        ("", 0, 0),
    ],
)
def test_r1_zero_reward(response, format_reward, reward):
    expected = {"format_reward": format_reward, "answer_reward": reward, "reward": reward}
    assert r1_zero_reward_fn(response, "4") == expected
    assert Grader(get_prompt("r1_zero_three_shot"))(response, "4") == expected


@pytest.mark.parametrize(
    ("response", "format_reward", "reward"),
    [
        (r"so \boxed{8}.", 1, 1),
        (r"so \boxed{8}.<|endoftext|>", 1, 1),
        (r"\boxed{3} so \boxed{8}", 1, 1),
        (r"\boxed{8} hmm \boxed{3}", 1, 0),
        (r"\boxed{8} and \boxed{", 0, 0),
        (r"\boxed{\frac{16}{2}}", 1, 1),
        (r"\boxed{}", 1, 0),
        ("The answer is 8.", 0, 0),
        ("so </think> <answer>8</answer>", 0, 0),
    ],
)
def test_question_only_reward(response, format_reward, reward):
    expected = {"format_reward": format_reward, "answer_reward": reward, "reward": reward}
    assert question_only_reward_fn(response, "8") == expected


@pytest.mark.parametrize(
    ("boxes", "agree"),
    [
        (["5"], True),
        (["5", "5"], True),
        (["5.00", "$5", " 5 eggs"], True),
        (["1/2", "0.5"], True),
        (["yes", r"\text{yes}"], True),
        (["4", "5"], False),
        (["5", "4", "5"], False),
        (["5 eggs", "5 hens"], False),
        (["2+3", "5"], False),  # nothing is computed here
        (["", "5"], False),
        (["5" * 300, "5" * 301], True),  # as far as they are looked at
    ],
)
def test_how_many_boxes_and_whether_they_agree(boxes, agree):
    tags = "".join(f" </think> <answer>{box}</answer>" for box in boxes)
    for graded in (
        grade(tags, "5"),
        grade(" and ".join(rf"\boxed{{{box}}}" for box in boxes), "5", "question_only"),
        grade("<answer>".join(f"{box}</answer>" for box in ["", *boxes]), "5"),  # also without the format
    ):
        assert (graded.boxes, graded.boxes_agree, graded.extracted) == (len(boxes), agree, boxes[-1])


def test_an_unclosed_box_is_counted_and_agrees_with_all():
    graded = grade(" </think> <answer>4</answer> <answer>5", "5")
    assert (graded.boxes, graded.boxes_agree, graded.extracted) == (2, True, None)
    graded = grade("nothing", "5")
    assert (graded.boxes, graded.boxes_agree, graded.extracted) == (0, True, None)


def test_the_tasks_own_verifier_decides():
    response = " </think> <answer>6</answer>"
    asked = []

    def verify(answer, truth):
        asked.append((answer, truth))
        return "right"

    assert Grader(get_prompt("r1_zero"), verify).grade(response, "5").reason == "right"
    assert Grader(get_prompt("r1_zero"), verify)("<answer>6</answer>", "5")["reward"] == 0  # without the format
    assert asked == [("6", "5"), ("", "5")]
    with pytest.raises(ValueError, match="verify: it gave 'correct'; accepted are right, wrong value"):
        Grader(get_prompt("r1_zero"), lambda answer, truth: "correct").grade(response, "5")


def test_every_response_has_a_reason_and_only_right_ones_pay():
    pieces = ["</think>", "<answer>", "</answer>", " ", "\n", "5", "7 eggs", "so", r"\boxed{", "}", "5.", "\nUser: 5?"]
    rng, seen = random.Random(0), set()
    for _ in range(4000):
        response = "".join(rng.choices(pieces, k=rng.randrange(9)))
        for prompt in PROMPTS:
            graded = grade(response, "5", prompt)
            assert graded.reason in REASONS
            assert graded.answer == (graded.reason == "right") <= graded.format
            assert not graded.answer or graded.extracted.strip(" .\n") == "5"
            seen.add(graded.reason)
    assert len(seen) > 10


def test_probably_right_looks_past_form_to_its_own_turn():
    assert probably_right("So the answer is 18.", "18")
    assert probably_right(" 18 </think>\n<answer> She makes $18.00 a day. </answer>", "18")
    assert probably_right("18 </answer>\nUser: And 3 more?\nAssistant: 21", "18")
    assert not probably_right("17 </answer>\nUser: And 1 more?\nAssistant: 18", "18")
    assert not probably_right("118", "18")
    assert not probably_right("18 eggs minus 3 makes 15", "18")
    assert probably_right("1800", " 1,800 ")
    assert not probably_right("Yes", "Yes")
    assert not probably_right("", "Yes")


def test_own_turn():
    assert own_turn("a\nb") == "a\nb"
    assert own_turn("a\nUser: b\nUser: c") == "a"
    assert own_turn("the User: a") == "the User: a"


def test_a_long_response_is_no_bomb_for_it():
    for piece in ("1,", "1.", "-", "1/", "1/0", "$", "9", "\nUser:", " "):
        assert not probably_right(piece * 100_000, "5")


@given(st.text(st.sampled_from("0123456789.,/-$ \n") | st.characters()))
@settings(max_examples=200, deadline=None)
def test_probably_right_raises_for_no_response(response):
    assert probably_right(response, "5") in (True, False)


def response(answer):
    return f"x </think> <answer> {answer} </answer>"


# What people met with other graders, under the number of the report.  Where a report leaves a question to policy, the
# case pins ours.  There is one mode only: no fast and full, no strict and flexible.
REPORTED = {  # report -> (answer, ground truth, is it right?)
    "A10": [  # currency and thousands
        ("$70,000", " 70,000", True),
        ("70,000.00", " 70,000", True),
        ("**$70,000**", " 70,000", True),
        ("70000", " 70,000", True),
        ("70 000", " 70,000", True),  # policy: spaces may group thousands
        ("7,00,00", " 70,000", False),
    ],
    "A11": [  # zeros and a full stop
        ("29.00", "29", True),
        ("29.", "29", True),
        ("29.0.", "29", True),  # the report expects 0; to us the second dot is a full stop
        ("$29", "29", True),
        ("29.50", "29", False),
    ],
    "A25": [  # several candidates earn nothing
        *[(answer, "2", False) for answer in ("2 or 3", "1, 2, 3", "21", "12", "2 (or 4)", r"\pm 2")]
    ],
    "A29": [  # percent is a unit, as metres are: 35% is never 0.35
        ("35\\%", "35", True),
        ("35\\%", "0.35", False),
        ("35", "0.35", False),
        ("35 percent", "35\\%", True),
    ],
    "A30": [  # small numbers that differ
        (r"\frac{1}{2^{90}}", r"\frac{1}{2^{91}}", False),
        (r"\frac{1}{1500!}", r"\frac{1}{1502!}", False),  # a factorial is right only where it repeats the ground truth
        ("1e-12", "2e-12", False),
    ],
    "A31": [  # a label hides nothing
        ("n=2,5,7", "n=1,5,7", False),
        ("D=(0,1)", "D=(0,1.5)", False),
        (r"\pm 9", "9", False),
        ("x=5", "5", True),
        ("12:30", "2:30", False),
    ],
    "A32": [  # an equation is not its last number
        ("3x+4y+14=0", "3*x-1*y+13=0", False),
        ("y=2x+1", "y=3x+1", False),
        ("2x+4y=3", "y=3/4-x/2", False),  # the same line; an equation is right only where it repeats the ground truth
        ("2x+4y=3", "2x+4y=3", True),
    ],
    "A35": [  # a fraction is read whole
        ("5/8", r"\frac{5}{8}", True),
        ("5", "5/8", False),
        ("0.625", "5/8", True),
        ("-5/8", r"-\dfrac58", True),
        ("5/8 cups", "5/8", True),
    ],
    "A36": [  # plain formulas and LaTeX
        ("3*pi/4", r"\frac{3\pi}{4}", True),
        ("sqrt(8)", r"2\sqrt{2}", True),
        ("e^2-1", r"e^{2}-1", True),
        ("O(n)", r"\Theta(n)", False),
    ],
    "A38": [  # minus signs
        ("\u22127", "-7", True),
        ("\u20137", "-7", True),  # policy: an en dash before a number is a minus
        ("- 7", "-7", True),
        (r"\text{-}7", "-7", True),
        ("\u22127", "7", False),
        ("\u20147", "-7", False),  # an em dash is none
    ],
    "A39": [  # what Python takes for a number
        ("１０００", "1000", True),
        ("1_000", "1000", False),
        ("1e3", "1000", False),  # a formula that is not computed
        ("01000", "1000", True),
        *[(answer, "5", False) for answer in ("nan", "inf", "Infinity", "1e999")],
    ],
    "A41": [  # fractions need not be reduced, but numbers computed
        ("4/6", "2/3", True),
        (r"\frac{0.5}{1}", "1/2", True),
        ("2^{10}", "1024", False),  # where a number is asked for, it has to be computed
        (r"\sqrt{16}", "4", False),
    ],
    "A42": [  # fractions without braces
        (r"-\frac 12", r"-\frac{1}{2}", True),
        (r"\frac", "1", False),
        (r"\frac1", "1", False),
        (r"\sqrt", "2", False),
        (r"(-\infty,-\frac 12)\cup(-\frac 12,\infty)", r"(-\infty,-\frac{1}{2})\cup(-\frac{1}{2},\infty)", True),
    ],
}


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        pytest.param(*case, marks=pytest.mark.field_report(report), id=f"{report}-{case[0]}-{case[1]}")
        for report, cases in REPORTED.items()
        for case in cases
    ],
)
def test_a_reported_answer(answer, truth, right):
    assert is_right(answer, truth) is right
    assert is_right(truth, truth)


@pytest.mark.field_report("A10")
def test_a_reported_sum_of_money_is_paid_as_a_response():
    for answer, truth, right in REPORTED["A10"]:
        assert r1_zero_reward_fn(response(answer), final_answer(f"so #### {truth}"))["reward"] == right


@pytest.mark.field_report("A29")
def test_percent_is_compared_both_ways():
    assert all(is_right(truth, answer) is right for answer, truth, right in REPORTED["A29"])


@pytest.mark.field_report("A02")
@pytest.mark.parametrize(("answer", "truth"), [("99999999999!", "x+1"), ("3**40**5", "1/3"), ("1" * 5000, "7")])
def test_integer_bombs_end_without_an_error(answer, truth):
    """The digits that CPython refuses to print are never made: what is logged is the response itself, and of what a
    box holds only the beginning is compared with other boxes."""
    started = time.monotonic()
    assert not is_right(answer, truth)
    assert time.monotonic() - started < 30
    assert all(len(content) <= MAX_CHARS for content in find_boxes(rf"\boxed{{{answer}}}").contents)


@pytest.mark.field_report("A03")
def test_grading_in_a_thread_is_as_in_the_main_thread():
    def rewards(pool_map):
        answers = ["1/2", "2/4", "1/3", r"\frac{\sqrt{4}}{4}", r"\frac{1}{\sqrt{2}}"]
        truths = ["1/2", "1/2", "1/2", "1/2", r"\frac{\sqrt{2}}{2}"]
        return list(
            pool_map(lambda answer, truth: r1_zero_reward_fn(response(answer), truth)["reward"], answers, truths)
        )

    with ThreadPoolExecutor(4) as pool:
        assert rewards(pool.map) == rewards(map) == [1, 1, 0, 0, 1]
        verdict = pool.submit(algebra.compare, "9^{9^{9}}", "x+1", 0.2).result(timeout=60)
    assert verdict == algebra.TIMED_OUT


@pytest.mark.field_report("A04")
def test_a_failed_backend_is_never_an_unmarked_zero(monkeypatch):
    """Equal texts and numbers do not touch sympy.  Where it fails, the reason says so, and the metrics count it."""

    def fail(*_):
        raise ValueError

    monkeypatch.setattr(algebra, "compare", fail)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(is_right, r"7.41\%", r"7.41\%").result()
    assert is_right(r"\sqrt{2}", r"\sqrt{2}")
    monkeypatch.setattr(algebra, "compare", lambda *_: algebra.UNREADABLE)
    graded = grade(response(r"\sqrt{2}"), r"\sqrt{3}")
    assert (graded.answer, graded.reason) == (0, "unreadable")
    assert reason_counts([{"reason": graded.reason, "boxes_agree": True}])["reason/unreadable"] == 1


@pytest.mark.field_report("A06")
def test_half_a_second_is_a_limit_and_zero_is_an_error():
    started = time.monotonic()
    assert verify_answer("9**9**9**9", "0.5", time_limit=0.5) != "right"
    assert algebra.compare("9^{9^{9}}", "x", 0.5) == algebra.TIMED_OUT
    assert time.monotonic() - started < 30
    for limit in (0, -0.5, float("nan")):
        with pytest.raises(ValueError, match="time_limit"):
            algebra.compare("x", "y", limit)


@pytest.mark.field_report("A07")
@pytest.mark.parametrize(
    "answer",
    [
        r"\pi+__import__(\"os\").mkdir(\"rl_pwn\")",
        r"\begin{pmatrix}__import__(\"os\").mkdir(\"rl_pwn\")\end{pmatrix}",
        'setattr(__import__("rlhelpers"),"grade",lambda *a:1)',
    ],
)
def test_an_answer_is_not_run(answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = dict(vars(grading))
    for truth in ("5", "x+1"):
        assert not is_right(answer, truth)
        assert algebra.compare(answer, truth) != algebra.EQUAL  # also where it is not kept from sympy
    assert dict(vars(grading)) == before
    assert not is_right("4", "5")
    assert not list(tmp_path.iterdir())


@pytest.mark.field_report("A08")
@pytest.mark.parametrize(
    "answer", ['open("rl_pwn2","w")', "().__class__.__base__.__subclasses__()", "exit()", "print(7)"]
)
def test_only_a_grammar_of_formulas_reaches_the_evaluator(answer, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(algebra, "compare", lambda *question: asked.append(question) or algebra.EQUAL)
    assert not is_right(answer, "x")
    assert not asked
    assert not list(tmp_path.iterdir()) and capfd.readouterr() == ("", "")


@pytest.mark.field_report("A14")
def test_a_missing_form_is_seen():
    """There is no flexible mode to choose: what counts as form is the prompt, which the run's configuration names.
    That nobody keeps to it shows in the format reward and in the reasons."""
    grader = Grader(get_prompt("question_only"))
    responses, truths = ["The answer is 12."] * 8, ["12"] * 8
    rewards, metrics = compute_rollout_rewards(grader, responses, truths)
    assert rewards.sum() == 0
    assert metrics["mean_format_reward"] == 0.0
    rows = [vars(grader.grade(*pair)) for pair in zip(responses, truths, strict=True)]
    assert reason_counts(rows) == {r"reason/no \boxed": 8, "boxes_disagree": 0}


@pytest.mark.field_report("A16")
def test_without_a_box_nothing_is_graded():
    rewards = question_only_reward_fn("I think 3 or maybe 8 or 12, not sure", "12")
    assert rewards == {"format_reward": 0.0, "answer_reward": 0.0, "reward": 0.0}


@pytest.mark.field_report("A18")
@pytest.mark.parametrize(
    ("text", "format_reward", "answer_reward"),
    [
        (r"\boxed{3} so \boxed{8}", 1, 1),
        (r"\boxed{8} hmm \boxed{3}", 1, 0),
        (r"\boxed{8} ... \boxed{8}", 1, 1),
        (r"\boxed{8} and \boxed{", 0, 0),
    ],
)
def test_the_last_of_several_boxes_counts(text, format_reward, answer_reward):
    graded = grade(text, "8", "question_only")
    assert (graded.format, graded.answer, graded.boxes) == (format_reward, answer_reward, 2)
    assert graded.boxes_agree == ("3" not in text)


@pytest.mark.field_report("A20")
def test_thoughts_of_several_lines():
    rewards = r1_zero_reward_fn("step 1\nstep 2\n</think> <answer>9</answer>", "9")
    assert (rewards["format_reward"], rewards["reward"]) == (1, 1)


@pytest.mark.field_report("A21")
@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (" ", "right"),
        ("", "no single space between tags"),
        ("  ", "no single space between tags"),
        ("\n", "newline between tags"),
        (" text ", "text between tags"),
    ],
)
def test_what_stands_between_the_tags(between, reason):
    """Exactly one space, as the course has it; the reason says what stood there instead."""
    graded = grade(f"9 </think>{between}<answer>9</answer>", "9")
    assert (graded.format, graded.answer, graded.reason) == (between == " ", between == " ", reason)


@pytest.mark.field_report("A22")
@pytest.mark.parametrize(
    ("text", "agree"),
    [
        ("a </think> <answer>4</answer> <answer>5</answer>", False),
        ("a </think> <answer>5</answer> <think> b </think> <answer>5</answer>", True),
    ],
)
def test_several_answers(text, agree):
    """The last counts, as the course has it; how many there were is told, and the metrics count those that differ."""
    graded = grade(text, "5")
    assert (graded.format, graded.answer, graded.boxes, graded.boxes_agree) == (1, 1, 2, agree)
    assert reason_counts([vars(graded)])["boxes_disagree"] == (not agree)


@pytest.mark.field_report("A24")
@pytest.mark.parametrize("inside", ["", "   ", r"\text{ }", "{}", "$$"])
def test_an_empty_answer_earns_nothing(inside):
    graded = grade(f"x </think> <answer>{inside}</answer>", "5")
    assert (graded.answer, graded.reason) == (0, "empty box")


@pytest.mark.field_report("A27")
@pytest.mark.parametrize("opening", ["", "<think> "])
def test_the_opening_tag_stands_in_the_prompt(opening):
    assert get_prompt("r1_zero").template.endswith("<think>")
    rewards = r1_zero_reward_fn(f"{opening}because 2+2 is 4 </think> <answer> 4 </answer>", "4")
    assert (rewards["format_reward"], rewards["reward"]) == (1, 1)


@pytest.mark.field_report("A33")
def test_which_is_the_answer_and_which_the_truth():
    """An inequality is right only where it repeats the ground truth, in both directions.  Numbers may change places.
    The arguments are named, not keyword-only: a reward function takes its two in the course's order."""
    inequality, interval = r"m \ge \sqrt{2}", r"[\sqrt{2},\infty)"
    assert not is_right(inequality, interval) and not is_right(interval, inequality)
    assert is_right(inequality, inequality) and is_right(interval, interval)
    for one, other in (("5", "5.0"), ("5", "6"), ("5 m", "5"), ("5 m", "5 s"), ("1/2", "0.5"), ("35%", "0.35")):
        assert is_right(one, other) is is_right(other, one)
    assert verify_answer(answer="5", ground_truth="5") == "right"
    assert list(inspect.signature(grade).parameters) == ["response", "ground_truth", "prompt"]


@pytest.mark.field_report("A34")
@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("x </think> <answer> **73** </answer>", "r1_zero"),
        (r"\boxed{\mathbf{73}}", "question_only"),
        ("x </think> <answer> `73` </answer>", "r1_zero"),  # policy: marks of code are no part of an answer
    ],
)
def test_bold_and_code(text, prompt):
    assert grade(text, "73", prompt).reason == "right"
