"""Why a response earned nothing, and whether it is right all the same.

The grader reads what stands in the answer box and nothing else.  Here a response that it rejects gets a reason out of a
short closed set, and a rule looks past format and wording: is the last number that the response states the right one?
"""

import re
from collections.abc import Callable
from fractions import Fraction

from rlhelpers.tasks.grading import MAX_ANSWER_CHARS, is_equal, plain_number
from rlhelpers.tasks.prompts import get_prompt

REASONS = {
    "right": "the box holds the right answer and nothing else",
    # Format reward 1, answer reward 0.
    "wrong number": "the box holds a bare number of another value",
    "unit in the box": "one number and, after it, at most three words: `18 eggs`",
    "sentence in the box": "any other words with a number among them: `She has 18.`",
    "more than a number in the box": "no word, and not one bare number: `9 * 2 = 18`",
    "no number in the box": "something without a digit",
    "empty box": "nothing, or only white space",
    "box not closed": "the last box is opened and never closed",
    # Format reward 0.
    "empty response": "nothing, or only white space",
    "no </think>": "the reasoning is never closed",
    "no <answer>": "no answer box is opened",
    "answer before </think>": "the answer box is opened before the reasoning is closed, and never again",
    "newline between tags": "a line break, where the format has one space, between `</think>` and `<answer>`",
    "no single space between tags": "no space or several between `</think>` and `<answer>`",
    "text between tags": "words between `</think>` and `<answer>`",
    "no </answer>": "the answer box is never closed",
    r"no \boxed": "question_only: no box",
}
"""Every reason that `diagnose` gives, and what it means."""

_STATED = re.compile(
    r"(?:(?<![\w)])-)?"  # a minus sign, not the one of 5-3
    r"\$?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
    r"(?:/0*[1-9][0-9]*)?",
    re.ASCII,
)
_BARE = re.compile(rf"\s*(?:{_STATED.pattern})\s*(?:\\?%)?\s*\.?\s*", re.ASCII)
_COMMAND, _WORD = re.compile(r"\\[a-zA-Z]+"), re.compile(r"[^\W\d_]+")


def diagnose(response: str, prompt: str, ground_truth: str, is_right: Callable[[str, str], bool] = is_equal) -> str:
    """The first of REASONS that keeps a response to the prompt of that name from its reward, or "right".

    `is_right(answer, ground_truth)` is the task's verdict on the answer.  Raises ValueError for an unknown prompt or a
    ground truth that `is_right` does not accept.
    """
    has_format, answer = get_prompt(prompt).find_answer(response)
    if has_format:
        right = answer is not None and is_right(answer, ground_truth)
        return "right" if right else _why_not_right(answer)
    if not response.strip():
        return "empty response"
    if prompt == "question_only":
        return "box not closed" if r"\boxed{" in response else r"no \boxed"
    return _why_no_format(response)


def _why_not_right(answer: str | None) -> str:
    if answer is None:
        return "box not closed"
    if not answer.strip():
        return "empty box"
    if not re.search("[0-9]", answer):
        return "no number in the box"
    if _BARE.fullmatch(answer.replace("$", "")):
        return "wrong number"
    before, *after = [len(_WORD.findall(part)) for part in _STATED.split(_COMMAND.sub(" ", answer))]
    if before + sum(after) == 0:
        return "more than a number in the box"
    return "unit in the box" if before == 0 and len(after) == 1 and after[0] <= 3 else "sentence in the box"


def _why_no_format(response: str) -> str:
    for tag in ("</think>", "<answer>"):
        if tag not in response:
            return f"no {tag}"
    if "</think> <answer>" in response:
        return "no </answer>"
    between, opened, _ = response.partition("</think>")[2].partition("<answer>")
    if not opened:
        return "answer before </think>"
    if between.strip():
        return "text between tags"
    return "newline between tags" if "\n" in between else "no single space between tags"


def is_right_in_substance(response: str, ground_truth: str) -> bool:
    """Whether the last number of the response's own turn has the value of the ground truth, wherever it stands.

    It is a rule and errs both ways: a wrong response may end with the right number by chance, a right one with another
    number.  A ground truth that is not a plain number is beyond it: False.
    """
    truth = plain_number(ground_truth.strip())
    return truth is not None and last_number(own_turn(response)) == truth


def own_turn(response: str) -> str:
    """The response up to where it goes on as the user: what follows answers a question that nobody asked."""
    return response.partition("\nUser:")[0]


def last_number(text: str) -> Fraction | None:
    """The exact value of the last number in a text, such as `18`, `-3`, `$1,800`, `18.50`, `3/4`; None without one."""
    stated = [number for number in _STATED.findall(text) if len(number) <= MAX_ANSWER_CHARS]
    return plain_number(stated[-1].replace("$", "").replace(",", "")) if stated else None
