"""A problem, and a task: problems to train on, problems to validate on, and what counts as right."""

from collections.abc import Callable
from dataclasses import dataclass

from rlhelpers.checks import check_callable, check_list, check_text

RewardFn = Callable[[str, str], dict[str, float]]
"""(response, ground truth) -> {"format_reward", "answer_reward", "reward"}, each 0.0 or 1.0."""


@dataclass(frozen=True)
class Problem:
    """A question and its ground truth (a short string such as "18")."""

    question: str
    answer: str

    def __post_init__(self):
        check_text(question=self.question, answer=self.answer)


@dataclass(frozen=True)
class Task:
    """Problems to train on and to validate on, and `judge(answer, ground_truth)`, which gives "right" or why what
    the box holds is not (grading.REASONS)."""

    name: str
    train: list[Problem]
    validation: list[Problem]
    judge: Callable[[str, str], str]

    def __post_init__(self):
        check_text(name=self.name)
        check_list(train=self.train, validation=self.validation)
        check_callable(judge=self.judge)
