"""Exercises of notebook 01: the format, the three categories, and a grader that looks for the answer anywhere."""

import re
from typing import Any

from rlhelpers.exercises.exercise import Exercise
from rlhelpers.tasks.answers import find_tags
from rlhelpers.tasks.grading import probably_right

RIGHT = " 2+3=5 </think> <answer> 5 </answer>"


def _responses(*texts: str) -> list[dict[str, Any]]:
    return [{"response": text} for text in texts]


has_format = Exercise(
    "has_format",
    lambda response: find_tags(response).has_format,
    {
        "the format needs all three tags": _responses(
            RIGHT, "", "5", "5 <answer> 5 </answer>", "5 </think> 5 </answer>", "5 </think> <answer> 5"
        ),
        "exactly one space lies between </think> and <answer>": _responses(
            RIGHT,
            "5 </think> so <answer> 5 </answer>",
            "5 </think><answer> 5 </answer>",
            "5 </think>  <answer> 5 </answer>",
            "5 </think>\n<answer> 5 </answer>",
        ),
        "the box is opened after the reasoning is closed, and closed after that": _responses(
            RIGHT,
            "<answer> 5 </answer> 5 </think>",
            "</answer> 5 </think> <answer> 5",
            "<answer> 5 </answer> 5 </think> <answer> 5",
        ),
        "what stands in the box, before it and behind it does not matter": _responses(
            " </think> <answer></answer>",
            " </think> <answer> I think\nit is 5. </answer>",
            "a </think> b </think> <answer> 5 </answer> c",
            "a </think>\n<answer> 4 </answer> b </think> <answer> 5 </answer>",
            "</answer> a </think> <answer> 5 </answer>",
        ),
    },
    # The narrowest first: on one input several of them may say the same.
    {
        "allowing any white space between the tags": lambda response: bool(
            re.search(r"</think>\s*<answer>.*</answer>", response, re.DOTALL)
        ),
        "a dot that does not match a line break": lambda response: bool(
            re.search("</think> <answer>.*</answer>", response)
        ),
        "looking for the closing tag from the start of the response": lambda response: (
            "</think> <answer>" in response and "</answer>" in response
        ),
        "allowing anything between the tags": lambda response: bool(
            re.search(r"</think>.*<answer>.*</answer>", response, re.DOTALL)
        ),
        "looking for each tag anywhere": lambda response: all(
            tag in response for tag in ("</think>", "<answer>", "</answer>")
        ),
    },
)


def _count(format_rewards: list[float], answer_rewards: list[float]) -> tuple[int, int, int]:
    pairs = list(zip(format_rewards, answer_rewards, strict=True))
    return pairs.count((1, 1)), pairs.count((1, 0)), pairs.count((0, 0))


def _grades(*pairs: str) -> list[dict[str, Any]]:
    """Inputs from texts such as "11 10 00": format and answer reward of each response."""
    rows = [[(float(grade[0]), float(grade[1])) for grade in text.split()] for text in pairs]
    return [{"format_rewards": [f for f, _ in row], "answer_rewards": [a for _, a in row]} for row in rows]


count_categories = Exercise(
    "count_categories",
    _count,
    {
        "one response counts once, in its own category": _grades("11", "10", "00"),
        "the counts come in the handout's order, (1) to (3)": _grades("11 10 10 00 00 00", "00 11 11 10"),
        "a category without a response counts 0": _grades("", "11 11", "00 10"),
    },
    {
        "counting every well-formed response in (2), the right ones too": lambda format_rewards, answer_rewards: (
            int(sum(answer_rewards)),
            int(sum(format_rewards)),
            len(format_rewards) - int(sum(format_rewards)),
        ),
        "counting every wrong response in (3), the well-formed ones too": lambda format_rewards, answer_rewards: (
            int(sum(answer_rewards)),
            int(sum(format_rewards) - sum(answer_rewards)),
            len(answer_rewards) - int(sum(answer_rewards)),
        ),
        "giving shares instead of counts": lambda format_rewards, answer_rewards: tuple(
            count / len(format_rewards) for count in _count(format_rewards, answer_rewards)
        ),
    },
)


def _statements(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"text": text, "ground_truth": truth} for text, truth in pairs]


def _by_digits(text: str, ground_truth: str) -> bool:
    return [float(number) for number in re.findall(r"\d+", text)][-1:] == [float(ground_truth)]


def _by_letters(text: str, ground_truth: str) -> bool:
    return re.findall(r"-?[\d.,]*\d", text)[-1:] == [ground_truth]


in_substance = Exercise(
    "in_substance",
    lambda text, ground_truth: probably_right(text, ground_truth),
    {
        "the answer at the end of a sentence counts": _statements(("18", "18"), ("So it is 18.", "18")),
        "a number inside a longer number is another number": _statements(
            ("180", "18"), ("118", "18"), ("It costs 18.75 dollars.", "18"), ("It is 18.4.", "18")
        ),
        "a number on the way is not the answer": _statements(
            ("18-3=15", "18"), ("She had 18 eggs and ate 3. Now she has 15 eggs.", "18")
        ),
        "the value counts, not how it is written": _statements(
            ("It is 18.0.", "18"),
            ("It is 1800.", "1800"),
            ("That makes $1,800 in all.", "1800"),
            ("It is 1,800,000.", "1800000"),
        ),
        "a minus sign belongs to its number, a minus between two numbers does not": _statements(
            ("It is -3 degrees.", "-3"), ("It is -3 degrees.", "3"), ("3 apples are left: 8-5", "5")
        ),
        "a text without a number is wrong, and no error": _statements(("", "18"), ("Eighteen, I think.", "18")),
    },
    {
        "looking for the digits of the ground truth anywhere": lambda text, ground_truth: ground_truth in text,
        "looking for the ground truth as a whole word anywhere": lambda text, ground_truth: bool(
            re.search(rf"(?<![\w.]){re.escape(ground_truth)}(?![\w.])", text)
        ),
        "reading runs of digits: a sign, a decimal point or a comma ends the number": _by_digits,
        "comparing letters instead of values": _by_letters,
        "looking at the end of the text only": lambda text, ground_truth: text.rstrip(" .").endswith(ground_truth),
    },
)
