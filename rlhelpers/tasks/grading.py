"""What a response earns, and why: find its answer box, compare the answer with the ground truth, give a `Grade`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import rlhelpers.tasks.algebra as algebra
from rlhelpers.checks import check_callable, check_kind, check_text
from rlhelpers.tasks.answers import MAX_CHARS, Boxes, last_number, read_quantity, tidy
from rlhelpers.tasks.prompts import Prompt, get_prompt

RIGHT, WRONG, UNREADABLE = "right", "wrong value", algebra.UNREADABLE

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
"""Every reason of a `Grade`, and its meaning."""

Verifier = Callable[[str, str], str]
"""(content of the answer box, ground truth) -> "right", or another of REASONS."""

_COMMAND = re.compile(
    r"\\[{}]|\\(?:[dt]?frac|sqrt|pi|infty|cup|cap|left|right|ln|log|exp|sin|cos|tan)(?![a-zA-Z])"
    r"|(?<![a-zA-Z\\])(?:sqrt|pi|ln|log|exp|sin|cos|tan)(?![a-zA-Z])"
)
_SIGN = re.compile(r"\\(?:cdot|times|div)(?![a-zA-Z])")
_UNFINISHED = re.compile(r"[-+*/^,=(\[{]$|\\[dt]?frac(?!\s*(?:\{|[0-9]\s*[0-9{]))|\\sqrt(?!\s*[{\[0-9a-zA-Z\\])")
_FORMULA = re.compile(r"[a-zA-Z0-9\s+\-*/^()\[\]{},.]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_WORD = re.compile(r"[^\W\d_]{2,}")
_SEVERAL = re.compile(r"[(\[{]?(?:\\pm)?\s*-?[0-9.]+(?:(?:[,;(\s]|\bor\b|\band\b)+-?[0-9.]+[)\]}]?)+|\\pm\s*[0-9.]+")


def verify_answer(answer: str, ground_truth: str, time_limit: float = algebra.TIME_LIMIT) -> str:
    r"""Compare an answer with the ground truth.  Return RIGHT or another of REASONS.  No text raises.

    Numbers: compared exactly, without algebra: `18`, `$18.00`, `1,800`, `1/2`, `2 1/2`, `\frac{1}{2}`.  One of the two
    may lack its unit; two units must be the same.  18% is 18, not 0.18.
    Formulas: where the ground truth is a number, a formula such as `12 + 12` or `2^{10}` is wrong: the policy has to
    learn to compute.  Where it is a formula, sympy compares: a term exactly, a list such as `2, 5, 7` in any order.
    Anything else, such as words, equations, inequalities and factorials: must repeat the ground truth, a word in any
    case.

    `time_limit`: seconds for sympy.  Raises ValueError for a limit that is not positive, and for a ground truth that
    cannot be read.
    """
    algebra.check_time_limit(time_limit)
    check_text(answer=answer)
    truth = read_truth(ground_truth)
    answer = answer.strip()
    if len(answer) > MAX_CHARS:
        return "sentence in the box" if _WORD.search(answer) else "too long"
    answer = tidy(answer)
    quantity, true_quantity = read_quantity(answer), read_quantity(truth)
    if quantity and true_quantity:
        return RIGHT if quantity.equals(true_quantity) else WRONG
    if answer == truth or (len(truth) > 1 and answer.casefold() == truth.casefold()):
        return RIGHT
    if true_quantity and _SEVERAL.fullmatch(answer):
        return "several answers"
    if true_quantity and is_formula(answer):
        return "not computed"
    if not true_quantity and is_formula(answer) and is_formula(truth):
        verdict = algebra.compare(answer, truth, time_limit)
        return {algebra.EQUAL: RIGHT, algebra.DIFFERENT: WRONG}.get(verdict, verdict)
    return WRONG if quantity else _describe(answer)


def is_right(answer: str, ground_truth: str) -> bool:
    """Whether `verify_answer` returns RIGHT."""
    return verify_answer(answer, ground_truth) == RIGHT


def read_truth(ground_truth: str) -> str:
    """Return the tidy ground truth.  Raises ValueError for one that no answer could be compared with."""
    truth = _tidy_truth(ground_truth) if isinstance(ground_truth, str) else None
    if truth is None:
        accepted = f"an answer of 1 to {MAX_CHARS} characters, none of them a control character, its braces closed"
        raise ValueError(f"ground_truth: got {str(ground_truth)[:80]!r}; accepted is {accepted}")
    return truth


@lru_cache(maxsize=10_000)
def _tidy_truth(ground_truth: str) -> str | None:
    truth = tidy(ground_truth) if len(ground_truth) <= MAX_CHARS else ""
    has_control = _CONTROL.search(ground_truth.strip(" \r\n")) or not truth.isprintable()  # a lost `\f` of `\frac`
    is_answer = re.search(r"[^\W_]", truth) and truth.count("{") == truth.count("}")
    return truth if is_answer and not has_control else None


def is_formula(text: str) -> bool:
    """Whether sympy may read the text: a finished formula that cannot blow up.

    The process that computes it can be killed, but each bomb would cost its whole time limit.  So: no word, no `!`, no
    `=`, no two numbers side by side, at most three letters and four brackets, no number of more than fifteen digits,
    no power of a power, no exponent of more than four digits, or of more than one beside a letter.
    """
    plain = _COMMAND.sub(" ", _SIGN.sub("*", text))
    letters = set(re.findall("[a-zA-Z]", plain))
    exponents = "".join(re.split(r"\^|\*\*", plain)[1:])
    return (
        bool(_FORMULA.fullmatch(plain))
        and not is_unfinished(text)
        and not re.search(r"[a-zA-Z]{2}|[0-9]{16}|[0-9}]\s+[0-9]", plain)
        and not re.search(r"(?:\^|\*\*)\s*[({]*\s*-?[\w.]+\s*[)}]*\s*(?:\^|\*\*)", plain)
        and not re.search(r"[0-9]{2}" if letters else r"[0-9]{5}", exponents)
        and len(letters) <= 3
        and plain.count("(") + plain.count("[") <= 4
    )


def is_unfinished(text: str) -> bool:
    """Whether a bracket or the end of a formula is missing."""
    opened, closed = (sum(map(text.count, signs)) for signs in ("([{", ")]}"))
    return bool(_UNFINISHED.search(_SIGN.sub("*", text))) or opened != closed


def _describe(answer: str) -> str:
    """Return the reason for an answer that is neither a number nor a formula."""
    plain = _COMMAND.sub(" ", _SIGN.sub("*", answer))
    if not answer.strip("{} "):
        return "empty box"
    if not re.search("[0-9]", answer):
        return "no number in the box"
    if _WORD.search(plain):
        return "sentence in the box"
    if re.search("[=<>≈]", plain):
        return "equation in the box"
    return "unfinished formula" if is_unfinished(answer) else UNREADABLE


@dataclass(frozen=True)
class Grade:
    """What a response earned.

    format, answer: 0.0 or 1.0.
    extracted: the content of the last box; None where it is not closed or there is none.
    reason: the first of REASONS that keeps the response from its reward, or "right".
    boxes: the number of boxes, closed or not.
    boxes_agree: whether all closed boxes hold the same number or text.  Only the last box counts, so a model that goes
    on to invent further problems can be paid by luck: read the responses whose boxes do not agree.
    """

    format: float
    answer: float
    extracted: str | None
    reason: str
    boxes: int
    boxes_agree: bool

    @property
    def rewards(self) -> dict[str, float]:
        """`format_reward`, `answer_reward` and `reward`.  The reward is the answer's: there is no partial credit."""
        return {"format_reward": self.format, "answer_reward": self.answer, "reward": self.answer}


@dataclass(frozen=True)
class Grader:
    """Grades responses to one prompt with a task's verifier.  Called, it is a reward function."""

    prompt: Prompt
    verify: Verifier = verify_answer

    def __post_init__(self):
        check_kind(Prompt, "a Prompt, such as get_prompt('r1_zero')", prompt=self.prompt)
        check_callable(verify=self.verify)

    def __call__(self, response: str, ground_truth: str) -> dict[str, float]:
        return self.grade(response, ground_truth).rewards

    def grade(self, response: str, ground_truth: str) -> Grade:
        """Grade one response.  Raises ValueError for a ground truth that cannot be read; no response raises."""
        check_text(response=response)
        boxes = self.prompt.find_boxes(response)
        answer = boxes.last if boxes.has_format else None
        verdict = self.verify(answer or "", ground_truth)  # in any case: a bad ground truth must not go unseen
        if verdict not in REASONS:
            raise ValueError(f"verify: it gave {verdict!r}; accepted are {', '.join(REASONS)}")
        reason = boxes.fault or ("box not closed" if answer is None else verdict)
        right = float(reason == RIGHT)
        return Grade(float(boxes.has_format), right, boxes.last, reason, boxes.opened, _agree(boxes))


def _agree(boxes: Boxes) -> bool:
    *others, last = boxes.contents or [""]
    return all(_are_same(tidy(other), tidy(last)) for other in set(others))


def _are_same(text: str, other: str) -> bool:
    quantity, other_quantity = read_quantity(text), read_quantity(other)
    return quantity.equals(other_quantity) if quantity and other_quantity else text == other


def grade(response: str, ground_truth: str, prompt: str = "r1_zero") -> Grade:
    """Grade a response to the prompt of that name.  Raises ValueError for an unknown prompt or an unreadable truth."""
    return Grader(get_prompt(prompt)).grade(response, ground_truth)


def r1_zero_reward_fn(response: str, ground_truth: str) -> dict[str, float]:
    """Return `format_reward`, `answer_reward` and `reward` (0.0 or 1.0) of a response to an r1 prompt."""
    return grade(response, ground_truth, "r1_zero").rewards


def question_only_reward_fn(response: str, ground_truth: str) -> dict[str, float]:
    """Return `format_reward`, `answer_reward` and `reward` (0.0 or 1.0) of a response to question_only."""
    return grade(response, ground_truth, "question_only").rewards


def probably_right(response: str, ground_truth: str) -> bool:
    """Whether the last number of the response's own turn equals the ground truth, whatever the format: never a reward.

    The rule errs both ways: a wrong response may end with the right number by chance, a right one with another number.
    False where the ground truth is not a number.  Raises ValueError for one that cannot be read.
    """
    check_text(response=response)
    truth = read_quantity(read_truth(ground_truth))
    return truth is not None and last_number(own_turn(response)) == truth.value


def own_turn(response: str) -> str:
    """Cut the response where it goes on as the user: what follows answers a question that nobody asked."""
    return response.partition("\nUser:")[0]
