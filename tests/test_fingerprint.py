"""Fingerprints: the same for the same numbers, another one for everything that could change a bit of them."""

import functools
import textwrap

import pytest
import torch

from rlhelpers import paths
from rlhelpers.kernels.estimators import ESTIMATORS, Estimator
from rlhelpers.training.config import RunConfig, make_config
from rlhelpers.training.fingerprint import WITHOUT_EFFECT, fingerprint

# Another value for every setting than the default, in a configuration that has them all.
BASE = {"engine": "vllm-server"}
OTHER = {
    "seed": 1,
    "model": "other",
    "device": "cpu",
    "task": "gsm8k",
    "prompt": "question_only",
    "n_train_examples": 6000,
    "n_val_examples": 500,
    "engine": "vllm",
    "kv_cache_gib": 2.0,
    "rollouts_ahead": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "max_tokens": 65,
    "min_tokens": 1,
    "estimator": "rft",
    "components": "mine",
    "group_size": 4,
    "rollout_batch_size": 256,
    "train_batch_size": 64,
    "gradient_accumulation_steps": 8,
    "gradient_checkpointing": True,
    "num_rollout_steps": 51,
    "learning_rate": 1e-4,
    "max_grad_norm": float("inf"),
    "betas": (0.9, 0.99),
    "weight_decay": 0.1,
    "eval_every": 6,
}
NO_EFFECT = {
    "experiment": "other",
    "variant": "other",
    "engine_gpu": 1,
    "rollouts_every": 3,
    "checkpoint_every": 3,
    "resume": True,
    "tracker": "wandb",
}


def of(**settings):
    return make_config(**BASE | settings).fingerprint


def test_every_setting_is_one_or_the_other():
    assert set(OTHER) | WITHOUT_EFFECT == set(RunConfig.model_fields)
    assert set(NO_EFFECT) | {"sleep_level"} == WITHOUT_EFFECT  # which goes with another engine


def test_what_could_change_a_bit_changes_it():
    prints = [of(), *(of(**{name: value}) for name, value in OTHER.items())]
    assert len(set(prints)) == len(prints) and all(len(text) == 16 for text in prints)


@pytest.mark.parametrize("name", NO_EFFECT)
def test_what_cannot_does_not(name):
    assert of(**{name: NO_EFFECT[name]}) == of()


def test_it_is_the_same_in_another_process_and_for_another_gpu(monkeypatch):
    assert make_config(device="cuda:1").fingerprint == make_config(device="cuda").fingerprint
    assert make_config(engine="vllm", sleep_level=1).fingerprint == make_config(engine="vllm").fingerprint
    assert make_config().fingerprint == make_config(estimator=ESTIMATORS["grpo"]).fingerprint


@pytest.mark.parametrize("named", ["model", "task"])
def test_a_folder_counts_by_what_is_in_it(tmp_path, named):
    for name in ("train.jsonl", "validation.jsonl", "config.json", "model.safetensors"):
        (tmp_path / name).write_text("1", encoding="utf-8")
    before = make_config(**{named: str(tmp_path)}).fingerprint
    (tmp_path / "notes.md").write_text("1", encoding="utf-8")
    assert make_config(**{named: str(tmp_path)}).fingerprint == before
    (tmp_path / {"model": "model.safetensors", "task": "validation.jsonl"}[named]).write_text("2", encoding="utf-8")
    assert make_config(**{named: str(tmp_path)}).fingerprint != before


def test_the_tiny_model_counts_too(tmp_path, monkeypatch):
    before = make_config().fingerprint
    monkeypatch.setattr(paths, "TINY", tmp_path)
    assert make_config().fingerprint != before


def test_own_components_count_by_their_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prints = set()
    for text in ("a = 1", "a = 2"):
        (tmp_path / "my_components.py").write_text(text, encoding="utf-8")
        prints.add(make_config(components="mine").fingerprint)
        assert make_config(components="mine").fingerprint in prints
    assert len(prints) == 2


def of_function(function):
    return fingerprint(make_config(estimator=Estimator("own", baseline=function)))


def times(rewards, factor):
    return factor * rewards


def scaled(factor):
    def baseline(rewards):
        return factor * rewards.mean(dim=1, keepdim=True)

    return baseline


def test_a_function_counts_with_what_it_closes_over():
    assert of_function(scaled(1.0)) == of_function(scaled(1.0)) != of_function(scaled(2.0))
    assert (
        of_function(scaled(torch.ones(1))) == of_function(scaled(torch.ones(1))) != of_function(scaled(torch.ones(2)))
    )
    assert of_function(lambda rewards, a=1: a * rewards) != of_function(lambda rewards, a=2: a * rewards)
    first, again, second = (functools.partial(times, factor=factor) for factor in (1, 1, 2))
    assert of_function(first) == of_function(again) != of_function(second)


def in_a_notebook(tmp_path, source):
    """A function `baseline` as a notebook has it, in __main__."""
    file = tmp_path / "cell.py"
    file.write_text(textwrap.dedent(source), encoding="utf-8")
    namespace = {"__name__": "__main__"}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), namespace)
    return namespace["baseline"]


CELL = """
import math
def half(x): return baseline(x) if x is None else x / {divisor}
SCALE = {scale}
def baseline(rewards):
    # {comment}
    return SCALE * half(rewards.mean(dim=1, keepdim=True)) * math.{function}(1)
"""


def test_a_function_of_a_notebook_counts_with_what_it_uses_there(tmp_path, monkeypatch):
    import linecache

    usual = {"divisor": 2, "scale": 1.0, "comment": "", "function": "exp"}
    prints = []
    for change in ({}, {}, {"divisor": 3}, {"scale": 2.0}, {"function": "sin"}):
        linecache.clearcache()
        prints.append(of_function(in_a_notebook(tmp_path, CELL.format(**usual | change))))
    assert prints[0] == prints[1] and len(set(prints)) == 4


def test_what_cannot_be_looked_into_is_never_the_same():
    class Baseline:
        def __call__(self, rewards):
            return rewards

    callable_object = Baseline()
    assert of_function(callable_object) != of_function(callable_object)
    unseen = eval("lambda rewards: rewards")
    assert of_function(unseen) != of_function(unseen)
