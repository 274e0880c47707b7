"""Whether what stands in an answer box has the value of the ground truth, and if not, what stands there instead."""

import re
from functools import lru_cache

from rlhelpers.checks import check_text
from rlhelpers.tasks import algebra
from rlhelpers.tasks.quantity import MAX_CHARS, read_quantity, tidy

RIGHT, WRONG, UNREADABLE = "right", "wrong value", algebra.UNREADABLE

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


def judge_answer(answer: str, ground_truth: str, time_limit: float = algebra.TIME_LIMIT) -> str:
    r"""RIGHT, or one of the reasons why an answer is not (grading.REASONS).  Never raises on a text.

    A number is compared exactly, without algebra: `18`, `$18.00`, `1,800`, `1/2`, `2 1/2`, `\frac{1}{2}`; a unit may
    be missing on one side, and two units must be the same.  18% is 18, not 0.18.  Where a number is asked for, a
    formula such as `12 + 12` or `2^{10}` is not paid: whoever is paid for it need not learn to compute.  Where a
    formula is asked for, sympy compares: a term exactly, a list such as `2, 5, 7` in any order.  Anything else is
    right where it repeats the ground truth, a word in any case; that goes for equations, inequalities and factorials.

    `time_limit`: seconds that sympy may take.  Raises ValueError for one that is not positive, and for a ground
    truth that cannot be read.
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
    return WRONG if quantity else what_stands_there(answer)


def is_equal(answer: str, ground_truth: str) -> bool:
    """Whether `judge_answer` calls it right."""
    return judge_answer(answer, ground_truth) == RIGHT


def read_truth(ground_truth: str) -> str:
    """The ground truth, tidy.  Raises ValueError for one that no answer could be held against."""
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
    """Whether sympy may look at it: a finished formula and no word, and nothing that is known to blow up.

    The process that computes it can be killed, but each bomb would cost its whole time limit.  So there is no `!` and
    no `=`, no two numbers side by side, at most three letters and four brackets, no number of more than fifteen
    digits, no power of a power, and no exponent of more than four digits, or of more than one beside a letter.
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
    opened, closed = (sum(map(text.count, signs)) for signs in ("([{", ")]}"))
    return bool(_UNFINISHED.search(_SIGN.sub("*", text))) or opened != closed


def what_stands_there(answer: str) -> str:
    """A reason for an answer that is neither a number nor a formula."""
    plain = _COMMAND.sub(" ", _SIGN.sub("*", answer))
    has_digit = re.search("[0-9]", answer)
    if not answer.strip("{} "):
        return "empty box"
    if not has_digit:
        return "no number in the box"
    if _WORD.search(plain):
        return "sentence in the box"
    if re.search("[=<>≈]", plain):
        return "equation in the box"
    return "unfinished formula" if is_unfinished(answer) else UNREADABLE
