"""Bad input to training: refused by name before there is a folder.  A new case is a row of ROWS."""

import pytest
from bad_input import (
    NOT_A_LIST,
    NOT_A_NAME,
    NOT_TEXT,
    SOMETHING_ELSE,
    Row,
    check_refusal,
    name_of,
)

from rlhelpers.models import load_policy
from rlhelpers.rollouts import Completion, Rollout, Sampling
from rlhelpers.tasks import Grader, Problem, get_prompt
from rlhelpers.training.config import make_config
from rlhelpers.training.evaluation import evaluate
from rlhelpers.training.loop import train


class Engine:
    """Writes one token for every prompt."""

    def generate(self, prompts, sampling):
        return [Rollout(prompt, [3], [Completion("a", [3], "length", [0.0])]) for prompt in prompts]


GOOD = {
    "train": (train, {"config": make_config()}),
    "load_policy": (load_policy, {"model": "tiny", "device": "cpu", "gradient_checkpointing": False}),
    "evaluate": (
        evaluate,
        {
            "engine": Engine(),
            "problems": [Problem("How many?", "18")],
            "grader": Grader(get_prompt("r1_zero")),
            "sampling": Sampling(),
        },
    ),
}
ROWS = [
    Row("train", "config", [*SOMETHING_ELSE, make_config().model_dump()]),
    Row("load_policy", "model", NOT_TEXT),
    Row("load_policy", "model", ["/no/such/folder"]),
    Row("load_policy", "device", [*NOT_A_NAME, "gpu", "meta", "cuda:x"]),
    Row("load_policy", "gradient_checkpointing", [None, "False", 0, 1, []]),
    Row("evaluate", "engine", SOMETHING_ELSE),
    Row("evaluate", "problems", NOT_A_LIST),
    Row("evaluate", "problems", [[], ["How many?"], [None]]),
    Row("evaluate", "grader", [*SOMETHING_ELSE, get_prompt]),
    Row("evaluate", "sampling", SOMETHING_ELSE),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(roots, tmp_path, monkeypatch, row):
    """And no file is written."""
    monkeypatch.chdir(tmp_path)
    check_refusal(GOOD, row)
    assert list(tmp_path.rglob("*")) == []
