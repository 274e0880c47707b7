"""reasoning-gym's data sets as tasks, graded by their own verifiers."""

import re
from pathlib import Path

import pytest
import reasoning_gym

from rlhelpers.tasks import Grader, get_prompt, load_task
from rlhelpers.tasks.gym import EVALUATING


@pytest.mark.parametrize("name", ["gym/chain_sum", "gym/gsm_symbolic"])
def test_the_own_answer_is_right_and_another_is_not(name):
    task = load_task(name, 40, 10)
    assert len(task.train) == 40 and len(task.validation) == 10
    reward_fn = Grader(get_prompt("r1_zero"), task.verify)
    for problem in task.train[:10] + task.validation:
        right = reward_fn(f" so </think> <answer> {problem.answer} </answer>", problem.answer)
        wrong = reward_fn(" so </think> <answer> 123456789 </answer>", problem.answer)
        assert right == {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}
        assert wrong == {"format_reward": 1.0, "answer_reward": 0.0, "reward": 0.0}
        assert reward_fn(problem.answer, problem.answer)["reward"] == 0  # right, but not in the box


def test_the_box_of_question_only():
    task = load_task("gym/chain_sum", 4, 4)
    problem = task.train[0]
    reward_fn = Grader(get_prompt("question_only"), task.verify)
    assert reward_fn(rf"\boxed{{{problem.answer}}}", problem.answer)["reward"] == 1


def test_no_validation_question_is_trained_on():
    task, again = load_task("gym/chain_sum", 300, 100), load_task("gym/chain_sum", 300, 100)
    assert task.train == again.train and task.validation == again.validation
    assert len({p.question for p in task.train + task.validation}) == 400


def test_an_unknown_name_is_named():
    with pytest.raises(ValueError, match=r"task: got 'gym/chain_sums'; accepted after gym/ are .*chain_sum"):
        load_task("gym/chain_sums", 4, 4)


def test_verifiers_that_run_the_answer_as_code_are_refused():
    """The list holds exactly the modules of the installed reasoning-gym in which an answer reaches eval."""
    code = Path(reasoning_gym.__file__).parent
    evaluates = re.compile(r"(?<!literal_)\b(eval|parse_expr)\(answer\b")
    found = {file.stem for file in code.rglob("*.py") if evaluates.search(file.read_text(encoding="utf-8"))}
    assert found == EVALUATING
    with pytest.raises(ValueError, match="gym/countdown', whose verifier runs the model's text as code"):
        load_task("gym/countdown", 4, 4)


def test_a_verifier_that_raises_on_a_response_means_not_right():
    task = load_task("gym/prime_factorization", 4, 4)
    assert task.verify(task.train[0].answer, task.train[0].answer) == "right"
    assert not any(task.verify(text, task.train[0].answer) == "right" for text in ("None", "two", "", "x × y"))


def test_an_answer_without_its_entry_is_an_error():
    """As where a table has made plain texts of the answers."""
    task = load_task("gym/chain_sum", 1, 1)
    with pytest.raises(
        ValueError, match=r"ground_truth: got '.*'; accepted is the answer of a problem of gym/chain_sum"
    ):
        task.verify("5", str(task.train[0].answer))
