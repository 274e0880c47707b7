"""Word problems in GSM8K's shape, made by rule: eighteen stories with free numbers, names and things.

A story's solution is a chain of one to three sums; each sum is written as GSM8K writes it, `5+3=<<5+3=8>>8`.
"""

import hashlib
import operator
import random
import re
from dataclasses import dataclass

# fmt: off
NAMES = [
    "Ada", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Iris", "Jonas", "Kira", "Liam", "Maya",
    "Noah", "Olga", "Pablo", "Quinn", "Rosa", "Sam", "Tara", "Uma", "Victor", "Wendy", "Xavier", "Yara", "Zane",
    "Lena", "Omar",
]
THINGS = [
    "apples", "books", "cards", "coins", "cookies", "eggs", "flowers", "marbles", "pencils", "plums", "shells",
    "stamps", "stickers", "toys", "beads", "buttons", "carrots", "lemons",
]
# fmt: on
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
SUM = re.compile(r"(\w+)([-+*/])(\w+)")
SMALL, MEDIUM, LARGE = range(2, 10), range(3, 21), range(10, 51)


@dataclass(frozen=True)
class Story:
    """`steps` are (result, sum, sentence): the sum joins two earlier values, `{sum}` in the sentence shows it."""

    question: str
    numbers: dict[str, range]
    steps: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Solution:
    """A question, the sentences that solve it (sums written without GSM8K's annotations), and the answer.

    `sums` holds one (left, operator, right, result) for each sentence; `content` is the story and its numbers,
    without names and things: two problems of equal content are the same exercise in other words."""

    question: str
    sentences: tuple[str, ...]
    sums: tuple[tuple[int, str, int, int], ...]
    content: str

    @property
    def answer(self) -> str:
        return str(self.sums[-1][-1])

    def gsm8k_row(self) -> dict[str, str]:
        """The row as GSM8K stores it: annotated sums, and the answer after `####`."""
        lines = []
        for sentence, (a, op, b, c) in zip(self.sentences, self.sums, strict=True):
            lines.append(sentence.replace(f"{a}{op}{b}={c}", f"{a}{op}{b}=<<{a}{op}{b}={c}>>{c}", 1))
        return {"question": self.question, "answer": "\n".join([*lines, f"#### {self.answer}"])}


def _story(question: str, numbers: dict[str, range], *steps: tuple[str, str, str]) -> Story:
    return Story(question, numbers, steps)


STORIES = (
    # One step.
    _story(
        "{A} has {x} {t}. {B} gives {A} {y} more. How many {t} does {A} have now?",
        {"x": MEDIUM, "y": MEDIUM},
        ("r", "x+y", "{A} has {sum} {t}."),
    ),
    _story(
        "{A} had {x} {t} and lost {y} of them. How many {t} are left?",
        {"x": LARGE, "y": SMALL},
        ("r", "x-y", "There are {sum} {t} left."),
    ),
    _story(
        "There are {x} boxes with {y} {t} in each box. How many {t} are there in all?",
        {"x": SMALL, "y": range(2, 13)},
        ("r", "x*y", "There are {sum} {t}."),
    ),
    _story(
        "{A} has {x} {t} and {B} has {y} {t}. How many {t} do they have together?",
        {"x": MEDIUM, "y": MEDIUM},
        ("r", "x+y", "They have {sum} {t}."),
    ),
    _story(
        "{A} reads {x} pages every day. How many pages does {A} read in {y} days?",
        {"x": range(3, 13), "y": SMALL},
        ("r", "x*y", "{A} reads {sum} pages."),
    ),
    _story(
        "{A} wants {x} {t} and has {y} so far. How many more {t} does {A} need?",
        {"x": range(21, 51), "y": MEDIUM},
        ("r", "x-y", "{A} needs {sum} more."),
    ),
    # Two steps.
    _story(
        "{A} has {x} {t}. {B} has {y} more {t} than {A}. How many {t} do they have together?",
        {"x": MEDIUM, "y": SMALL},
        ("b", "x+y", "{B} has {sum} {t}."),
        ("r", "x+b", "Together they have {sum}."),
    ),
    _story(
        "{A} buys {x} bags of {t} with {y} in each bag. {A} gives {z} to {B}. How many {t} does {A} keep?",
        {"x": SMALL, "y": range(4, 11), "z": range(2, 8)},
        ("a", "x*y", "{A} buys {sum} {t}."),
        ("r", "a-z", "{A} keeps {sum}."),
    ),
    _story(
        "{A} had {x} {t}, found {y} more and then sold {z}. How many {t} does {A} have now?",
        {"x": MEDIUM, "y": MEDIUM, "z": range(2, 6)},
        ("a", "x+y", "{A} had {sum} {t}."),
        ("r", "a-z", "Now {A} has {sum}."),
    ),
    _story(
        "{A} sells {x} {t} for {y} dollars each and already had {z} dollars. How many dollars does {A} have now?",
        {"x": SMALL, "y": SMALL, "z": MEDIUM},
        ("a", "x*y", "{A} earns {sum} dollars."),
        ("r", "a+z", "Now {A} has {sum} dollars."),
    ),
    _story(
        "{A} has {x} {t}. {B} has {y} times as many. How many {t} do they have together?",
        {"x": range(2, 13), "y": range(2, 6)},
        ("b", "x*y", "{B} has {sum} {t}."),
        ("r", "x+b", "Together they have {sum}."),
    ),
    _story(
        "{A} saves {x} dollars a week for {y} weeks and spends {z} dollars. How many dollars are left?",
        {"x": range(4, 12), "y": SMALL, "z": range(2, 8)},
        ("a", "x*y", "{A} saves {sum} dollars."),
        ("r", "a-z", "There are {sum} dollars left."),
    ),
    _story(
        "A shelf holds {x} red {t} and {y} blue {t}. {A} takes {z} away. How many {t} are left?",
        {"x": MEDIUM, "y": MEDIUM, "z": range(2, 6)},
        ("a", "x+y", "There are {sum} {t}."),
        ("r", "a-z", "There are {sum} left."),
    ),
    _story(
        "{A} makes {x} {t} and {B} makes {y}. They put them all into bags of {z}. How many bags do they fill?",
        {"x": MEDIUM, "y": MEDIUM, "z": range(2, 7)},
        ("a", "x+y", "They make {sum} {t}."),
        ("r", "a/z", "They fill {sum} bags."),
    ),
    # Three steps.
    _story(
        "{A} has {x} {t}. {B} has {y} times as many. They give away {z} in all. How many {t} are left?",
        {"x": range(2, 11), "y": range(2, 6), "z": range(2, 6)},
        ("b", "x*y", "{B} has {sum} {t}."),
        ("a", "x+b", "Together they have {sum}."),
        ("r", "a-z", "There are {sum} left."),
    ),
    _story(
        "{A} buys {x} packs of {y} {t} and {B} buys {z} packs of {w} {t}. How many {t} do they buy?",
        {"x": range(2, 7), "y": range(2, 9), "z": range(2, 7), "w": range(2, 9)},
        ("a", "x*y", "{A} buys {sum} {t}."),
        ("b", "z*w", "{B} buys {sum}."),
        ("r", "a+b", "They buy {sum} {t}."),
    ),
    _story(
        "{A} picks {x} {t} in the morning and {y} more than that in the afternoon. {A} eats {z}. "
        "How many {t} are left?",
        {"x": MEDIUM, "y": SMALL, "z": range(2, 6)},
        ("a", "x+y", "{A} picks {sum} in the afternoon."),
        ("b", "x+a", "That is {sum} {t}."),
        ("r", "b-z", "There are {sum} left."),
    ),
    _story(
        "Each of {x} friends has {y} {t}. They get {z} more, then share them all with equal parts for {w} "
        "people. How many {t} does each one get?",
        {"x": SMALL, "y": SMALL, "z": range(2, 11), "w": range(2, 6)},
        ("a", "x*y", "They have {sum} {t}."),
        ("b", "a+z", "Then they have {sum}."),
        ("r", "b/w", "Each one gets {sum}."),
    ),
)


def draw_solution(rng: random.Random) -> Solution:
    """One story with numbers for which every division is exact and every value lies between 1 and 200."""
    index = rng.randrange(len(STORIES))
    story = STORIES[index]
    while True:
        numbers = {name: rng.choice(choices) for name, choices in story.numbers.items()}
        sums = _work_out(story, numbers)
        if sums is not None:
            break
    first, second = rng.sample(NAMES, 2)
    words = {"A": first, "B": second, "t": rng.choice(THINGS)}
    sentences = tuple(
        sentence.format(**words, sum=f"{a}{op}{b}={c}")
        for (_, _, sentence), (a, op, b, c) in zip(story.steps, sums, strict=True)
    )
    content = f"{index}:" + ",".join(str(n) for n in numbers.values())
    return Solution(story.question.format(**words, **numbers), sentences, sums, content)


def _work_out(story: Story, numbers: dict[str, int]) -> tuple[tuple[int, str, int, int], ...] | None:
    """The sums of the solution, or None where a division leaves a rest or a value leaves 1..200."""
    values, sums = dict(numbers), []
    for result, expression, _ in story.steps:
        left, op, right = SUM.fullmatch(expression).groups()
        a, b = values[left], values[right]
        c = OPERATIONS[op](a, b)
        if (op == "/" and a % b) or not 1 <= c <= 200:
            return None
        values[result] = c
        sums.append((a, op, b, c))
    return tuple(sums)


def is_validation(content: str) -> bool:
    """One content in eight belongs to validation, whatever names and things it is told with."""
    return hashlib.sha256(content.encode("utf-8")).digest()[0] % 8 == 0


def draw_problems(rng: random.Random, count: int, validation: bool) -> list[Solution]:
    """`count` problems of distinct content from one side of the split."""
    found: dict[str, Solution] = {}
    while len(found) < count:
        solution = draw_solution(rng)
        if is_validation(solution.content) == validation:
            found.setdefault(solution.content, solution)
    return list(found.values())
