"""Instructions and responses in the template of Alpaca (tatsu-lab/stanford_alpaca), which is a file in `templates/`."""

from pathlib import Path

from rlhelpers.checks import check_text
from rlhelpers.tasks.boxes import Boxes
from rlhelpers.tasks.data_files import read_texts
from rlhelpers.tasks.parsers import parse_gsm8k_response
from rlhelpers.tasks.prompts import SLOT, TEMPLATES, Prompt

INSTRUCTION, RESPONSE = "{prompt}", "{response}"


def read_template(path: Path) -> str:
    """What stands before the response, with `{question}` where the instruction goes.

    The one rule for white space: line ends are "\\n" whatever the file has, and what follows the slot of the response
    belongs to the file, not to the template.  Raises ValueError where the file is missing, has not one `{prompt}` and
    one `{response}`, or has more than white space behind the latter.
    """
    accepted = f"accepted is a UTF-8 text with one {INSTRUCTION} and, at its end, one {RESPONSE}"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # with universal line ends
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"template: {path} cannot be read ({error!r}); {accepted}") from error
    before, _, behind = text.partition(RESPONSE)
    if text.count(RESPONSE) != 1 or before.count(INSTRUCTION) != 1 or behind.strip():
        raise ValueError(f"template: got {path}; {accepted}")
    return before.replace(INSTRUCTION, SLOT)


def find_last_number(response: str) -> Boxes:
    """The last number as the only box: the answer of a response that was told of no form."""
    number = parse_gsm8k_response(response)
    return Boxes(number is not None, () if number is None else (number,), int(number is not None), number)


ALPACA = Prompt("alpaca", read_template(TEMPLATES / "alpaca.txt"), None, find_last_number)
"""ALPACA(instruction) is the text before the response.  As the prompt of a `Grader`, it takes the last number."""


def render(instruction: str, response: str) -> str:
    """The document that a model is tuned on.  Both texts are kept as they are, with braces and white space.
    Raises ValueError for what is no text."""
    check_text(instruction=instruction, response=response)
    return ALPACA(instruction) + response


def read_instructions(path: Path) -> list[tuple[str, str]]:
    """(prompt, response) of every line of a file of JSON objects with these two texts, plain or gzipped.

    Raises FileNotFoundError where it is missing, and ValueError naming file and line.
    """
    return [(row["prompt"], row["response"]) for row in read_texts(path, "prompt", "response")]
