"""Answers in free text, as the supplement of the assignment reads them: no box, no tags."""

import re

from rlhelpers.checks import check_text
from rlhelpers.tasks.second_opinion import stated_numbers

_LETTER = re.compile(r"(?i:answer\s+is)[\s:]*[(\[\"'*]*([A-D])(?![\w'’])|^\s*[(\[*]*([A-D])(?:[)\].:*]|\s*$)")


def parse_mmlu_response(model_output: str) -> str | None:
    """The letter A to D that the first "the (correct) answer is" names, or with which the text opens as a choice
    does (`B.`, `(B)`); None where there is neither."""
    check_text(model_output=model_output)
    match = _LETTER.search(model_output)
    return match and (match[1] or match[2])


def parse_gsm8k_response(model_output: str) -> str | None:
    """The last number of the text, without `$` and thousands commas: "72", "-3", "18.50"; None without one."""
    check_text(model_output=model_output)
    numbers = stated_numbers(model_output)
    return numbers[-1] if numbers else None
