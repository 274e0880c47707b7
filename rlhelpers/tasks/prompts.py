"""The prompts: text files in `templates/`, each with one place for a question.

r1_zero             the conversation of DeepSeek-R1-Zero (arXiv:2501.12948, table 1)
r1_zero_three_shot  the same, with the first three exemplars of Wei et al. (arXiv:2201.11903, GSM8K) before the question
question_only       asks for a box and says nothing else
alpaca              instruction tuning's template (tatsu-lab/stanford_alpaca)
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlhelpers.checks import check_one_of, check_text
from rlhelpers.tasks.answers import Boxes, find_boxes, find_last_number, find_tags

TEMPLATES = Path(__file__).parent / "templates"
SLOT = "{question}"


@dataclass(frozen=True)
class Template:
    """A text with one `{question}`, and the stop string of sampling (None: only the end-of-text token stops it)."""

    name: str
    template: str
    stop: str | None

    def __call__(self, question: str) -> str:
        """Put the question into the template.  Other braces stay as they are."""
        check_text(question=question)
        return self.template.replace(SLOT, question)


@dataclass(frozen=True)
class Prompt(Template):
    """A template, and the function that finds the answer boxes of a response to it."""

    find_boxes: Callable[[str], Boxes]


def _prompt(name: str, stop: str | None, find) -> Prompt:
    # The final newline belongs to the file, not to the prompt: a model continues right after "<think>".
    template = (TEMPLATES / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")
    return Prompt(name, template, stop, find)


PROMPTS = {
    prompt.name: prompt
    for prompt in (
        _prompt("r1_zero", "</answer>", find_tags),
        _prompt("r1_zero_three_shot", "</answer>", find_tags),
        _prompt("question_only", None, find_boxes),
    )
}


def get_prompt(name: str) -> Prompt:
    """Return the prompt called `name`.  Raises ValueError for an unknown name."""
    check_one_of(PROMPTS, prompt=name)
    return PROMPTS[name]


def read_alpaca(path: Path) -> str:
    """Read Alpaca's template up to its `{response}`.  Line ends are "\\n" whatever the file has."""
    text = path.read_text(encoding="utf-8-sig")  # with universal line ends
    return text.partition("{response}")[0].replace("{prompt}", SLOT)


ALPACA = Prompt("alpaca", read_alpaca(TEMPLATES / "alpaca.txt"), None, find_last_number)
"""ALPACA(instruction) is the text before the response.  As the prompt of a `Grader`, it takes the last number."""


def render(instruction: str, response: str) -> str:
    """Join instruction and response to the document that a model is tuned on.  Raises ValueError for other than texts.

    Both are kept as they are, with braces and white space.
    """
    check_text(instruction=instruction, response=response)
    return ALPACA(instruction) + response
