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
_LATEX_WORDS = re.compile(r"\\[a-zA-Z]+")
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

    Never raises on any answer.  Raises ValueError on a ground truth that holds nothing.
    """
    answer, truth = _clean(answer), _clean(ground_truth or "")
    if not truth:
        raise ValueError(f"ground_truth: got {ground_truth!r}; it must hold an answer")
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
    """Without surrounding space, dollar signs, a percent sign and a final full stop."""
    text = text.strip().removesuffix(".").removeprefix("\\$").strip("$ \t\n")
    return text.removesuffix("%").removesuffix("\\").strip()


def _is_short_mathematics(text: str) -> bool:
    """No words beside LaTeX commands, nothing left unfinished, and nothing that blows up when it is worked out.

    Bombs are factorials, towers of powers, huge numbers, and high powers of symbols: no `!`, no number of more than
    fifteen digits, at most one power, and after it at most four digits, beside a letter at most one.
    """
    has_words = re.search(r"[^\W\d_]{2,}", _LATEX_WORDS.sub(" ", text))
    powers = re.split(r"\^|\*\*", text)
    has_symbols = re.search(r"[^\W\d_]", _LATEX_WORDS.sub(" ", text))
    high_power = r"\d{2}" if has_symbols else r"\d{5}"
    is_bomb = "!" in text or re.search(r"\d{16}", text) or len(powers) > 2 or re.search(high_power, "".join(powers[1:]))
    is_unfinished = re.search(r"[-+*/^=,(\[{]$", text)
    return not (has_words or is_unfinished or is_bomb)


def _equal_by_algebra(answer: str, truth: str) -> bool:
    from math_verify import parse, verify  # here, because it brings sympy and most answers are plain numbers

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # math-verify's own time limits need the main thread's signals; `_is_short_mathematics` bounds the work instead.
    try:
        gold, guess = (parse(f"${text}$", parsing_timeout=None) for text in (truth, answer))
        return bool(gold and guess) and verify(gold, guess, timeout_seconds=None)
    except Exception:  # an answer that nobody can parse is not right, and must not end a run
        return False
