"""Bad input to tasks: refused by name.  A new case is a row of ROWS."""

import pytest
from bad_input import (
    NOT_A_FUNCTION,
    NOT_A_LIST,
    NOT_A_NAME,
    NOT_POSITIVE,
    NOT_TEXT,
    NOT_WHOLE,
    SOMETHING_ELSE,
    Row,
    check_refusal,
    name_of,
)

from rlhelpers.tasks import (
    Grader,
    Problem,
    Task,
    get_prompt,
    grade,
    load_task,
    question_only_reward_fn,
    r1_zero_reward_fn,
)
from rlhelpers.tasks.grading import judge_answer

RESPONSE = "18 </think> <answer> 18 </answer>"


@pytest.fixture(scope="module")
def good():
    """Of each function good arguments."""
    prompt, graded = get_prompt("r1_zero"), {"response": RESPONSE, "ground_truth": "18"}
    return {
        "load_task": (load_task, {"name": "tiny", "n_train_examples": 3, "n_val_examples": 2}),
        "load_task, gym": (load_task, {"name": "gym/chain_sum", "n_train_examples": 3, "n_val_examples": 2}),
        "get_prompt": (get_prompt, {"name": "r1_zero"}),
        "Prompt": (prompt, {"question": "How many?"}),
        "Problem": (Problem, {"question": "How many?", "answer": "18"}),
        "Task": (Task, {"name": "mine", "train": [], "validation": [], "judge": judge_answer}),
        "grade": (grade, {**graded, "prompt": "r1_zero"}),
        "r1_zero_reward_fn": (r1_zero_reward_fn, graded),
        "question_only_reward_fn": (question_only_reward_fn, graded),
        "judge_answer": (judge_answer, {"answer": "18", "ground_truth": "18", "time_limit": 1.0}),
        "Grader": (Grader, {"prompt": prompt, "judge": judge_answer}),
    }


NO_TRUTH = [*NOT_TEXT, "", "  ", "?", "a" * 300, "{18", "1\x0c8"]
ROWS = [
    Row("load_task", "name", NOT_TEXT, "task: got "),
    Row("load_task", "name", ["", "unknown", "x" * 5000, "gym"], "; accepted is tiny, gsm8k, gym/<name>, or a folder"),
    Row("load_task", "n_train_examples", [*NOT_WHOLE, -1]),
    Row("load_task", "n_train_examples", [10**20], "n_train_examples: got 100000000000000000000; task 'tiny' has "),
    Row("load_task", "n_val_examples", [*NOT_WHOLE, -1]),
    Row("load_task, gym", "n_train_examples", [*NOT_WHOLE, -1]),
    Row("load_task, gym", "n_val_examples", [*NOT_WHOLE, -1]),
    Row("get_prompt", "name", NOT_A_NAME, "prompt: got "),
    Row("Prompt", "question", NOT_TEXT),
    Row("Problem", "question", NOT_TEXT),
    Row("Problem", "answer", NOT_TEXT),
    Row("Task", "name", NOT_TEXT),
    Row("Task", "train", NOT_A_LIST),
    Row("Task", "validation", NOT_A_LIST),
    Row("Task", "judge", NOT_A_FUNCTION),
    Row("grade", "response", NOT_TEXT),
    Row("grade", "ground_truth", NO_TRUTH),
    Row("grade", "prompt", NOT_A_NAME),
    Row("r1_zero_reward_fn", "response", NOT_TEXT),
    Row("r1_zero_reward_fn", "ground_truth", NO_TRUTH),
    Row("question_only_reward_fn", "response", NOT_TEXT),
    Row("question_only_reward_fn", "ground_truth", NO_TRUTH),
    Row("judge_answer", "answer", NOT_TEXT),
    Row("judge_answer", "ground_truth", NO_TRUTH),
    Row("judge_answer", "time_limit", NOT_POSITIVE),
    Row("Grader", "prompt", SOMETHING_ELSE),
    Row("Grader", "judge", NOT_A_FUNCTION),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(good, row):
    check_refusal(good, row)
