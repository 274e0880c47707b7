"""What stands in a box against the ground truth: equal, not equal, and why not."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhelpers import paths
from rlhelpers.tasks import algebra
from rlhelpers.tasks.grading import REASONS, is_equal, is_formula, judge_answer, read_truth

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
    assert judge_answer(answer, truth) == "right"
    assert is_equal(answer, truth) is True


@pytest.mark.parametrize(("answer", "truth", "reason"), NOT_EQUAL)
def test_not_equal(answer, truth, reason):
    assert judge_answer(answer, truth) == reason
    assert is_equal(answer, truth) is False


@pytest.mark.parametrize("answer", [None, 18, b"18", ["18"]])
def test_an_answer_that_is_no_text_is_an_error(answer):
    with pytest.raises(ValueError, match=r"answer: got .*, a (NoneType|int|bytes|list); accepted is a text"):
        judge_answer(answer, "18")


def test_sympy_is_asked_about_formulas_only(monkeypatch):
    """A number needs no backend, so none can fail on it; whatever a backend finds is a reason."""
    monkeypatch.setattr(algebra, "compare", lambda *_: pytest.fail("nobody should ask"))
    assert judge_answer(r"7.41\%", r"7.41\%") == "right"
    assert judge_answer(r"\sqrt{2}", r"\sqrt{2}") == "right"  # the same text
    assert judge_answer(r"\sqrt{2}", "2") == "not computed"
    assert judge_answer("2", "Monday") == "wrong value"
    for backend, reason in ((algebra.UNREADABLE, "unreadable"), (algebra.TIMED_OUT, "timed out")):
        monkeypatch.setattr(algebra, "compare", lambda *_, backend=backend: backend)
        assert judge_answer(r"\sqrt{2}", r"\sqrt{3}") == reason


def test_a_time_limit_reaches_sympy():
    assert judge_answer(r"\sin(\sin(x))", "x+1", 0.001) == "timed out"
    assert judge_answer(r"\sin(\sin(x))", "x+1", 60) == "wrong value"


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
    assert not is_equal(bomb, "x+1")


@pytest.mark.parametrize("text", ["x+1", r"\frac{x}{2}", "2^{10}", r"-\sqrt{2}", "(0, 1]", "pi/2", r"\sin(2x)", "e^2"])
def test_what_sympy_may_see(text):
    assert is_formula(text)


@pytest.mark.parametrize("truth", ["18", " 1,800 ", "-3/4", "18%", "Monday", r"\sqrt{2}", "x = 3", "A", "9" * 200, "é"])
def test_ground_truths(truth):
    assert judge_answer(truth, truth) == "right"


@pytest.mark.parametrize(
    "truth",
    [
        *("", "  ", "\n", "$", "$$", "()", "{}", r"\text{ }", "...", "####", "_", r"\boxed{", "18}", "9" * 201),
        *("18\x00", "\x0crac12", "\tfrac12", "7\x0crac12", "1\n8", "18\x7f", "18\ud800"),
        *(None, 18, 18.0, float("nan"), b"18", ["18"], {"18": 1}),
    ],
)
def test_a_ground_truth_that_cannot_be_read_is_an_error(truth):
    for judge in (judge_answer, is_equal, lambda _, truth: read_truth(truth)):
        with pytest.raises(ValueError, match=r"ground_truth: got .*; accepted is an answer of 1 to 200 characters"):
            judge("18", truth)


NUMBERS = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.integers(-999, 999).map("{:,}.50 eggs".format),
    st.fractions(-99, 99, max_denominator=9).map(str),
)


@given(NUMBERS, NUMBERS)
def test_two_numbers_may_change_places(one, other):
    assert judge_answer(one, other) == judge_answer(other, one)
    assert judge_answer(one, one) == "right"


@given(
    st.text(st.sampled_from(r"0123456789.,/-+*^=$%{}()[]\ fracsqtxy") | st.characters(), max_size=250),
    st.sampled_from(["18", "1/2", "Monday", "3x = 2"]),
)
@settings(max_examples=500, deadline=None)
def test_no_answer_raises(answer, truth):
    assert judge_answer(answer, truth) in REASONS


@given(
    st.lists(st.sampled_from([*"0123456789.,/-+*^{}()[] xye", r"\frac", r"\sqrt", r"\pi "]), max_size=12).map("".join),
    st.sampled_from([r"\sqrt{2}", "x+1", "(0,1)"]),
)
@settings(max_examples=100, deadline=None)
def test_no_formula_raises(answer, truth):
    assert judge_answer(answer, truth, 0.5) in REASONS


def test_the_table_in_the_readme():
    """Ground truth, what is right, what is not: every spelling in backticks."""
    section = (paths.ROOT / "README.md").read_text(encoding="utf-8").partition("## What counts as right")[2]
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    assert len(lines) > 10
    for line in lines:
        truth, right, wrong = (re.findall("`(.+?)`", cell) for cell in line.split("|")[1:-1])
        assert len(truth) == 1 and right and wrong
        assert {answer: judge_answer(answer, *truth) for answer in right} == dict.fromkeys(right, "right")
        assert not [answer for answer in wrong if judge_answer(answer, *truth) == "right"]


def test_signs_of_multiplication_and_division_part_two_numbers():
    assert judge_answer(r"3\cdot 6", "18") == "not computed"
    assert judge_answer(r"3^x\cdot 2", r"2\times 3^x") == "right"
    assert judge_answer(r"x\div 2", r"\frac{x}{2}") == "right"
    assert judge_answer(r"3 \times", "18") == "unfinished formula"
