"""Word problems in GSM8K's form, made by rule from the eighteen stories in `stories.json`.

A story has free numbers (first and last choice), names ({A}, {B}) and a thing ({t}).  Its solution is a chain of one to
three steps `[result, sum, sentence]`: the sum joins two earlier values, and `{sum}` in the sentence shows it.
"""

import hashlib
import json
import operator
import random
from dataclasses import dataclass
from pathlib import Path

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
_DATA = json.loads(Path(__file__).with_name("stories.json").read_text(encoding="utf-8"))
NAMES, THINGS, STORIES = _DATA["names"], _DATA["things"], _DATA["stories"]

Sum = tuple[int, str, int, int]
"""(left, operator, right, result)"""


@dataclass(frozen=True)
class Solution:
    """A question, its solution (one sentence and one sum for each step), and what the exercise is.

    `content`: the story and its numbers, without names and things.  Two problems of equal content are the same
    exercise in other words.
    """

    question: str
    sentences: tuple[str, ...]
    sums: tuple[Sum, ...]
    content: str

    @property
    def answer(self) -> str:
        return str(self.sums[-1][-1])

    def gsm8k_row(self) -> dict[str, str]:
        """Return the row as GSM8K stores it: sums annotated as in `5+3=<<5+3=8>>8`, and the answer after `####`."""
        lines = []
        for sentence, (a, op, b, c) in zip(self.sentences, self.sums, strict=True):
            lines.append(sentence.replace(f"{a}{op}{b}={c}", f"{a}{op}{b}=<<{a}{op}{b}={c}>>{c}", 1))
        return {"question": self.question, "answer": "\n".join([*lines, f"#### {self.answer}"])}


def draw_solution(rng: random.Random) -> Solution:
    """Draw a story, and numbers for which every division is exact and every value lies between 1 and 200."""
    index = rng.randrange(len(STORIES))
    story, sums = STORIES[index], None
    while sums is None:
        numbers = {name: rng.choice(range(first, last + 1)) for name, (first, last) in story["numbers"].items()}
        sums = _work_out(story["steps"], numbers)
    first, second = rng.sample(NAMES, 2)
    words = {"A": first, "B": second, "t": rng.choice(THINGS)}
    sentences = tuple(
        sentence.format(**words, sum=f"{a}{op}{b}={c}")
        for (_, _, sentence), (a, op, b, c) in zip(story["steps"], sums, strict=True)
    )
    content = f"{index}:" + ",".join(map(str, numbers.values()))
    return Solution(story["question"].format(**words, **numbers), sentences, sums, content)


def _work_out(steps: list[list[str]], numbers: dict[str, int]) -> tuple[Sum, ...] | None:
    """Compute the sums; None where a division leaves a remainder or a value leaves 1..200."""
    values, sums = dict(numbers), []
    for result, (left, op, right), _ in steps:  # a sum is three characters, such as "x+y"
        a, b = values[left], values[right]
        c = OPERATIONS[op](a, b)
        if (op == "/" and a % b) or not 1 <= c <= 200:
            return None
        values[result] = c
        sums.append((a, op, b, c))
    return tuple(sums)


def is_validation(content: str) -> bool:
    """Whether a content belongs to validation, as one in eight does, whatever names and things it is told with."""
    return hashlib.sha256(content.encode("utf-8")).digest()[0] % 8 == 0


def draw_problems(rng: random.Random, count: int, validation: bool) -> list[Solution]:
    """Draw `count` problems of distinct content from one side of the split."""
    found: dict[str, Solution] = {}
    while len(found) < count:
        solution = draw_solution(rng)
        if is_validation(solution.content) == validation:
            found.setdefault(solution.content, solution)
    return list(found.values())
