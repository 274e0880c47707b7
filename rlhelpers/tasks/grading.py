"""What counts as right: from a response to its answer box, and from the box to a verdict.

A plain number is decided without algebra; anything else that looks like mathematics goes to math-verify; prose is
right only where it repeats the ground truth letter by letter.  No text is run as code.
"""

import logging
import re
from collections.abc import Callable
from fractions import Fraction

from rlhelpers.tasks.problem import RewardFn

MAX_ANSWER_CHARS = 200  # longer "answers" are prose, and costly to parse

_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)(/0*[1-9]\d*)?")
_THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+")
_ARITHMETIC_COMMANDS = re.compile(r"\\([dt]?frac|sqrt|pi|cdot|times|div|left|right|,|;|%)(?![a-zA-Z])")
_LABEL = re.compile(r"^[a-zA-Z]\s*=\s*")
_BOX = "\\boxed{"


def r1_zero_answer(response: str) -> tuple[bool, str | None]:
    """(format, answer) for the two r1 prompts.

    The format holds when the response has `</think> <answer>` and, after it, `</answer>`.  The answer is what stands
    in the last such box; a last box that is never closed holds none.
    """
    opening, closing = "</think> <answer>", "</answer>"
    if closing not in response.partition(opening)[2]:
        return False, None
    answer, closed, _ = response.rpartition(opening)[2].partition(closing)
    return True, answer if closed else None


def boxed_answer(response: str) -> tuple[bool, str | None]:
    r"""(format, answer) for question_only: what stands in the last `\boxed{...}`, braces balanced."""
    start = response.rfind(_BOX)
    depth, begin = 1, start + len(_BOX)
    for end in range(begin, len(response) if start >= 0 else begin):
        depth += {"{": 1, "}": -1}.get(response[end], 0)
        if depth == 0:
            return True, response[begin:end]
    return False, None


def make_reward_fn(find_answer, is_right: Callable[[str, str], bool]) -> RewardFn:
    """A reward function: format by `find_answer`, verdict by `is_right(answer, ground_truth)`, no partial credit."""

    def reward_fn(response: str, ground_truth: str) -> dict[str, float]:
        has_format, answer = find_answer(response)
        right = float(answer is not None and is_right(answer, ground_truth))
        return {"format_reward": float(has_format), "answer_reward": right, "reward": right}

    return reward_fn


def r1_zero_reward_fn(response: str, ground_truth: str) -> dict[str, float]:
    """`format_reward`, `answer_reward` and `reward` (0.0 or 1.0) of a response to an r1 prompt."""
    return make_reward_fn(r1_zero_answer, is_equal)(response, ground_truth)


def question_only_reward_fn(response: str, ground_truth: str) -> dict[str, float]:
    """`format_reward`, `answer_reward` and `reward` (0.0 or 1.0) of a response to the question_only prompt."""
    return make_reward_fn(boxed_answer, is_equal)(response, ground_truth)


def is_equal(answer: str, ground_truth: str) -> bool:
    """Whether an answer has the value of the ground truth.

    Never raises on any answer.  Raises ValueError on a ground truth that holds nothing, or far too much.
    """
    answer, truth = _clean(answer), _clean(ground_truth or "")
    if not truth or len(truth) > MAX_ANSWER_CHARS:
        accepted = f"an answer of 1 to {MAX_ANSWER_CHARS} characters"
        raise ValueError(f"ground_truth: got {str(ground_truth)[:80]!r}; accepted is {accepted}")
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return False
    number, true_number = plain_number(answer), plain_number(truth)
    if number is not None and true_number is not None:
        return number == true_number
    return answer == truth or (_is_short_mathematics(answer) and _equal_by_algebra(answer, truth))


def plain_number(text: str) -> Fraction | None:
    """The exact value of `18`, `-3`, `1,800`, `18.50`, `3/4`; None for anything else."""
    if _THOUSANDS.fullmatch(text.partition(".")[0]):
        text = text.replace(",", "")
    if not text.isascii() or not _NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.partition("/")
    return Fraction(numerator) / Fraction(denominator or 1)


def _clean(text: str) -> str:
    """Without surrounding space, a label such as `x =`, dollar signs, a percent sign and a final full stop."""
    text = _LABEL.sub("", text.strip().removesuffix(".").removeprefix("\\$").strip("$ \t\n"))
    return text.strip("$ ").removesuffix("%").removesuffix("\\").strip()


def _is_short_mathematics(text: str) -> bool:
    """Whether algebra may look at it: nothing but mathematics, finished, and nothing that blows up.

    Bombs are factorials and their like, towers of powers, huge numbers, high powers of symbols and long products of
    sums.  So only the LaTeX commands of plain arithmetic are let through, no `!` and no second equation, at most two
    letters and four brackets, no number of more than fifteen digits, and at most one power, with at most four digits
    after it, beside a letter at most one.
    """
    plain = _ARITHMETIC_COMMANDS.sub(" ", text)
    letters = set(re.findall(r"[^\W\d_]", plain))
    powers = re.split(r"\^|\*\*", plain)
    high_power = r"\d{2}" if letters else r"\d{5}"
    return (
        plain.isprintable()
        and not re.search(r"[\\!=]|[^\W\d_]{2}|\d{16}|[-+*/^,(\[{]$", plain)
        and len(letters) <= 2
        and sum(map(plain.count, "([")) <= 4
        and len(powers) <= 2
        and not re.search(high_power, "".join(powers[1:]))
    )


def _equal_by_algebra(answer: str, truth: str) -> bool:
    from math_verify import parse, verify  # here, because it brings sympy and most answers are plain numbers

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # math-verify's own time limits need the main thread's signals; `_is_short_mathematics` bounds the work instead.
    try:
        gold, guess = (parse(f"${text}$", parsing_timeout=None) for text in (truth, answer))
        return bool(gold and guess) and verify(gold, guess, timeout_seconds=None)
    except Exception:  # an answer that nobody can parse is not right, and must not end a run
        return False
