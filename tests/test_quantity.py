"""Numbers as people write them: read exactly, or not at all."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhelpers.tasks.answers import MAX_CHARS, Quantity, read_quantity, tidy


def read(text):
    return read_quantity(tidy(text))


NUMBERS = [
    ("18", 18),
    ("-3", -3),
    ("- 3", -3),
    ("+3", 3),
    ("-0", 0),
    ("007", 7),
    ("18.00", 18),
    ("18.5", Fraction(37, 2)),
    (".5", Fraction(1, 2)),
    ("5.", 5),
    ("0.1", Fraction(1, 10)),  # exactly, no binary approximation
    ("1,800", 1800),
    ("1,234,567.25", Fraction("1234567.25")),
    ("1 800", 1800),
    ("12 345 678", 12345678),
    ("9" * 150, int("9" * 150)),
    # Fractions, mixed numbers.
    ("1/2", Fraction(1, 2)),
    ("4 / 6", Fraction(2, 3)),
    ("-3/4", Fraction(-3, 4)),
    ("31/4", Fraction(31, 4)),
    ("3 1/4", Fraction(13, 4)),
    ("-3 1/4", Fraction(-13, 4)),
    ("2½", Fraction(5, 2)),
    ("¾", Fraction(3, 4)),
    ("3⁄4", Fraction(3, 4)),
    ("1.5/2", Fraction(3, 4)),
    ("1,000/2", 500),
    (r"\frac{1}{2}", Fraction(1, 2)),
    (r"\dfrac{1}{2}", Fraction(1, 2)),
    (r"\tfrac 1 2", Fraction(1, 2)),
    (r"\dfrac12", Fraction(1, 2)),
    (r"\frac{ -5 }{ 8 }", Fraction(-5, 8)),
    (r"-\frac{5}{8}", Fraction(-5, 8)),
    (r"\frac{0.5}{1}", Fraction(1, 2)),
    (r"2\frac{1}{2}", Fraction(5, 2)),
    # What surrounds a number and is no part of it.
    ("  18\n", 18),
    ("$18", 18),
    ("-$18", -18),
    (r"\$18", 18),
    ("$18$", 18),
    ("$$18$$", 18),
    (r"\(18\)", 18),
    (r"\[ 18 \]", 18),
    ("£18", 18),
    ("18 €", 18),
    ("18.", 18),
    ("29.0.", 29),
    ("**18**", 18),
    ("*18*", 18),
    ("`18`", 18),
    ('"18"', 18),
    ("(18)", 18),
    ("{18}", 18),
    ("18 ]", 18),
    ("18)", 18),
    ("x = 18", 18),
    ("AB=18", 18),
    (r"\boxed{18}", 18),
    (r"\boxed{18}.", 18),
    (r"\text{18}", 18),
    (r"\mathbf{18}", 18),
    (r"$\boxed{\textbf{18}}$", 18),
    (r"$\boxed{\frac{1}{2}}$", Fraction(1, 2)),
    (r"\text{-2\frac{1}{2}}", Fraction(-5, 2)),
    (r"{\frac{1}{2}}", Fraction(1, 2)),
    (r"1{,}800", 1800),
    (r"1\,800", 1800),
    # Other signs for the same characters.
    ("\u22127", -7),
    ("\u20137", -7),  # an en dash before a number is a minus
    ("１８", 18),
    ("１，８００．５０", Fraction("1800.5")),
    ("1\u202f800", 1800),
    ("18\u00a0", 18),
]


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_a_bare_number(text, value):
    assert read(text) == Quantity(Fraction(value))


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("18 dollars", "dollar"),
        ("18 eggs.", "egg"),
        ("18 Eggs", "egg"),
        (r"18 \text{ eggs}", "egg"),
        (r"\text{18 eggs}", "egg"),
        ("18eggs", "egg"),
        ("$18 per month", "per month"),
        ("18 years old", "years old"),
        ("18 miles/hour", "miles hour"),
        ("18 sq. ft.", "sq ft"),
        ("18 m", "m"),
        ("18 s", "s"),
        ("18 cm", "cm"),
        ("18 °C", "c"),
        ("18°", "°"),
        ("18%", "%"),
        (r"18\%", "%"),
        ("18 %", "%"),
        ("18 percent", "%"),
        ("18 per cent", "%"),
        ("18 m²", "m²"),
        ("18m/s", "m s"),
        ("18cc", "cc"),
        ("18 a day", "a day"),
        ("18 hours and minutes", "hours and minute"),
    ],
)
def test_a_number_with_a_unit(text, unit):
    assert read(text) == Quantity(Fraction(18), unit)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "$", "$$", "{}", "()", r"\text{ }", ".", "-", "%", "eggs", "eighteen", "nan", "inf", "Infinity"),
        *("Tom has 18", "eggs: 18", "18 or 19", "18, 19", "18 19", "1800 000", "2 (or 4)", "18 - 3", "18-3", "-18-"),
        *("1,2", "7,00,00", "1,80", "1,8000", "0,5", "1'800", "1_000", "1e3", "1e999", "1.5.2", "12:30", "0x12"),
        *("18 = 18", "3=18", "== 18", "18!", "18 +", "12 + 6", "2^4", r"\sqrt{4}", r"\frac{1}{0}", "1/0", "1/2/3"),
        *(r"\frac", r"\frac1", r"\frac{1}", r"\frac{1 000}{2}", r"\frac{}{}", r"\pm 18", "(18", "[0,18)", "(1, 8)"),
        *("18x", "18 x", "18y", "18 a", "5k", "5m", "18\x00", "18\ud800", "٣", "¹⁸", "18<|endoftext|>", "18 </s>"),
        *("18²", "18①", "18万", "18万元", r"\frac{1}{2}0", r"\frac{1}{2}\frac{1}{3}"),
        *("5xy", "5 xy", "5x-y", "5 x y", "3a/b", "2abc", "5m-s", "5x²", "5 x²"),  # formulas
        # A unit has at most three words, and none of them continues the number or takes it back.
        *("18 eggs that she sells", "18 and a half", "18 half dozens", "3 million", "2 thousand", "2 pi", "5 squared"),
        *("3 eighths", "5 hundredths", "3 millions", "18 sixty", "18 factorial", "18 and", "2 more than"),
        *(
            "18 or so",
            "18 is wrong",
            "18 not 19",
            "five 18",
            "18 plus tax",
            "18 times two",
            "18 inf",
            "18 eggs, 3 hens",
        ),
        *("9" * (MAX_CHARS + 1), "1" * 5000, "18 " + "e" * 300),
    ],
)
def test_no_quantity(text):
    assert read(text) is None


@pytest.mark.parametrize(
    ("text", "tidied"),
    [
        ("", ""),
        (" She has 18. ", "She has 18"),
        ("The answer is **18**", "The answer is **18**"),
        (r"\text{x}+1", "x +1"),
        ("y = 2x + 1", "2x + 1"),
        ("width = 3", "width = 3"),
        ("x == 3", "x == 3"),
        ("[0, 1)", "[0, 1)"),
        ("(0, 1]", "(0, 1]"),
        ("f(x)", "f(x)"),
        ("3–5", "3–5"),  # a range
        ("3 × 4 ÷ 2", "3 * 4 / 2"),
        ("a.b.", "a.b"),
    ],
)
def test_tidy(text, tidied):
    assert tidy(text) == tidied
    assert tidy(tidied) == tidied


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        ("18", "18", True),
        ("18 eggs", "18", True),  # a unit may be missing on one side
        ("18 eggs", "18 egg", True),
        ("18 mins", "18 min", True),
        ("18%", "18 percent", True),
        ("18%", "18", True),
        ("18%", "0.18", False),
        ("18%", "18 eggs", False),
        ("5 m", "5 s", False),
        ("5 m", "5 meters", False),  # abbreviations are not looked up
        ("18 eggs", "18 hens", False),
        ("18 eggs", "19", False),
        ("0.333", "1/3", False),
        ("0.3333333333333333", "1/3", False),
        ("31/4", "3 1/4", False),
        ("-18", "18", False),
        ("0.1", "0.10000000000000001", False),
    ],
)
def test_equality_goes_both_ways(one, other, are_equal):
    assert read(one).equals(read(other)) is are_equal
    assert read(other).equals(read(one)) is are_equal


DECIMALS = st.decimals(-(10**9), 10**9, places=3)


@given(DECIMALS)
def test_a_number_equals_its_own_spellings(number):
    plain = f"{number:f}"
    spellings = [plain, f" {plain}0 ", f"{number:,f}", f"{number:,f}".replace(",", " "), f"${plain}$", f"**{plain}**"]
    spellings += [f"{int(number * 1000)}/1000", plain.replace("-", "\u2212"), f"x = {plain}", rf"\boxed{{{plain}}}."]
    assert {read(spelling) for spelling in spellings} == {Quantity(Fraction(number))}


@given(DECIMALS, DECIMALS)
def test_and_no_other_number(one, other):
    assert read(f"{one:,f}").equals(read(f"{other:f}")) is (one == other)


@given(st.text(st.sampled_from(r"0123456789.,/-+ $%{}()[]\boxedfractex=") | st.characters(), max_size=2 * MAX_CHARS))
@settings(max_examples=300, deadline=None)
def test_no_text_raises(text):
    quantity = read(text)
    assert quantity is None or quantity.equals(quantity)
