"""A problem, and a task: problems to train on, problems to validate on, and what counts as right."""

from collections.abc import Callable
from dataclasses import dataclass

RewardFn = Callable[[str, str], dict[str, float]]
"""(response, ground truth) -> {"format_reward", "answer_reward", "reward"}, each 0.0 or 1.0."""


@dataclass(frozen=True)
class Problem:
    """A question and its ground truth (a short string such as "18")."""

    question: str
    answer: str


@dataclass(frozen=True)
class Task:
    """Problems to train on and to validate on, and `judge(answer, ground_truth)`, which gives "right" or why what
    the box holds is not (grading.REASONS)."""

    name: str
    train: list[Problem]
    validation: list[Problem]
    judge: Callable[[str, str], str]
