"""Tasks by name."""

import pytest

from rlhelpers.tasks import Grader, get_prompt, load_task


def test_tiny():
    task = load_task("tiny", 6400, 1024)
    assert len(task.train) == 6400 and len(task.validation) == 1024
    assert not {p.question for p in task.train} & {p.question for p in task.validation}
    problem = task.validation[0]
    assert (
        Grader(get_prompt("r1_zero"), task.judge)(f"</think> <answer> {problem.answer} </answer>", problem.answer)[
            "reward"
        ]
        == 1
    )


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
