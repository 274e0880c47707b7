"""What a response earns, and why: from the response to its answer box, and from the box to a `Grade`."""

from collections.abc import Callable
from dataclasses import dataclass

from rlhelpers.checks import check_callable, check_kind, check_text
from rlhelpers.tasks.boxes import CLOSE_TAG, OPEN_TAG, THINK_AND_ANSWER, Boxes
from rlhelpers.tasks.judging import RIGHT, UNREADABLE, WRONG, judge_answer
from rlhelpers.tasks.prompts import Prompt, get_prompt
from rlhelpers.tasks.quantity import read_quantity, tidy

REASONS = {
    RIGHT: "the box holds the right answer and nothing else",
    # Format reward 1, answer reward 0.
    WRONG: "one number or formula of another value, or with another unit",
    "sentence in the box": "words with a number among them: `She has 18.`",
    "equation in the box": "no word, and a sign of equality or inequality: `9 * 2 = 18`",
    "not computed": "a formula where a number is asked for: `9 * 2`",
    "several answers": "two numbers or more: `18 or 19`",
    "no number in the box": "something without a digit",
    "unfinished formula": "something is missing at its end, or a bracket: `9 *`",
    UNREADABLE: "anything else that is neither a number nor a formula",
    "too long": "more than 200 characters, and no word",
    "timed out": "sympy did not come to an end with it",
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
"""Every reason of a `Grade`, and what it means."""

Judge = Callable[[str, str], str]
"""(what the box holds, ground truth) -> "right", or another of REASONS."""


@dataclass(frozen=True)
class Grade:
    """What a response earned.

    `format`, `answer`: 0.0 or 1.0.  `extracted`: what its last box holds, None where there is none that is closed.
    `reason`: the first of REASONS that keeps it from its reward, or "right".  `boxes`: how many it opened;
    `boxes_agree`: whether all that are closed hold the same number or text.  Only the last one counts, so a model that
    goes on to invent further problems can be paid by luck: look at those that do not agree.
    """

    format: float
    answer: float
    extracted: str | None
    reason: str
    boxes: int
    boxes_agree: bool

    @property
    def rewards(self) -> dict[str, float]:
        """`format_reward`, `answer_reward` and `reward`, which is the answer's: there is no partial credit."""
        return {"format_reward": self.format, "answer_reward": self.answer, "reward": self.answer}


@dataclass(frozen=True)
class Grader:
    """Grades responses to one prompt by a task's verdict on answers; called, it is a reward function."""

    prompt: Prompt
    judge: Judge = judge_answer

    def __post_init__(self):
        check_kind(Prompt, "a Prompt, such as get_prompt('r1_zero')", prompt=self.prompt)
        check_callable(judge=self.judge)

    def __call__(self, response: str, ground_truth: str) -> dict[str, float]:
        return self.grade(response, ground_truth).rewards

    def grade(self, response: str, ground_truth: str) -> Grade:
        """Raises ValueError for a ground truth that the judge cannot read, and never for a text as response."""
        check_text(response=response)
        boxes = self.prompt.find_boxes(response)
        answer = boxes.last if boxes.has_format else None
        verdict = self.judge(answer or "", ground_truth)  # in any case: a bad ground truth must not stay unseen
        if verdict not in REASONS:
            raise ValueError(f"judge: it gave {verdict!r}; accepted are {', '.join(REASONS)}")
        if not boxes.has_format:
            reason = _why_no_format(response, boxes, self.prompt)
        else:
            reason = "box not closed" if answer is None else verdict
        right = float(reason == RIGHT)
        return Grade(float(boxes.has_format), right, boxes.last, reason, boxes.opened, _agree(boxes))


def grade(response: str, ground_truth: str, prompt: str = "r1_zero") -> Grade:
    """The grade of a response to the prompt of that name.  Raises ValueError for an unknown prompt, or a ground truth
    that cannot be read."""
    return Grader(get_prompt(prompt)).grade(response, ground_truth)


def r1_zero_reward_fn(response: str, ground_truth: str) -> dict[str, float]:
    """`format_reward`, `answer_reward` and `reward` (0.0 or 1.0) of a response to an r1 prompt."""
    return grade(response, ground_truth, "r1_zero").rewards


def question_only_reward_fn(response: str, ground_truth: str) -> dict[str, float]:
    """`format_reward`, `answer_reward` and `reward` (0.0 or 1.0) of a response to the question_only prompt."""
    return grade(response, ground_truth, "question_only").rewards


def _agree(boxes: Boxes) -> bool:
    *others, last = boxes.contents or [""]
    return all(_are_same(tidy(other), tidy(last)) for other in set(others))


def _are_same(text: str, other: str) -> bool:
    quantity, other_quantity = read_quantity(text), read_quantity(other)
    return quantity.equals(other_quantity) if quantity and other_quantity else text == other


def _why_no_format(response: str, boxes: Boxes, prompt: Prompt) -> str:
    if not response.strip():
        return "empty response"
    if prompt.name == "question_only":
        return "box not closed" if boxes.opened else r"no \boxed"
    if prompt.name == "alpaca":
        return "no number in the box"  # its box is the last number
    for tag in ("</think>", OPEN_TAG):
        if tag not in response:
            return f"no {tag}"
    if THINK_AND_ANSWER in response:
        return f"no {CLOSE_TAG}"
    between, opened, _ = response.partition("</think>")[2].partition(OPEN_TAG)
    if not opened:
        return "answer before </think>"
    if between.strip():
        return "text between tags"
    return "newline between tags" if "\n" in between else "no single space between tags"
