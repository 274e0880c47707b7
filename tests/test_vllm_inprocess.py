"""The engine in this process, with a made-up vLLM: the order of its calls, and an end after a failure.

On a real vLLM: test_engines.py, test_vllm_server.py.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from rlhelpers.rollouts import EngineDeadError, vllm_inprocess
from rlhelpers.rollouts.vllm_inprocess import VLLMEngine


class FakeLLM:
    """Notes what it is told."""

    def __init__(self, told):
        self.told, self.forgets = told, True
        core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False), shutdown=lambda: told.append("ended"))
        self.llm_engine = SimpleNamespace(engine_core=core)

    def sleep(self, level):
        self.told.append(f"sleep {level}")

    def wake_up(self, tags):
        self.told.append(f"wake {tags[0]}")

    def reset_prefix_cache(self):
        self.told.append("forget")
        return self.forgets


@pytest.fixture
def make(tokenizer, monkeypatch, tmp_path):
    """Makes an engine that runs, and the list of what vLLM and the weights' connection are told."""
    monkeypatch.setattr(vllm_inprocess, "engine_errors", nullcontext)  # it imports vLLM

    def make(**settings):
        told = []
        engine = VLLMEngine("any", tokenizer, log=tmp_path / "log", **settings)
        engine.llm, engine.weights = FakeLLM(told), SimpleNamespace(send=lambda policy: told.append("weights"))
        return engine, told

    return make


@pytest.mark.field_report("C01")
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_wakes_for_the_weights_and_then_the_cache(make, tiny_gpt2, level):
    engine, told = make(sleep_level=level)
    engine.sync_weights(tiny_gpt2())
    engine.sleep()
    engine.sleep()
    engine.sync_weights(tiny_gpt2())
    first, then = ["weights", "forget"], [f"sleep {level}", "wake weights", "weights", "wake kv_cache", "forget"]
    assert told == first + then


def test_without_a_sleep_level_it_stays_awake(make, tiny_gpt2):
    engine, told = make()
    engine.sleep()
    engine.sync_weights(tiny_gpt2())
    assert told == ["weights", "forget"]


def test_an_engine_whose_weights_failed_is_not_asked_again(make, tiny_gpt2):
    """Nobody knows which weights it has."""
    engine, told = make()

    def fail(policy):
        raise ConnectionError("half-way")

    engine.weights.send = fail
    with pytest.raises(ConnectionError):
        engine.sync_weights(tiny_gpt2())
    assert told == ["ended"] and engine.llm is None


def test_an_engine_that_does_not_forget_is_of_no_use(make, tiny_gpt2):
    engine, _ = make()
    engine.llm.forgets = False
    with pytest.raises(EngineDeadError, match="did not forget the keys and values"):
        engine.sync_weights(tiny_gpt2())


def test_a_dead_engine_is_not_waited_for(make, tiny_gpt2):
    engine, _ = make(sleep_level=1)
    engine.llm.llm_engine.engine_core.resources.engine_dead = True
    engine.llm.sleep = lambda level: __import__("time").sleep(30)
    with pytest.raises(EngineDeadError, match="process is gone"):
        engine.sleep()
