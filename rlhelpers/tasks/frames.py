"""What is put around an instruction when a model is asked without examples, and which part of what it writes answers.

QUERY_ANSWER is the system prompt of the supplement of the handout, section 2, word for word, because scores under
another wording could not be compared with anyone's.  It is URIAL's prompt without its examples (arXiv:2312.01552),
whose rules of conduct go back to the system prompt of Llama 2 (arXiv:2307.09288).
"""

from dataclasses import dataclass

from rlhelpers.tasks.prompts import TEMPLATES, Template


@dataclass(frozen=True)
class Frame(Template):
    """A template for an instruction, and the fence that closes an answer, where the template opens one."""

    fence: str = ""

    def answer(self, generation: str) -> str:
        """What of a generation answers: all before the stop string, without the closing fence at its end and the white
        space around.  Other fences stay: an answer may hold code."""
        text = generation.partition(self.stop)[0] if self.stop else generation
        return text.strip().removesuffix(self.fence).rstrip()


# The final newline is part of this prompt: the model's answer begins on the line after the fence.
QUERY_ANSWER = Frame(
    "query_answer", (TEMPLATES / "query_answer.txt").read_text(encoding="utf-8"), stop="# Query:", fence="```"
)
