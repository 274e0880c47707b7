"""Whether a response is right in substance, whatever its form: a second opinion, and never a reward.

The grader reads what stands in the answer box and nothing else.  This rule looks past format and wording: is the last
number that the response states the right one?
"""

import re
from fractions import Fraction

from rlhelpers.checks import check_text
from rlhelpers.tasks.judging import read_truth
from rlhelpers.tasks.quantity import MAX_CHARS, read_quantity

_STATED = re.compile(
    r"(?:(?<![\w)])-)?"  # a minus sign, not the one of 5-3
    r"\$?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
    r"(?:/0*[1-9][0-9]*)?",
    re.ASCII,
)


def probably_right(response: str, ground_truth: str) -> bool:
    """Whether the last number of the response's own turn has the value of the ground truth, wherever it stands.

    It is a rule and errs both ways: a wrong response may end with the right number by chance, a right one with another
    number.  A ground truth that is not a number is beyond it: False.  Raises ValueError for one that cannot be read.
    """
    check_text(response=response)
    truth = read_quantity(read_truth(ground_truth))
    return truth is not None and last_number(own_turn(response)) == truth.value


def own_turn(response: str) -> str:
    """The response up to where it goes on as the user: what follows answers a question that nobody asked."""
    return response.partition("\nUser:")[0]


def last_number(text: str) -> Fraction | None:
    """The exact value of the last number in a text; None without one."""
    numbers = stated_numbers(text)
    if not numbers:
        return None
    top, _, bottom = numbers[-1].partition("/")
    return Fraction(top) / Fraction(bottom or 1)


def stated_numbers(text: str) -> list[str]:
    """The numbers in a text, `18`, `-3`, `$1,800`, `18.50`, `3/4`, in order, without `$` and commas."""
    numbers = (match.replace("$", "").replace(",", "") for match in _STATED.findall(text))
    return [number for number in numbers if len(number) <= MAX_CHARS]
