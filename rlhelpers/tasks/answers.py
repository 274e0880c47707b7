r"""Where an answer stands in a response, and which number it is.

1. The answer box: between the answer tags of the r1 prompts, or in a LaTeX `\boxed{}`.
2. A quantity, read exactly: `18`, `$1,800.00`, `1 800`, `-3/4`, `2 1/2`, `\frac{1}{2}`, `18 dollars`, `x = 18`, `35%`.
3. Free text without a box: its last number, or the letter of a choice.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rlhelpers.checks import check_text

MAX_CHARS = 200  # a longer "number" is prose, or a trap

THINK_AND_ANSWER, OPEN_TAG, CLOSE_TAG = "</think> <answer>", "<answer>", "</answer>"
_BRACE = re.compile(r"\\boxed\s*\{|(?<!\\)\\[{}]|[{}]")  # `\\{` is a brace after a line break


@dataclass(frozen=True)
class Boxes:
    """The answer boxes of a response.

    fault: the first fault of its format (one of grading.REASONS); None where the format holds.
    contents: the first MAX_CHARS characters of every closed box, in order.
    opened: the number of boxes, closed or not.
    last: the whole content of the last box; None where it is not closed or there is none.
    """

    fault: str | None
    contents: tuple[str, ...]
    opened: int
    last: str | None

    @property
    def has_format(self) -> bool:
        return self.fault is None


def find_tags(response: str) -> Boxes:
    """Find answer tags.  The format holds when the response has `</think> <answer>` and, after it, `</answer>`."""
    pieces = [piece.partition(CLOSE_TAG) for piece in response.split(OPEN_TAG)[1:]]
    has_format = CLOSE_TAG in response.partition(THINK_AND_ANSWER)[2]
    contents = tuple(inside[:MAX_CHARS] for inside, closed, _ in pieces if closed)
    last = pieces[-1][0] if pieces and pieces[-1][1] else None
    return Boxes(None if has_format else _fault_of_tags(response), contents, len(pieces), last)


def _fault_of_tags(response: str) -> str:
    if not response.strip():
        return "empty response"
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


def find_boxes(response: str) -> Boxes:
    r"""Find boxes, `\boxed{...}` with balanced braces.  The format holds when the last opened box is closed."""
    closed, open_braces = {}, []  # spans, not texts: nested boxes would copy the same text again and again
    for brace in _BRACE.finditer(response):
        if brace[0].startswith(r"\boxed"):
            open_braces.append(brace)
        elif brace[0] == "{":
            open_braces.append(None)
        elif brace[0] == "}" and open_braces:
            opening = open_braces.pop()
            if opening is not None:
                closed[opening.start()] = opening.end(), brace.start()
    starts = sorted([*closed, *(opening.start() for opening in open_braces if opening is not None)])
    contents = tuple(response[begin : min(end, begin + MAX_CHARS)] for _, (begin, end) in sorted(closed.items()))
    if starts and starts[-1] in closed:
        return Boxes(None, contents, len(starts), response[slice(*closed[starts[-1]])])
    fault = "box not closed" if starts else r"no \boxed" if response.strip() else "empty response"
    return Boxes(fault, contents, len(starts), None)


def find_last_number(response: str) -> Boxes:
    """Take the last number as the only box: for a prompt that asks for no format."""
    number = parse_gsm8k_response(response)
    if number is None:
        return Boxes("no number in the box" if response.strip() else "empty response", (), 0, None)
    return Boxes(None, (number,), 1, number)


# One spelling for one sign: full-width characters, minus signs, spaces.  Currency is dropped: $18 is 18.
_ONE_SIGN = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_ONE_SIGN |= dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000€£¥₹¢"), " ")
_ONE_SIGN |= str.maketrans({"\u2212": "-", "×": "*", "÷": "/", "⁄": "/", "π": r"\pi "})
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
_SPACES = re.compile(r"\\\\(?![a-zA-Z])|\\[,;:!> ]|\\q?quad(?![a-zA-Z])|~|\\?\$")
_BRACED = r"\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"  # with braces in it, such as those of \frac{1}{2}
_STYLED = re.compile(rf"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|boxed)\s*{_BRACED}")
_WRAPPED = re.compile(rf"(\*\*|[*`\"'])(.*)\1|\\\((.*)\\\)|\\\[(.*)\\\]|{_BRACED}|\(([^(),]*)\)", re.DOTALL)
_LABEL = re.compile(r"^[a-zA-Z]{1,2}\s*=(?!=)\s*")

_FRACTION_COMMAND = re.compile(r"\\[dt]?frac\s*(?:\{\s*((?:-\s*)?[\d.,]*)\s*\}|(\d))\s*(?:\{\s*([\d.,]*)\s*\}|(\d))")
_DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?:\ [0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_QUANTITY = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>[0-9]+)\s+(?=[0-9]+\s*/))?(?P<top>{_DECIMAL})"
    rf"(?:\s*/\s*(?P<bottom>{_DECIMAL}))?(?P<unit>.*)",
    re.DOTALL,
)
_UNIT = re.compile(r"°?[^\W\d_]+[.'’]?(?:[ /&-]+[^\W\d_]+[.'’]?){0,2}|°|%")
_PERCENT = re.compile(r"%|per\s?cent", re.IGNORECASE)
# `5 m` is five metres and `5m/s` a speed, but `5m`, `5 x`, `5xy`, `5x-y` are formulas.
_SYMBOL = re.compile(r"°?[mgslhLCFKWVAN][²³]?(?:/[mgslh][²³]?)?")
_VARIABLES = re.compile(r"(?:[^\W\d_²³]|(?!cc)[a-cx-z]{2,3})[²³]?")
# With these the number is not the whole answer: 18 and a half, 2 or three, 3 million, 3 eighths, 2 pi.
_NO_UNIT = re.compile(
    r"\b(?:or|not|no|isn|is|wrong|incorrect|plus|minus|times|over|point|squared|cubed|factorial"
    r"|pi|sqrt|ln|log|exp|sin|cos|tan|mod|nan|inf|infinity|zero|(?:one|two|three|four|five|six|seven|eight|nine)s?"
    r"|(?:ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen)s?|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
    r"|half|halves|(?:third|quarter|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)th)s?"
    r"|(?:hundred|thousand|lakh|million|crore|billion|trillion)s?|mil|mln|bn|(?:and|than|of|to)$)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Quantity:
    """An exact value and its unit: words in lower case, "%", or "" for a bare number."""

    value: Fraction
    unit: str = ""

    def equals(self, other: "Quantity") -> bool:
        """Compare value and unit.  A number without a unit has any unit.  18% is 18, not 0.18."""
        return self.value == other.value and (self.unit == other.unit or not self.unit or not other.unit)


def tidy(text: str) -> str:
    r"""Remove what surrounds an answer: space, `$`, bold, quotes, `\text{}`, a label such as `x =`, a final full stop,
    a stray closing bracket."""
    if not text.isascii():
        text = _VULGAR_FRACTION.sub(lambda sign: " " + unicodedata.normalize("NFKC", sign[0]), text)
        text = text.translate(_ONE_SIGN)
        text = re.sub(r"^\s*–", "-", text)  # a dash elsewhere may be a range
    text = _SPACES.sub(" ", text).replace("{,}", ",").replace(r"\%", "%")
    return _peel(_LABEL.sub("", _peel(text), count=1))


def _peel(text: str) -> str:
    peeled = _without_outer_layer(text)
    while peeled != text:
        text, peeled = peeled, _without_outer_layer(peeled)
    return text


def _without_outer_layer(text: str) -> str:
    text = _STYLED.sub(r" \1 ", text).strip()
    if match := _WRAPPED.fullmatch(text):
        return next(part for part in match.groups()[1:] if part is not None)
    is_stray = text.endswith((")", "]")) and "(" not in text and "[" not in text  # [0, 1) is a half-open interval
    return text[:-1] if text.endswith(".") or is_stray else text


def read_quantity(text: str) -> Quantity | None:
    """Read a tidy text as a quantity; None where it is anything else, or anything more."""
    return _read(text) if len(text) <= MAX_CHARS else None


@lru_cache(maxsize=10_000)
def _read(text: str) -> Quantity | None:
    match = _QUANTITY.fullmatch(_FRACTION_COMMAND.sub(r" \1\2/\3\4 ", text).strip())
    if match is None:
        return None
    unit = _read_unit(match["unit"])
    top, bottom = _exact(match["top"]), _exact(match["bottom"] or "1")
    if unit is None or not bottom:
        return None
    value = Fraction(match["whole"] or 0) + top / bottom
    return Quantity(-value if match["sign"] == "-" else value, unit)


def _exact(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", "").replace(" ", ""))


def _read_unit(text: str) -> str | None:
    """Read the text after a number as a unit of at most three words; None where it is no unit."""
    unit = text.strip()
    if not unit:
        return ""
    if _PERCENT.fullmatch(unit):
        return "%"
    if not _UNIT.fullmatch(unit) or _NO_UNIT.search(unit) or _has_number(unit):
        return None
    words = re.findall(r"[^\W\d_]+", unit)
    is_attached_letter = len(text) == 1 and text.isalpha()
    if words and all(map(_VARIABLES.fullmatch, words)) and (is_attached_letter or not _SYMBOL.fullmatch(unit)):
        return None
    name = " ".join(words).lower() or unit
    return name.removesuffix("s") if len(name) > 3 else name


def _has_number(unit: str) -> bool:
    """Find numbers that `re` takes for letters: 18², 18万.  But m² is a unit."""
    base = unit.rstrip("²³")
    return not base or any(map(str.isnumeric, base))


_STATED = re.compile(
    r"(?:(?<![\w)])-)?"  # a minus sign, not the one of 5-3
    r"\$?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
    r"(?:/0*[1-9][0-9]*)?",
    re.ASCII,
)
_LETTER = re.compile(r"(?i:answer\s+is)[\s:]*[(\[\"'*]*([A-D])(?![\w'’])|^\s*[(\[*]*([A-D])(?:[)\].:*]|\s*$)")


def last_number(text: str) -> Fraction | None:
    """Return the exact value of the last number in a text; None without one."""
    number = _last_stated(text)
    if number is None:
        return None
    top, _, bottom = number.partition("/")
    return Fraction(top) / Fraction(bottom or 1)


def _last_stated(text: str) -> str | None:
    """Return the last of `18`, `-3`, `$1,800`, `18.50`, `3/4` in a text, without `$` and commas."""
    numbers = (match.replace("$", "").replace(",", "") for match in reversed(_STATED.findall(text)))
    return next((number for number in numbers if len(number) <= MAX_CHARS), None)


def parse_mmlu_response(model_output: str) -> str | None:
    """Return the letter A to D of a multiple-choice answer; None where there is none.

    It is the letter after the first "the (correct) answer is", or the one that opens the text as a choice does (`B.`,
    `(B)`).
    """
    check_text(model_output=model_output)
    match = _LETTER.search(model_output)
    return match and (match[1] or match[2])


def parse_gsm8k_response(model_output: str) -> str | None:
    """Return the last number of the text, without `$` and thousands commas: "72", "-3", "18.50"; None without one."""
    check_text(model_output=model_output)
    return _last_stated(model_output)
