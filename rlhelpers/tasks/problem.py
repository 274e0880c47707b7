"""A problem, and a task: problems to train on, problems to validate on, and what counts as right."""

from collections.abc import Callable
from dataclasses import dataclass

RewardFn = Callable[[str, str], dict[str, float]]


@dataclass(frozen=True)
class Problem:
    """A question and its ground truth (a short string such as "18")."""

    question: str
    answer: str


@dataclass(frozen=True)
class Task:
    """Problems by name.  `reward_fn_for(prompt_name)` gives the grader that fits a prompt's answer format:
    `(response, ground_truth) -> {"format_reward", "answer_reward", "reward"}`, each 0.0 or 1.0."""

    name: str
    train: list[Problem]
    validation: list[Problem]
    reward_fn_for: Callable[[str], RewardFn]
