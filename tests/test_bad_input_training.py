"""Bad input to training: refused by name before there is a folder.  A new case is a row of ROWS."""

import math

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
from rlhelpers.training.config import RunConfig, make_config
from rlhelpers.training.evaluation import evaluate
from rlhelpers.training.loop import train
from rlhelpers.training.own_step import load_train_step, save_components


class Engine:
    """Writes one token for every prompt."""

    def generate(self, prompts, sampling):
        return [Rollout(prompt, [3], [Completion("a", [3], "length", [0.0])]) for prompt in prompts]


CONFIG = {name: field.get_default() for name, field in RunConfig.model_fields.items()}
GOOD = {
    "make_config": (make_config, {"preset": "tiny", "quick": False, **CONFIG}),
    "train": (train, {"config": make_config()}),
    "load_policy": (load_policy, {"model": "tiny", "device": "cpu", "gradient_checkpointing": False}),
    "load_train_step": (load_train_step, {"components": "package", "with_token_weights": False}),
    "save_components": (save_components, {"functions": [train]}),
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
# pydantic reads "1" and 1.0 as 1, as papermill's command line needs; None stands for the default.
NOT_COUNTS = ["", "x", "1.5", 1.5, 0, -1, math.nan, math.inf, [], {}, [1]]
NOT_NUMBERS = ["", "x", 0, -1, math.nan, -math.inf, [], {}, [1]]
NOT_FLAGS = ["", "x", 2, 1.5, math.nan, [], {}]
COUNTS = ["n_train_examples", "n_val_examples", "max_tokens", "group_size", "rollout_batch_size", "train_batch_size"]
COUNTS += ["gradient_accumulation_steps", "num_rollout_steps", "eval_every", "rollouts_every", "checkpoint_every"]
NUMBERS = ["temperature", "top_p", "learning_rate", "max_grad_norm", "kv_cache_gib"]
FLAGS = ["rollouts_ahead", "gradient_checkpointing", "resume"]
NAMES = ["prompt", "engine", "components", "estimator", "tracker", "device"]
ROWS = [
    Row("make_config", "preset", NOT_A_NAME),
    Row("make_config", "quick", ["", "x", 1, 0, math.nan, [], None]),
    *(Row("make_config", name, NOT_COUNTS) for name in COUNTS),
    *(Row("make_config", name, NOT_NUMBERS) for name in NUMBERS),
    *(Row("make_config", name, NOT_FLAGS) for name in FLAGS),
    *(Row("make_config", name, NOT_A_NAME[1:]) for name in NAMES),
    *(Row("make_config", name, [3, True, "", [], "a/b", "..", "a" * 300]) for name in ("experiment", "variant")),
    *(Row("make_config", name, [3, True, "", []]) for name in ("model", "task")),
    Row("make_config", "seed", ["x", 1.5, -1, 2**63, []]),
    Row("make_config", "min_tokens", ["x", 1.5, -1, 65]),
    Row("make_config", "weight_decay", ["x", -1, math.nan, math.inf, []]),
    Row("make_config", "betas", ["x", 3, math.nan], "betas: got "),
    Row("make_config", "betas", [(0.9, 1.0), (0.9, -1), (0.9, math.nan), (0.9, "x")], "betas.1: got "),
    Row("make_config", "group_size", [1], "group_size: got 1; it must be at least 2 for this estimator"),
    Row("make_config", "group_size", [3], "train_batch_size: got 128; it must be a multiple of group_size=3"),
    Row(
        "make_config",
        "train_batch_size",
        [48],
        "_batch_size: got 128; it must be a multiple of train_batch_size=48",
    ),
    Row("make_config", "gradient_accumulation_steps", [3], "it must be a divisor of train_batch_size=128"),
    Row("train", "config", [*SOMETHING_ELSE, CONFIG]),
    Row("load_policy", "model", NOT_TEXT),
    Row("load_policy", "model", ["/no/such/folder"]),
    Row("load_policy", "device", [*NOT_A_NAME, "gpu", "meta", "cuda:x"]),
    Row("load_policy", "gradient_checkpointing", [None, "False", 0, 1, []]),
    Row("load_train_step", "components", NOT_A_NAME),
    Row("save_components", "functions", NOT_A_LIST),
    Row("save_components", "functions", [[None], ["train"], [3], [len]], "functions: number 0 is "),
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


def test_every_setting_has_a_row():
    have = {row.argument for row in ROWS if row.function == "make_config"}
    assert set(RunConfig.model_fields) - have == {"engine_gpu", "sleep_level"}  # of vLLM: see test_config.py


def test_an_unknown_setting_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="learning_rat: there is no such setting; did you mean learning_rate"):
        make_config(learning_rat=1e-3)
