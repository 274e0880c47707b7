"""What a run samples with: an engine that has the policy's weights, and is started again when it dies."""

import importlib.util
import threading

import pytest
import torch
from copying_engine import CopyingEngine

from rlhelpers import paths
from rlhelpers.models import load_policy
from rlhelpers.rollouts import EngineDeadError, Sampling, TorchEngine
from rlhelpers.rollouts.vllm_inprocess import VLLMEngine
from rlhelpers.rollouts.vllm_server import VLLMServer
from rlhelpers.training.config import make_config
from rlhelpers.training.sampler import (
    MAX_RESTARTS,
    NotInSyncError,
    Sampler,
    check_in_sync,
    make_engine,
    server_gpu,
    weight_backend,
)

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS, SAMPLING = ["a b c", "d e"], Sampling(n=3, max_tokens=8, seed=1)


@pytest.fixture
def policy(tiny_gpt2):
    return tiny_gpt2(torch.float32)


@pytest.fixture
def make(policy, tokenizer):
    """A sampler with a CopyingEngine; its remarks are in `told`."""
    samplers = []

    def make(temperature=1.0, **engine_settings):
        told = []
        sampler = Sampler(
            CopyingEngine(policy, tokenizer, **engine_settings), policy, tokenizer, temperature, told.append
        )
        sampler.told = told
        samplers.append(sampler)
        return sampler

    yield make
    for sampler in samplers:
        sampler.close()


@pytest.fixture
def expected(policy, tokenizer):
    """What the policy's own engine samples."""
    return TorchEngine(policy, tokenizer).generate(PROMPTS, SAMPLING)


def every(call: str) -> set[tuple[str, int]]:
    return {(call, number) for number in range(1, 100)}


# Weights.


def test_after_a_sync_the_samples_are_the_policys(make, expected):
    sampler = make()
    sampler.sync()
    assert sampler.generate(PROMPTS, SAMPLING) == expected and not sampler.told


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_an_engine_with_the_policys_weights_is_in_sync(make, policy, tokenizer, temperature):
    sampler = make(temperature)
    sampler.sync()
    assert check_in_sync(sampler.engine, policy, tokenizer, temperature) < 1e-5
    assert {sampling.temperature for _, _, sampling in sampler.engine.sampled} == {temperature}


def test_an_engine_that_kept_the_old_weights_is_not(make, policy):
    sampler = make(keeps_weights=True)
    sampler.sync()
    with torch.no_grad():
        policy.transformer.wte.weight.mul_(1.5)
    with pytest.raises(
        NotInSyncError, match=r"weights not in sync: .* differ .* by \d\S* nats .* torch.float32 is 0.001"
    ):
        sampler.sync()
    assert not sampler.told  # it is alive: to start it again would hide the fault


@pytest.mark.parametrize(("shift", "in_sync"), [(5e-4, True), (-5e-4, True), (2e-3, False), (-2e-3, False)])
def test_the_limit_is_on_the_mean_difference(make, shift, in_sync):
    sampler = make(shift=shift)
    if in_sync:
        sampler.sync()
    else:
        with pytest.raises(NotInSyncError, match=r"by 0.002 nats"):
            sampler.sync()


def test_log_probs_that_are_no_numbers_are_not_compared(make):
    with pytest.raises(RuntimeError, match=r"engine: prompt 0 of 1: token \d+ has the log-prob nan"):
        make(shift=float("nan")).sync()


def test_a_bf16_policy_has_a_wider_limit(tiny_gpt2, tokenizer):
    policy = tiny_gpt2(torch.bfloat16)
    engine = CopyingEngine(policy, tokenizer, shift=0.05)
    engine.sync_weights(policy)
    assert 0.01 < check_in_sync(engine, policy, tokenizer, 1.0) < 0.1
    engine.shift = 0.3
    with pytest.raises(NotInSyncError, match=r"torch.bfloat16 is 0.1"):
        check_in_sync(engine, policy, tokenizer, 1.0)


def test_an_engine_that_samples_with_the_policy_itself_is_not_asked(policy, tokenizer, monkeypatch):
    monkeypatch.setattr(TorchEngine, "generate", lambda *_: pytest.fail("there is nothing to compare"))
    sampler = Sampler(TorchEngine(policy, tokenizer), policy, tokenizer, 1.0, pytest.fail)
    sampler.sync()
    sampler.close()


# Deaths.


@pytest.mark.parametrize(
    "death",
    [("sync_weights", 1), ("generate", 1), ("generate", 2), ("sleep", 1)],
    ids=["over the weights", "over the check", "over the samples", "over the rest"],
)
def test_an_engine_that_dies_is_started_again_gets_the_weights_and_goes_on(make, expected, death):
    sampler = make(deaths=[death])
    for _ in range(2):
        sampler.sync()
        assert sampler.generate(PROMPTS, SAMPLING) == expected
        sampler.sleep()
    assert sampler.told == [f"The engine died and was started again: it died in {death[0]}"]
    assert sampler.engine.calls.count("restart") == 1


def test_an_engine_that_died_over_the_rest_rests_again(make):
    """Or what it was to give back would be missing while training."""
    sampler = make(deaths=[("sleep", 1)])
    sampler.sync()
    sampler.sleep()
    assert sampler.engine.calls[-1] == "sleep"


@pytest.mark.parametrize(
    "deaths",
    [
        [("generate", 2), ("restart", 1)],
        [("generate", 2), ("sync_weights", 2)],
        [("generate", 2), ("generate", 3)],
        [("generate", 2), ("generate", 4)],
        [("sync_weights", 1), ("sync_weights", 2), ("sync_weights", 3)],
    ],
    ids=["when started", "over the weights", "over the check", "over the same samples", "thrice"],
)
def test_it_may_die_again_before_it_has_done_what_it_died_over(make, expected, deaths):
    sampler = make(deaths=deaths)
    sampler.sync()
    assert sampler.generate(PROMPTS, SAMPLING) == expected
    assert len(sampler.told) == sampler.engine.calls.count("restart") == len(deaths)


@pytest.mark.parametrize("call", ["sync_weights", "generate"])
def test_one_that_dies_again_and_again_is_given_up(make, call):
    sampler = make(deaths=every(call))
    with pytest.raises(EngineDeadError, match=f"it died in {call}"):
        sampler.sync()
    assert sampler.engine.calls.count("restart") == len(sampler.told) == MAX_RESTARTS == 3


def test_deaths_count_over_the_whole_run(make, expected):
    """The first `generate` is the check's; then three each: samples that fail, the check, and the samples again."""
    sampler = make(deaths=[("generate", number) for number in (2, 5, 8, 11)])
    sampler.sync()
    for _ in range(MAX_RESTARTS):
        assert sampler.generate(PROMPTS, SAMPLING) == expected
    with pytest.raises(EngineDeadError):
        sampler.generate(PROMPTS, SAMPLING)


def test_other_errors_are_not_deaths(make):
    sampler = make()
    sampler.sync()
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        sampler.generate([""], SAMPLING)
    assert "restart" not in sampler.engine.calls


def test_a_death_without_words(make):
    sampler = make()
    sampler.engine.before_sampling = once(EngineDeadError())
    sampler.sync()
    assert sampler.told == ["The engine died and was started again: it did not say why"]


def once(error: Exception):
    errors = [error]

    def fail():
        if errors:
            raise errors.pop()

    return fail


# Sampling in the background.


def test_samples_are_drawn_while_the_caller_goes_on(make, expected):
    sampler, sampling, go = make(), threading.Event(), threading.Event()
    sampler.sync()
    sampler.engine.before_sampling = lambda: (sampling.set(), go.wait(60))
    finish = sampler.generate_async(PROMPTS, SAMPLING)
    assert sampling.wait(60)  # it is at it, and this line is reached
    assert len(sampler.engine.sampled) == 1  # the check's
    go.set()
    assert finish() == expected


def test_a_death_in_the_background_is_noticed_when_the_samples_are_wanted(make, expected, policy, tokenizer):
    """They are then those of the policy as it is by then."""
    sampler = make(deaths=[("generate", 2)])
    sampler.sync()
    finish = sampler.generate_async(PROMPTS, SAMPLING)
    with torch.no_grad():
        policy.transformer.wte.weight.mul_(1.5)
    rollouts = finish()
    assert rollouts == TorchEngine(policy, tokenizer).generate(PROMPTS, SAMPLING) != expected
    assert len(sampler.told) == 1


def test_close_closes_the_engine(make):
    sampler = make()
    sampler.close()
    assert sampler.engine.calls == ["close"]


# Which engine.


@pytest.fixture(scope="module")
def tiny():
    return load_policy("tiny", "cpu")


def test_torch_samples_with_the_policy_itself(tiny, tmp_path):
    engine = make_engine(make_config(), *tiny, tmp_path / "engine.log")
    assert isinstance(engine, TorchEngine) and engine.model is tiny[0]


@pytest.mark.parametrize("name", ["vllm", "vllm-server"])
def test_without_vllm_the_setting_and_the_remedy_are_named(tiny, tmp_path, monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module, package=None: None)
    message = (
        rf"engine: got '{name}', but vLLM is not installed here\..*make vllm.*pip install.*engine torch needs neither"
    )
    with pytest.raises(ValueError, match=message):
        make_engine(make_config(engine=name), *tiny, tmp_path / "engine.log")


@pytest.fixture
def as_if_vllm_were_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module, package=None: object())


@pytest.mark.usefixtures("as_if_vllm_were_installed")
def test_vllm_gets_the_runs_settings_and_is_not_started(tiny, tmp_path):
    config = make_config(engine="vllm", temperature=0.7, seed=3, kv_cache_gib=0.25)
    engine = make_engine(config, *tiny, tmp_path / "engine.log")
    assert isinstance(engine, VLLMEngine) and engine.llm is None
    assert (engine.model, engine.temperature, engine.seed) == (str(paths.TINY), 0.7, 3)
    assert (engine.kv_cache_gib, engine.sleep_level, engine.log) == (0.25, 0, tmp_path / "engine.log")


@pytest.mark.usefixtures("as_if_vllm_were_installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no GPU")
def test_a_server_gets_the_runs_settings_and_is_not_started(tiny, tmp_path):
    config = make_config(engine="vllm-server", temperature=0.7, seed=3)
    engine = make_engine(config, *tiny, tmp_path / "engine.log")
    assert isinstance(engine, VLLMServer) and engine._process is None
    assert (engine.model_id, engine.temperature, engine.seed) == (str(paths.TINY), 0.7, 3)
    assert (engine.weight_backend, engine.log) == ("shared_memory", tmp_path / "engine.log")
    assert engine._arguments["dtype"] == "float32" and engine._arguments["logprobs_mode"] == "processed_logprobs"


@pytest.mark.usefixtures("as_if_vllm_were_installed")
def test_a_gpu_that_is_not_there_is_named_before_anything_starts(tiny, tmp_path):
    with pytest.raises(ValueError, match="engine_gpu: got 99, and the server would need GPU 99"):
        make_engine(make_config(engine="vllm-server", engine_gpu=99), *tiny, tmp_path / "engine.log")


@pytest.mark.parametrize(
    ("wanted", "policy_device", "gpus", "expected"),
    [
        (None, "cpu", 0, None),
        (None, "cpu", 2, 0),
        (None, "cuda", 2, 1),
        (None, "cuda:0", 2, 1),
        (None, "cuda:1", 4, 2),
        (0, "cuda:0", 1, 0),
        (0, "cuda:1", 2, 0),
        (3, "cuda:0", 4, 3),
    ],
)
def test_the_servers_gpu(wanted, policy_device, gpus, expected):
    assert server_gpu(wanted, torch.device(policy_device), gpus) == expected


@pytest.mark.parametrize(
    ("wanted", "device", "gpus", "needed"),
    [(0, "cpu", 0, 0), (1, "cpu", 1, 1), (2, "cuda", 2, 2), (None, "cuda", 1, 1), (None, "cuda:1", 2, 2)],
)
def test_a_gpu_that_is_not_there(wanted, device, gpus, needed):
    message = f"engine_gpu: got {wanted}, and the server would need GPU {needed}; this machine has {gpus} GPUs"
    with pytest.raises(ValueError, match=message):
        server_gpu(wanted, torch.device(device), gpus)


@pytest.mark.parametrize(
    ("device", "gpu", "backend"),
    [("cpu", None, "shared_memory"), ("cpu", 0, "shared_memory"), ("cuda:0", 1, "nccl"), ("cuda", 0, "ipc")],
)
def test_the_way_of_the_weights(device, gpu, backend):
    assert weight_backend(torch.device(device), gpu) == backend
