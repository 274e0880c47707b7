"""Whether a response is right in substance, whatever its form."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhelpers.tasks.answers import last_number
from rlhelpers.tasks.grading import own_turn, probably_right


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


def test_a_long_response_is_no_bomb():
    for piece in ("1,", "1.", "-", "1/", "1/0", "$", "9", "\nUser:", " "):
        assert not probably_right(piece * 100_000, "5")


@pytest.mark.parametrize("truth", ["", "$", None, 5, ["5"], "9" * 201])
def test_a_ground_truth_that_cannot_be_read_is_an_error(truth):
    with pytest.raises(ValueError, match="ground_truth: got"):
        probably_right("It is 5.", truth)


def test_a_response_that_is_no_text_is_an_error():
    with pytest.raises(ValueError, match=r"response: got \['5'\], a list; accepted is a text"):
        probably_right(["5"], "5")


@given(st.text(st.sampled_from("0123456789.,/-$ \n") | st.characters()))
@settings(max_examples=200, deadline=None)
def test_no_response_raises(response):
    assert probably_right(response, "5") in (True, False)


@given(st.fractions(-99, 99, max_denominator=50), st.sampled_from(["It is {}.", "so 7, then ({})", "={}"]))
def test_the_last_number_is_read_exactly(number, sentence):
    assert last_number(sentence.format(number)) == number
