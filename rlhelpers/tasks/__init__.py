"""What is asked and what counts as right: problems, prompts and graders."""

from rlhelpers.tasks.datasets import Problem
from rlhelpers.tasks.grading import Grade, Grader, grade, question_only_reward_fn, r1_zero_reward_fn
from rlhelpers.tasks.prompts import Prompt, get_prompt
from rlhelpers.tasks.task import Task, load_task

__all__ = [
    "Grade",
    "Grader",
    "Problem",
    "Prompt",
    "Task",
    "get_prompt",
    "grade",
    "load_task",
    "question_only_reward_fn",
    "r1_zero_reward_fn",
]
