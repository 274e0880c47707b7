"""A task, and tasks by name."""

import pytest
from bad_input import NOT_A_FUNCTION, NOT_A_LIST, NOT_TEXT, NOT_WHOLE, Row, check_refusal, name_of

from rlhelpers.tasks import Grader, Problem, Task, get_prompt, load_task
from rlhelpers.tasks.grading import verify_answer


def test_tiny():
    task = load_task("tiny", 6400, 1024)
    assert len(task.train) == 6400 and len(task.validation) == 1024
    assert not {p.question for p in task.train} & {p.question for p in task.validation}
    problem = task.validation[0]
    reward_fn = Grader(get_prompt("r1_zero"), task.verify)
    assert reward_fn(f"</think> <answer> {problem.answer} </answer>", problem.answer)["reward"] == 1


def test_a_folder_of_ones_own(tmp_path):
    for name, answer in (("train", "1"), ("validation", "2")):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"question": "q", "answer": "#### {answer}"}}\n', encoding="utf-8")
    task = load_task(str(tmp_path), 1, 1)
    assert task.train[0].answer == "1" and task.validation[0].answer == "2"


def test_unknown_names_and_too_many_examples():
    with pytest.raises(ValueError, match=r"task: got 'tinny', and there is no folder .*tinny; accepted is tiny, gsm8k"):
        load_task("tinny", 1, 1)
    with pytest.raises(ValueError, match="n_val_examples: got 1025; task 'tiny' has 1024"):
        load_task("tiny", 1, 1025)


def test_a_folder_that_lacks_a_file_is_named(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"task: got .*; it has no validation\.jsonl"):
        load_task(str(tmp_path), 1, 1)


GOOD = {
    "load_task": (load_task, {"name": "tiny", "n_train_examples": 3, "n_val_examples": 2}),
    "load_task, gym": (load_task, {"name": "gym/chain_sum", "n_train_examples": 3, "n_val_examples": 2}),
    "Problem": (Problem, {"question": "How many?", "answer": "18"}),
    "Task": (Task, {"name": "mine", "train": [], "validation": [], "verify": verify_answer}),
}
ROWS = [
    Row("load_task", "name", NOT_TEXT, "task: got "),
    Row("load_task", "name", ["", "unknown", "x" * 5000, "gym"], "; accepted is tiny, gsm8k, gym/<name>, or a folder"),
    Row("load_task", "n_train_examples", [*NOT_WHOLE, -1]),
    Row("load_task", "n_train_examples", [10**20], "n_train_examples: got 100000000000000000000; task 'tiny' has "),
    Row("load_task", "n_val_examples", [*NOT_WHOLE, -1]),
    Row("load_task, gym", "n_train_examples", [*NOT_WHOLE, -1]),
    Row("load_task, gym", "n_val_examples", [*NOT_WHOLE, -1]),
    Row("Problem", "question", NOT_TEXT),
    Row("Problem", "answer", NOT_TEXT),
    Row("Task", "name", NOT_TEXT),
    Row("Task", "train", NOT_A_LIST),
    Row("Task", "validation", NOT_A_LIST),
    Row("Task", "verify", NOT_A_FUNCTION),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(row):
    check_refusal(GOOD, row)
