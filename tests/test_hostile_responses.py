"""Responses that should hang the grader, fill the memory, run code, or break it: each gets its grade."""

import sys
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhelpers.tasks import grade
from rlhelpers.tasks.grading import REASONS, probably_right
from rlhelpers.tasks.prompts import PROMPTS

MEGABYTE = 10**6
SECONDS = 20  # for what takes one second or less: a bound against hanging, no measurement

PIECES = [
    *("<answer>", "</answer>", "</think>", "<answer></answer>", "</think> <answer>5</answer>"),
    *(r"\boxed", r"\boxed{", r"\boxed{}", r"\boxed {5}", "{", "}", r"\{", "\\", "(", "["),
    *("1,", "1.", "1/", "-", "$", "9", "1 000 ", "½", "```", "**", r"\frac", r"\frac{", r"\text{", "9^", "x+", "="),
    *(" ", "\n", "\u00a0", "\x00", "\ud800", "a", "eggs ", ".", "\nUser:"),
]


@pytest.mark.slow
@pytest.mark.parametrize("piece", PIECES)
def test_a_megabyte_of_one_piece(piece):
    text = piece * (MEGABYTE // len(piece))
    for prompt, form in (("r1_zero", "so </think> <answer>{}</answer>"), ("question_only", r"so \boxed{{{}}}")):
        for response in (text, form.format(text)):
            started = time.monotonic()
            assert grade(response, "18", prompt).reason in REASONS
            assert time.monotonic() - started < SECONDS
    assert probably_right(text, "18") is False


@pytest.mark.parametrize(
    "bomb",
    [
        *("99999999999!", "9**9**9**9", "3**40**5", "9^{9^{9}}", "9^{99999999}", "(9^9)^9", "1" * 5000, "9" * 200),
        *("(" * 90 + "1" + ")" * 90, "{" * 5 + "1" + "}" * 5, r"\sqrt{" * 30 + "2" + "}" * 30, r"\text{" * 30),
        *("(x+1)^{9999}", "(a+1)" * 30, r"\binom{99999999}{9999999}", r"\Gamma(99999999)", r"\frac{1}{0}", "0/0"),
        *('open("pwned","w")', '__import__("os").mkdir("pwned")', "exit()", "print(7)", "().__class__"),
        *("%s%s%n", "${7*7}", "{{7*7}}", "\x1b[2J", "18\x00", "'; DROP TABLE rewards; --"),
    ],
)
@pytest.mark.parametrize("truth", ["18", "1/3", "x+1", r"\sqrt{2}"])
def test_no_bomb_is_paid_or_run(bomb, truth, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    for response, prompt in (
        (f" </think> <answer> {bomb} </answer>", "r1_zero"),
        (rf"\boxed{{{bomb}}}", "question_only"),
        (bomb, "r1_zero"),
    ):
        graded = grade(response, truth, prompt)
        assert graded.reason in REASONS and graded.answer == 0
    assert time.monotonic() - started < SECONDS
    assert not list(tmp_path.iterdir()) and capfd.readouterr() == ("", "")


def test_boxes_in_boxes_are_not_copied_again_and_again():
    """60,000 in one another hold 14 GB of text in all."""
    response = r"\boxed{" * 60_000 + "18" + "}" * 60_000
    tracemalloc.start()
    started = time.monotonic()
    graded = grade(response, "18", "question_only")
    assert time.monotonic() - started < SECONDS
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (graded.reason, graded.boxes, graded.extracted) == ("right", 60_000, "18")
    assert peak < 200 * 2**20


def test_boxes_that_agree_in_ever_new_spellings():
    spellings = [f"{' ' * (n % 40)}{'$' * (n // 40 % 2)}18.{'0' * (n // 80)}" for n in range(10_000)]
    started = time.monotonic()
    graded = grade("".join(rf"\boxed{{{spelling}}}" for spelling in spellings), "18", "question_only")
    assert time.monotonic() - started < SECONDS
    assert (graded.reason, graded.boxes, graded.boxes_agree) == ("right", 10_000, True)


def test_the_depth_of_python_is_no_limit():
    limit = sys.getrecursionlimit()
    for opening, closing in (("{", "}"), ("(", ")"), (r"\text{", "}"), ("**", "**"), (r"\boxed{", "}")):
        box = opening * 2 * limit + "18" + closing * 2 * limit
        assert grade(f" </think> <answer>{box}</answer>", "18").reason in REASONS
    assert sys.getrecursionlimit() == limit


RESPONSES = st.lists(st.sampled_from([*PIECES, "18", "</think> <answer> "]) | st.text(max_size=5), max_size=30)


@pytest.mark.slow
@given(RESPONSES.map("".join), st.sampled_from(sorted(PROMPTS)), st.sampled_from(["18", "1/2", "Monday", "1,800"]))
@settings(max_examples=500, deadline=2000)
def test_any_response_has_a_grade(response, prompt, truth):
    graded = grade(response, truth, prompt)
    assert graded.reason in REASONS
    assert graded.answer == (graded.reason == "right") <= graded.format
    assert graded == grade(response, truth, prompt)
    assert probably_right(response, truth) in (True, False)


@given(
    st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9), st.sampled_from(["{}", " ${:,} ", "{}.00", "**{}**."])
)
def test_a_response_is_paid_for_the_right_number_and_no_other(number, other, spelling):
    response = f" so </think> <answer>{spelling.format(number)}</answer>"
    assert grade(response, str(number)).reason == "right"
    assert grade(response, str(other)).answer == (number == other)
