"""Fingerprints: the same for the same numbers, another one for everything that could change a bit of them."""

import dataclasses
import functools
import linecache
import textwrap
from dataclasses import dataclass, field

import pytest
import torch

from rlhelpers import paths
from rlhelpers.kernels.estimators import ESTIMATORS, Estimator
from rlhelpers.training.config import RunConfig, make_config
from rlhelpers.training.dpo import DPOConfig, make_dpo_config
from rlhelpers.training.settings import RunSettings, recorded_cells
from rlhelpers.training.sft import SFTConfig, make_sft_config

# Another value for every setting than the default, in a configuration that has them all.
BASE = {"engine": "vllm-server"}
NUMBERS = {
    "seed": 1,
    "model": "other",
    "task": "gsm8k",
    "prompt": "question_only",
    "n_train_examples": 6000,
    "n_val_examples": 500,
    "engine": "vllm",
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
    "num_rollout_steps": 51,
    "learning_rate": 1e-4,
    "max_grad_norm": float("inf"),
    "betas": (0.9, 0.99),
    "weight_decay": 0.1,
    "eval_every": 6,
}
ROUNDING = {"device": "cpu", "kv_cache_gib": 2.0, "gradient_accumulation_steps": 8, "gradient_checkpointing": True}
OTHER = NUMBERS | ROUNDING
NO_EFFECT = {
    "experiment": "other",
    "variant": "other",
    "engine_gpu": 1,
    "rollouts_every": 3,
    "checkpoint_every": 3,
    "resume": True,
    "tracker": "wandb",
}
KINDS = [RunConfig, SFTConfig, DPOConfig]


def of(**settings):
    return make_config(**BASE | settings).fingerprint


def that_affect(kind, what):
    return {name for name in kind.model_fields if kind.mark(name, "affects") == what}


def test_what_each_setting_affects():
    assert that_affect(RunConfig, "numbers") == set(NUMBERS)
    assert that_affect(RunConfig, "rounding") == set(ROUNDING)
    assert that_affect(RunConfig, "nothing") == {*NO_EFFECT, "sleep_level"}  # which goes with another engine
    assert that_affect(SFTConfig, "content") == {"train_data", "val_data"}
    assert that_affect(DPOConfig, "content") == {"pairs"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_kind_declares_anew_affects_the_same(kind):
    for name in RunSettings.model_fields:
        assert all(kind.mark(name, mark) == RunSettings.mark(name, mark) for mark in ("affects", "named"))


def test_comparable_settings_are_those_that_affect_numbers():
    assert set(make_config().comparable_settings()) == set(NUMBERS) - {"seed"}
    same = make_config(**BASE).comparable_settings()
    for name in {**ROUNDING, **NO_EFFECT, "seed": 1}:
        assert make_config(**BASE | {name: (OTHER | NO_EFFECT)[name]}).comparable_settings() == same
    for name in set(NUMBERS) - {"seed"}:
        assert make_config(**BASE | {name: NUMBERS[name]}).comparable_settings() != same


def test_fingerprints_of_earlier_runs_stay(tmp_path, monkeypatch):
    """Checkpoints and committed results depend on them."""
    monkeypatch.setattr(paths, "TINY", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("", encoding="utf-8")
    assert make_config().fingerprint == "a511944a5e003eb5"
    assert make_config("course", estimator="offpolicy_clip").fingerprint == "c9be9aa06c6ba293"
    assert make_config("two-gpu", quick=True, rollouts_ahead=True, device="cuda:1").fingerprint == "ff72089c9fe15a74"
    assert make_config(estimator=Estimator("own", "none", engine_ratio_cap=2.0)).fingerprint == "e8fe4f9f4897dda4"
    assert make_sft_config(train_data="rows.jsonl", val_data="rows.jsonl").fingerprint == "e99d4bd644827042"
    assert make_dpo_config("course", pairs="rows.jsonl").fingerprint == "a82c6146223e41e3"


def test_a_cell_that_was_added_later_counts_where_it_is_used():
    @dataclass(frozen=True)
    class Later(Estimator):
        more: float = field(default=0.0, metadata={"added_later": True})

    own = Estimator("own", baseline="none")
    cells = {name: getattr(own, name) for name in (cell.name for cell in dataclasses.fields(own))}
    config, usual, other = (make_config(estimator=row) for row in (own, Later(**cells), Later(**cells, more=1.0)))
    assert usual.fingerprint == config.fingerprint != other.fingerprint
    assert usual.model_dump(mode="json") == config.model_dump(mode="json")
    assert other.model_dump(mode="json")["estimator"]["more"] == recorded_cells(other.estimator)["more"] == 1.0


def test_what_could_change_a_bit_changes_it():
    prints = [of(), *(of(**{name: value}) for name, value in OTHER.items())]
    assert len(set(prints)) == len(prints) and all(len(text) == 16 for text in prints)


@pytest.mark.parametrize("name", NO_EFFECT)
def test_what_cannot_does_not(name):
    assert of(**{name: NO_EFFECT[name]}) == of()


def test_it_is_the_same_for_another_gpu():
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
    return make_config(estimator=Estimator("own", baseline=function)).fingerprint


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


def test_a_function_of_a_notebook_counts_with_what_it_uses(tmp_path):
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
