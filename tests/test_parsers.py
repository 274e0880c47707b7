"""The supplement's parsers of answers in free text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhelpers.tasks.answers import parse_gsm8k_response, parse_mmlu_response


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
def test_mmlu(output, letter):
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
def test_gsm8k(output, number):
    assert parse_gsm8k_response(output) == number


@given(st.text(st.sampled_from("ABCDE 0123456789.,:/-$()[]*\n") | st.characters()))
@settings(max_examples=200, deadline=None)
def test_no_text_raises(output):
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
