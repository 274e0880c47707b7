"""Bad settings: what make_config and the check of the inputs refuse, and what they let through unchanged."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhelpers import paths
from rlhelpers.kernels.estimators import ESTIMATORS
from rlhelpers.sweep import plan as configurations
from rlhelpers.tasks import get_prompt, load_task
from rlhelpers.training import preflight as inputs
from rlhelpers.training.config import RunConfig, make_config
from rlhelpers.training.preflight import check_inputs, check_model

SETTINGS = [*RunConfig.model_fields, "preset", "quick"]
TEXTS = {"experiment", "variant", "model", "device", "task", "prompt", "engine", "estimator", "components", "tracker"}
TEXTS |= {"preset"}
SWITCHES = {name for name, field in RunConfig.model_fields.items() if isinstance(field.default, bool)} | {"quick"}
NUMBERS = set(SETTINGS) - TEXTS - SWITCHES - {"betas"}
MAY_BE_ZERO = {"seed", "min_tokens", "sleep_level", "engine_gpu", "weight_decay"}

# What no parameter of any notebook takes, whatever its kind; of papermill's -y they arrive as they are.
NEVER = [math.nan, -math.inf, "", " ", "\0", [], [1, 2], {"a": 1}, -1, -0.5, 10**400]


def refused(call, name, value):
    """The error has a line that begins with name and value, and says what is accepted."""
    with pytest.raises(ValueError) as error:
        call()
    lines = str(error.value).splitlines()
    shown = f"got {value!r}"[:60]
    assert any(line.startswith((f"{name}: {shown}", f"{name}.")) for line in lines), lines
    says_what_is = ("accepted", "input should", "must be", "string should", "field required", "should have")
    assert any(words in str(error.value) for words in says_what_is), lines


def set_to(name, value):
    return lambda: make_config(**{name: value})


@pytest.mark.parametrize("name", SETTINGS)
def test_what_no_setting_takes(name):
    texts = [] if name in ("model", "task") else ["nan ", "[1, 2", "-1 ?"]  # which could be names
    for value in [*NEVER, *texts, *([] if name == "max_grad_norm" else [1e308])]:
        refused(set_to(name, value), name, value)
    with pytest.raises(ValueError, match=f"{name}z: there is no such setting; did you mean .*{name}"):
        make_config(**{f"{name}z": 1})


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_a_number_is_no_bool_and_no_word(name):
    for value in (True, False, "none", "fast", "True", "0x10", "1,5", "１e"):
        refused(set_to(name, value), name, value)
    if name not in MAY_BE_ZERO:
        for zero in (0, "0", 0.0):
            refused(set_to(name, zero), name, zero)
    if name != "max_grad_norm":
        refused(set_to(name, math.inf), name, math.inf)
        refused(set_to(name, "inf"), name, "inf")


@pytest.mark.parametrize("name", sorted(SWITCHES))
def test_a_switch_is_true_or_false(name):
    for value in (0, 1, "0", "1", "yes", "no", "on", "off", "none", 1.0):
        refused(set_to(name, value), name, value)


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_text_is_a_text(name):
    for value in (True, 3, 0, 0.5):
        refused(set_to(name, value), name, value)


def test_betas_are_two_numbers():
    for value in (
        (0.9,),
        (0.9, 0.95, 0.99),
        "0.9",
        0.9,
        (True, 0.5),
        (0.9, math.nan),
        (0.9, 1.0),
        "(0.9; 0.95)",
        "x" * 9,
    ):
        refused(set_to("betas", value), "betas", value)
    assert [make_config(betas=value).betas for value in ([0.8, 0.9], "(0.8, 0.9)", "0.8,0.9")] == [(0.8, 0.9)] * 3


@pytest.mark.parametrize("name", SETTINGS)
def test_none_is_the_presets_value_but_for_preset_and_quick(name):
    if name in ("preset", "quick"):
        refused(set_to(name, None), name, None)
    else:
        assert make_config(**{name: None}) == make_config()


NUMBER = st.integers(-5, 2**40) | st.floats(-5, 1e12)


@given(st.sampled_from(sorted(NUMBERS)), NUMBER, st.booleans())
def test_a_number_is_kept_as_it_is_or_refused_by_its_name(name, number, is_text):
    try:
        config = make_config(**{name: f" {number!r} " if is_text else number})
    except ValueError as error:
        assert all(name in line for line in str(error).splitlines())  # of another: "a multiple of group_size=7"
    else:
        assert getattr(config, name) == number


@given(st.text(max_size=30))
def test_a_text_is_kept_as_it_is_or_refused_by_its_name(text):
    for name in ("experiment", "variant", "task", "model"):
        try:
            config = make_config(**{name: text})
        except ValueError as error:
            assert str(error).startswith(f"{name}: got ")
        else:
            assert getattr(config, name) == text and text.strip()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_batch_size": 132}, "rollout_batch_size: got 132; it must be a multiple of train_batch_size=128"),
        ({"rollout_batch_size": 132, "train_batch_size": 132}, "train_batch_size: got 132; it must be a multiple of"),
        (
            {"train_batch_size": 96, "gradient_accumulation_steps": 1},
            "rollout_batch_size: got 128; it must be a multiple",
        ),
        ({"rollout_batch_size": 64}, "rollout_batch_size: got 64; it must be a multiple of train_batch_size=128"),
        (
            {"train_batch_size": 4, "gradient_accumulation_steps": 1},
            "train_batch_size: got 4; it must be a multiple of",
        ),
        ({"group_size": 1}, "group_size: got 1; it must be at least 2 for this estimator"),
        ({"group_size": 1, "estimator": "dr_grpo"}, "group_size: got 1; it must be at least 2 for this estimator"),
        ({"gradient_accumulation_steps": 256}, "gradient_accumulation_steps: got 256; it must be a divisor of"),
        ({"weight_decay": 1e4}, r"weight_decay: got 10000.0; it must be below 1 / learning_rate = 3333"),
        ({"min_tokens": 65}, "min_tokens: got 65; it must be at most max_tokens=64"),
    ],
)
def test_numbers_that_do_not_fit_together(settings, message):
    with pytest.raises(ValueError, match=message):
        make_config(**settings)


def test_an_estimator_without_a_group_takes_groups_of_one():
    assert make_config(estimator="rft", group_size=1).group_size == 1
    assert {name for name, row in ESTIMATORS.items() if not row.needs_a_group} == {"rft"}


# What is not in the settings: problems, a model, room.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "tinny"}, "task: got 'tinny', and there is no folder /.*/tinny; accepted is tiny, gsm8k"),
        ({"task": "gym/chain_sums"}, "task: got 'gym/chain_sums'; accepted after gym/ are"),
        ({"task": "y" * 5000}, "task: got 'yyy"),
        ({"n_train_examples": 6401}, "n_train_examples: got 6401; task 'tiny' has 6400"),
        ({"n_val_examples": 2**31 - 1}, "n_val_examples: got 2147483647; task 'tiny' has"),
        ({"model": "a b"}, "model: got 'a b'; there is no folder /.*/a b, and no such model on the Hugging Face hub"),
        ({"model": "../nothing"}, "model: got '../nothing'; there is no folder"),
        ({"model": "/nothing"}, "model: got '/nothing'; no such directory"),
        ({"model": "x" * 5000}, "model: got 'xxx"),
        ({"max_tokens": 2048}, "max_tokens: got 2048; accepted are fewer than the 2048 tokens of the context"),
    ],
)
def test_what_is_not_there_is_found_before_anything_is_made(roots, settings, message):
    with pytest.raises(ValueError, match=message):
        configurations.configuration(paths.ROOT / "notebooks/04_grpo.ipynb", settings)
    assert not roots[0].exists()


def test_a_folder_is_one_of_the_working_directory(tmp_path, monkeypatch):
    """As a path on a command line is; an error says where it was looked for."""
    for name in ("train", "validation"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        row = '{"question": "1 + 1?", "answer": "#### 2"}\n'
        (tmp_path / f"mine/{name}.jsonl").write_text(row, encoding="utf-8")
    config = make_config(task="mine", n_train_examples=16, n_val_examples=1)
    with pytest.raises(ValueError, match="task: got 'mine', and there is no folder"):
        check_inputs(config)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="n_train_examples: got 16; task 'mine' has 1"):
        check_inputs(config)
    with pytest.raises(ValueError, match=rf"model: got 'mine'; {tmp_path}/mine has no config.json or no"):
        check_model("mine", 8)


@pytest.mark.parametrize("answer", ["none", "no such model", "it is there"])
def test_of_a_name_on_the_hub_is_asked_whether_it_is_there(monkeypatch, answer):
    """Where nobody answers, that is left to the loading."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError

    def model_info(self, name, timeout):
        if answer == "none":
            raise ConnectionError
        if answer == "no such model":
            raise RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None))
        return name

    monkeypatch.setattr(HfApi, "model_info", model_info)
    inputs._of_the_hub.cache_clear()
    if answer == "no such model":
        with pytest.raises(ValueError, match=r"model: got 'tinny'; there is no folder .*no such model on the Hugging"):
            check_model("tinny", 8)
        return
    check_model("tinny", 8)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    inputs._of_the_hub.cache_clear()
    with pytest.raises(ValueError, match="no such model in the hub's cache, and HF_HUB_OFFLINE"):
        check_model("tinny", 8)


def test_of_a_pinned_model_its_commit_is_looked_for(monkeypatch, tmp_path):
    from huggingface_hub import constants

    from rlhelpers.models import REVISIONS

    [(model, commit)] = REVISIONS.items()
    folder = tmp_path / f"models--{model.replace('/', '--')}" / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"max_position_embeddings": 64}', encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    inputs._of_the_hub.cache_clear()
    with pytest.raises(ValueError, match="max_tokens: got 64; accepted are fewer than the 64 tokens"):
        check_model(model, 64)
    inputs._of_the_hub.cache_clear()


@pytest.mark.parametrize("count", [-1, 1.5, None, True, "3", math.nan])
@pytest.mark.parametrize("task", ["tiny", "gym/chain_sum"])
def test_a_number_of_examples_is_whole_and_not_negative(task, count):
    with pytest.raises(ValueError, match=f"n_train_examples: got {count!r}; accepted is a whole number of at least 0"):
        load_task(task, count, 1)
    with pytest.raises(ValueError, match=f"n_val_examples: got {count!r}; accepted is a whole number of at least 0"):
        load_task(task, 1, count)


@pytest.mark.parametrize("name", [None, 3, ["tiny"]])
def test_the_name_of_a_task_is_a_text(name):
    with pytest.raises(ValueError, match=r"task: got .*; accepted is tiny, gsm8k, gym/<name>, or a folder"):
        load_task(name, 1, 1)


@pytest.mark.parametrize("call", [lambda n: make_config(max_tokens=n), get_prompt], ids=["setting", "argument"])
def test_a_number_too_long_to_be_written_is_refused_in_words(call):
    with pytest.raises(ValueError, match=r"(max_tokens|prompt): got a number too long to be written; "):
        call(10**5000)
