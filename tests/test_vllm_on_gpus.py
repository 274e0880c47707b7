"""What a GPU would see, without one: the order of calls, the settings of each way of the weights, bounded waits."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from rlhelpers import paths
from rlhelpers.rollouts import EngineDeadError
from rlhelpers.rollouts.vllm_inprocess import VLLMEngine
from rlhelpers.rollouts.vllm_server import VLLMServer
from rlhelpers.rollouts.vllm_settings import visible_device

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from rlhelpers.rollouts import shared_memory, weight_sync  # noqa: E402  they import vLLM


class FakeLLM:
    """Notes what it is told."""

    def __init__(self, told):
        self.told = told
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(resources=SimpleNamespace(engine_dead=False)))

    def sleep(self, level):
        self.told.append(f"sleep {level}")

    def wake_up(self, tags):
        self.told.append(f"wake {tags[0]}")

    def reset_prefix_cache(self):
        self.told.append("forget")
        return True


class FakeWeights:
    def __init__(self, told):
        self.told = told

    def send(self, policy):
        self.told.append("weights")


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_wakes_for_the_weights_before_it_makes_room_for_the_cache(tiny_gpt2, tokenizer, level):
    told = []
    engine = VLLMEngine("any", tokenizer, sleep_level=level)
    engine.llm, engine.weights = FakeLLM(told), FakeWeights(told)
    engine.sync_weights(tiny_gpt2())
    engine.rest()
    engine.rest()
    engine.sync_weights(tiny_gpt2())
    first, then = ["weights", "forget"], [f"sleep {level}", "wake weights", "weights", "wake kv_cache", "forget"]
    assert told == first + then
    engine.llm = None


def test_without_a_sleep_level_it_stays_awake(tiny_gpt2, tokenizer):
    told = []
    engine = VLLMEngine("any", tokenizer)
    engine.llm, engine.weights = FakeLLM(told), FakeWeights(told)
    engine.rest()
    engine.sync_weights(tiny_gpt2())
    assert told == ["weights", "forget"]
    engine.llm = None


def test_two_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    server = VLLMServer(str(paths.TINY), gpu=1, gpu_memory_utilization=0.8)
    assert server.weight_backend == "nccl"
    assert server._arguments["weight_transfer_config"] == {"backend": "nccl"}
    assert server._arguments["gpu_memory_utilization"] == 0.8  # unless the size of its cache is given
    assert VLLMServer(str(paths.TINY), kv_cache_gib=2)._arguments["gpu_memory_utilization"] == 0.01
    assert not {"enforce_eager", "kv_cache_memory_bytes", "enable_chunked_prefill"} & server._arguments.keys()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")  # as a scheduler gives them out
    assert VLLMServer(str(paths.TINY), gpu=1)._environment["CUDA_VISIBLE_DEVICES"] == "3"
    with pytest.raises(ValueError, match="engine_gpu: got 2; CUDA_VISIBLE_DEVICES shows 2 GPUs"):
        VLLMServer(str(paths.TINY), gpu=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    server = VLLMServer(str(paths.TINY), gpu=1)
    assert server._environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert server._environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in server._environment
    info = weight_sync._init_info("nccl")
    assert (info.backend, info.world_size, info.rank) == ("nccl", 2, 0)


def test_one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    server = VLLMServer(str(paths.TINY), gpu=0, weight_backend="ipc")
    assert server._environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert weight_sync._init_info("ipc").backend == "ipc"


@pytest.mark.parametrize(
    ("visible", "index", "expected"), [(None, 1, "1"), ("3,5", 1, "5"), ("GPU-a,GPU-b", 0, "GPU-a")]
)
def test_a_child_sees_the_policys_gpu_alone(monkeypatch, visible, index, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_device(index) == expected


class BlockedTrainer:
    """As NCCL is when the other side has died."""

    def __init__(self):
        self.end = threading.Event()

    def send_weights(self):
        self.end.wait()

    def shutdown(self):
        self.end.set()


def test_a_transfer_that_nobody_takes_ends(monkeypatch, tiny_gpt2):
    monkeypatch.setattr(weight_sync, "SECONDS", 0.2)
    trainer = BlockedTrainer()
    factory = weight_sync.WeightTransferTrainerFactory
    monkeypatch.setattr(factory, "trainer_init", classmethod(lambda cls, info, client, source: trainer))
    sync = weight_sync.WeightSync("shared_memory", client=None, device="cpu", is_dead=lambda: False)
    with pytest.raises(EngineDeadError, match=r"did not answer within 0\.2 s"):
        sync.send(tiny_gpt2())
    sync.close()


def test_a_transfer_ends_with_the_process_that_should_take_it(monkeypatch, tiny_gpt2):
    trainer = BlockedTrainer()
    factory = weight_sync.WeightTransferTrainerFactory
    monkeypatch.setattr(factory, "trainer_init", classmethod(lambda cls, info, client, source: trainer))
    sync = weight_sync.WeightSync("shared_memory", client=None, device="cpu", is_dead=lambda: True)
    with pytest.raises(EngineDeadError, match="process is gone"):
        sync.send(tiny_gpt2())
    sync.close()


def test_a_transfer_that_fails_is_no_death(monkeypatch, tiny_gpt2):
    class BrokenTrainer(BlockedTrainer):
        def send_weights(self):
            raise ConnectionError("refused")

    factory = weight_sync.WeightTransferTrainerFactory
    monkeypatch.setattr(factory, "trainer_init", classmethod(lambda cls, info, client, source: BrokenTrainer()))
    sync = weight_sync.WeightSync("shared_memory", client=None, device="cpu", is_dead=lambda: False)
    with pytest.raises(ConnectionError, match="refused"):
        sync.send(tiny_gpt2())


def test_every_weight_goes_once_under_its_checkpoint_name(tiny_gpt2):
    """GPT-2 ties its head to its embeddings."""
    policy = tiny_gpt2(torch.float32)
    source = weight_sync.PolicyWeights()
    source.policy = policy
    sent = dict(source)
    assert list(sent) == [name for name, _ in policy.named_parameters()] == [m.name for m in source.metadata()]
    assert "lm_head.weight" not in sent and "transformer.wte.weight" in sent
    for name, parameter in policy.named_parameters():
        assert sent[name].data_ptr() == parameter.data_ptr() and not sent[name].requires_grad
    assert all(m.dtype == sent[m.name].dtype and m.shape == tuple(sent[m.name].shape) for m in source.metadata())


def test_what_killed_trainers_left_is_removed_and_what_others_use_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "MEMORY", tmp_path)
    used, left, other = (tmp_path / f"rlhelpers-{pid}-x" for pid in (os.getpid(), 2**22 + 1, "someone"))
    for folder in (used, left, other):
        folder.mkdir()
    shared_memory.remove_left_overs()
    assert used.exists() and other.exists() and not left.exists()


def test_an_engine_whose_weights_failed_is_not_asked_again(tiny_gpt2, tokenizer):
    """Nobody knows which weights it has."""

    class BrokenWeights:
        def send(self, policy):
            raise ConnectionError("half-way")

    engine = VLLMEngine("any", tokenizer)
    told = []
    engine.llm, engine.weights = FakeLLM(told), BrokenWeights()
    engine.llm.llm_engine.engine_core.shutdown = lambda: told.append("ended")
    with pytest.raises(ConnectionError):
        engine.sync_weights(tiny_gpt2())
    assert told == ["ended"] and engine.llm is None
