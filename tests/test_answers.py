"""Answers in responses: boxes, quantities as people write them, numbers and letters in free text."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhelpers.tasks import grade
from rlhelpers.tasks.answers import (
    MAX_CHARS,
    Boxes,
    Quantity,
    find_boxes,
    find_tags,
    last_number,
    parse_gsm8k_response,
    parse_mmlu_response,
    read_quantity,
    tidy,
)


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("", Boxes("empty response", (), 0, None)),
        ("so </think> <answer> 5 </answer>", Boxes(None, (" 5 ",), 1, " 5 ")),
        ("so </think> <answer></answer>", Boxes(None, ("",), 1, "")),
        ("so </think> <answer>5</answer><|endoftext|>", Boxes(None, ("5",), 1, "5")),
        ("a\nb </think> <answer>5\n6</answer>\n", Boxes(None, ("5\n6",), 1, "5\n6")),
        # Without the format: what stands between tags is still told.
        ("so </think>\n<answer>5</answer>", Boxes("newline between tags", ("5",), 1, "5")),
        ("so <answer>5</answer>", Boxes("no </think>", ("5",), 1, "5")),
        ("</answer></think> <answer> 5", Boxes("no </answer>", (), 1, None)),
        ("so </think> <answer> 5", Boxes("no </answer>", (), 1, None)),
        ("so </think> 5</answer>", Boxes("no <answer>", (), 0, None)),
        ("so </THINK> <ANSWER>5</ANSWER>", Boxes("no </think>", (), 0, None)),
        ("so </think> <answer >5</answer>", Boxes("no <answer>", (), 0, None)),
        # Several: the last counts, also where it is not closed, or where only an earlier one has the format.
        ("</think> <answer>4</answer> <answer>5</answer>", Boxes(None, ("4", "5"), 2, "5")),
        ("<answer>4</answer> </think> <answer>5</answer>", Boxes(None, ("4", "5"), 2, "5")),
        ("</think> <answer>4</answer> </think> <answer>5", Boxes(None, ("4",), 2, None)),
        ("</think> <answer>4 <answer>5</answer>", Boxes(None, ("5",), 2, "5")),
        ("</think> <answer>5</answer></answer>", Boxes(None, ("5",), 1, "5")),
    ],
)
def test_tags(response, found):
    assert find_tags(response) == found


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("", Boxes("empty response", (), 0, None)),
        ("The answer is 8.", Boxes(r"no \boxed", (), 0, None)),
        (r"so \boxed{8}.", Boxes(None, ("8",), 1, "8")),
        (r"\boxed{}", Boxes(None, ("",), 1, "")),
        (r"\boxed {8}", Boxes(None, ("8",), 1, "8")),
        ("\\boxed\n{8}", Boxes(None, ("8",), 1, "8")),
        (r"\boxed{8}<|endoftext|>", Boxes(None, ("8",), 1, "8")),
        (r"\boxed{3} so \boxed{8}", Boxes(None, ("3", "8"), 2, "8")),
        # Braces are balanced; `\{` and `\}` are none, but after the line break `\\` they are.
        (r"\boxed{\frac{1}{\sqrt{2}}}", Boxes(None, (r"\frac{1}{\sqrt{2}}",), 1, r"\frac{1}{\sqrt{2}}")),
        (r"\boxed{\left\{x\right\}}", Boxes(None, (r"\left\{x\right\}",), 1, r"\left\{x\right\}")),
        (r"\boxed{\{8}", Boxes(None, (r"\{8",), 1, r"\{8")),
        (r"\boxed{a\\{b}}", Boxes(None, (r"a\\{b}",), 1, r"a\\{b}")),
        (r"{x}}} \boxed{8}", Boxes(None, ("8",), 1, "8")),
        (r"{{ \boxed{8}", Boxes(None, ("8",), 1, "8")),
        # A box in a box: the inner one begins last.
        (r"\boxed{\boxed{8}}", Boxes(None, (r"\boxed{8}", "8"), 2, "8")),
        (r"\boxed{3 \boxed{8} 4}", Boxes(None, (r"3 \boxed{8} 4", "8"), 2, "8")),
        # Not closed.
        (r"\boxed{8", Boxes("box not closed", (), 1, None)),
        (r"\boxed{8} and \boxed{", Boxes("box not closed", ("8",), 2, None)),
        (r"\boxed{3 \boxed{8}", Boxes(None, ("8",), 2, "8")),
        # No boxes.
        (r"\boxed 8", Boxes(r"no \boxed", (), 0, None)),
        (r"\boxed{8}, as \boxed asks", Boxes(None, ("8",), 1, "8")),
        (r"\fbox{8}", Boxes(r"no \boxed", (), 0, None)),
        ("boxed{8}", Boxes(r"no \boxed", (), 0, None)),
    ],
)
def test_boxes(response, found):
    assert find_boxes(response) == found


@pytest.mark.parametrize(("find", "form"), [(find_tags, "</think> <answer>{}</answer>"), (find_boxes, r"\boxed{{{}}}")])
def test_only_the_last_long_box_is_kept_whole(find, form):
    long = "5" * (2 * MAX_CHARS)
    found = find(form.format(long) + form.format(long + "6"))
    assert found.contents == (long[:MAX_CHARS],) * 2
    assert found.last == long + "6"


BOX_PIECES = st.sampled_from(["</think>", " ", "<answer>", "</answer>", r"\boxed", "{", "}", "\\", r"\{", "5", "\n"])


@given(st.lists(BOX_PIECES, max_size=20).map("".join))
def test_boxes_of_any_response(response):
    for found in (find_tags(response), find_boxes(response)):
        assert len(found.contents) <= found.opened
        assert found.last is None or found.last in found.contents
        assert found.opened or not found.has_format
    assert (find_boxes(response).last is not None) == find_boxes(response).has_format


@pytest.mark.field_report("A17")
@pytest.mark.parametrize(
    ("text", "inside"), [(r"\fbox{7}", None), (r"\boxed 7", None), (r"\boxed {7}", "7"), (r"\boxed{}", ""), ("", None)]
)
def test_what_is_a_box(text, inside):
    r"""A box is `\boxed` and a brace.  An empty one is a box: it has the format, and no answer."""
    assert find_boxes(text).last == inside
    graded = grade(text, "7", "question_only")
    assert (graded.format, graded.answer) == (inside is not None, inside == "7")


@pytest.mark.field_report("A19")
@pytest.mark.parametrize("inside", [r"\frac{1}{\sqrt{2}}", r"\left\{x : \frac{x}{\sqrt{x^{2}}}=1\right\}"])
def test_braces_in_braces(inside):
    r"""`\{` and `\}` are no braces of the box."""
    assert find_boxes(rf"\boxed{{{inside}}}").last == inside


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
def test_a_number_equals_no_other(one, other):
    assert read(f"{one:,f}").equals(read(f"{other:f}")) is (one == other)


@given(st.text(st.sampled_from(r"0123456789.,/-+ $%{}()[]\boxedfractex=") | st.characters(), max_size=2 * MAX_CHARS))
@settings(max_examples=300, deadline=None)
def test_no_quantity_raises(text):
    quantity = read(text)
    assert quantity is None or quantity.equals(quantity)


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


@given(st.fractions(-99, 99, max_denominator=50), st.sampled_from(["It is {}.", "so 7, then ({})", "={}"]))
def test_the_last_number_is_read_exactly(number, sentence):
    assert last_number(sentence.format(number)) == number


@pytest.mark.parametrize(
    ("output", "letter"),
    [
        ("The correct answer is B. Warm air rises.", "B"),
        ("The answer is A", "A"),
        ("the answer is: (C)", "C"),
        ("I think the answer is **D**.", "D"),
        ('The correct answer is "B"', "B"),
        ("THE ANSWER IS D", "D"),
        ("Warm air rises.\nSo the correct answer is\nB.", "B"),
        ("The answer is B. Some say that the answer is C.", "B"),  # the first
        ("B", "B"),
        (" B \n", "B"),
        ("(B)", "B"),
        ("[D]", "D"),
        ("B.", "B"),
        ("C: Warm air rises", "C"),
        ("D) all of these", "D"),
        # None of the four is named.
        ("", None),
        ("The correct answer is E.", None),
        ("The correct answer is b.", None),
        ("The answer is Berlin.", None),
        ("The answer is A's own.", None),
        ("A warm day", None),
        ("Because B", None),
        ("None of these.", None),
        ("The answer is 2.", None),
        ("Warm air rises, and cold air does not.", None),
    ],
)
def test_parse_mmlu(output, letter):
    assert parse_mmlu_response(output) == letter


@pytest.mark.parametrize(
    ("output", "number"),
    [
        ("Natalia sold 48/2 = 24 clips in May and 48+24 = 72 clips altogether in April and May.", "72"),
        ("72", "72"),
        ("It costs $1,800.50.", "1800.50"),
        ("$-3", "-3"),
        ("It fell by 5 to -3 degrees.", "-3"),
        ("8-5", "5"),
        ("Half of it: 3/4", "3/4"),
        ("1,000,000 of them", "1000000"),
        ("12 and then 18, or so", "18"),
        ("It is .5", ".5"),
        ("20% off", "20"),
        ("#### 1,080", "1080"),
        ("", None),
        ("seventy-two", None),
        (", , no digits,", None),
        ("...-$", None),
        ("٧٢", None),
    ],
)
def test_parse_gsm8k(output, number):
    assert parse_gsm8k_response(output) == number


@given(st.text(st.sampled_from("ABCDE 0123456789.,:/-$()[]*\n") | st.characters()))
@settings(max_examples=200, deadline=None)
def test_no_output_raises(output):
    assert parse_mmlu_response(output) in {"A", "B", "C", "D", None}
    number = parse_gsm8k_response(output)
    assert number is None or any(character in "0123456789" for character in number)


@pytest.mark.parametrize("parse", [parse_mmlu_response, parse_gsm8k_response])
def test_what_is_no_text_is_an_error(parse):
    with pytest.raises(ValueError, match="model_output: got None, a NoneType; accepted is a text"):
        parse(None)


@pytest.mark.parametrize("piece", ["answer is ", "answer", "answer is:((", "A", " ", "(", "1,", "1/", "9", "$", "-"])
def test_a_megabyte_of_text_is_no_bomb(piece):
    text = piece * (10**6 // len(piece))
    assert parse_mmlu_response(text) in {"A", None}
    assert parse_mmlu_response("The answer is B. " + text) == "B"
    parse_gsm8k_response(text)


@pytest.mark.field_report("A09")
def test_a_comma_after_the_number():
    assert parse_gsm8k_response("So she keeps 96 stamps, altogether, in the album.") == "96"


@pytest.mark.field_report("A12")
def test_the_number_is_found_before_a_long_tail():
    """The last number of the text, wherever it stands: no strict mode asks for `####`."""
    tail = " and this agrees with the steps above"
    assert parse_gsm8k_response("2+40=42\n#### 42\n" + tail * 200) == "42"
    started = time.monotonic()
    assert parse_gsm8k_response("2+40=42\n#### 42\n" + tail * 50_000) == "42"
    assert time.monotonic() - started < 30


@pytest.mark.field_report("A13")
def test_the_last_marked_number_counts():
    assert parse_gsm8k_response("Example: #### 6\nNow mine.\n#### 1,080") == "1080"
