"""The prompts of the workbook: text files in `templates/`, one `{question}` in each.

r1_zero is the conversation of DeepSeek-R1-Zero (arXiv:2501.12948, table 1).  r1_zero_three_shot puts the
first three chain-of-thought exemplars of Wei et al. (arXiv:2201.11903, GSM8K) before the question.
question_only asks for a box and says nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlhelpers.checks import check_one_of, check_text
from rlhelpers.tasks.answers import Boxes, find_boxes, find_tags

TEMPLATES = Path(__file__).parent / "templates"
SLOT = "{question}"


@dataclass(frozen=True)
class Template:
    """A text with one `{question}`, and the string at which sampling stops (`None`: only at the end-of-text token)."""

    name: str
    template: str
    stop: str | None

    def __call__(self, question: str) -> str:
        """Put the question into the template.  Braces elsewhere, in template or question, are kept as they are."""
        check_text(question=question)
        return self.template.replace(SLOT, question)


@dataclass(frozen=True)
class Prompt(Template):
    """A template, and where a response to it holds its answer."""

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
    """The prompt called `name`.  Raises ValueError for an unknown name."""
    check_one_of(PROMPTS, prompt=name)
    return PROMPTS[name]
