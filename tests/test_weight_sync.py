"""Weights on their way to vLLM: which go, how, and waits that end; with vLLM's transfer made up, and the real one."""

import os
import sys
import threading
from dataclasses import make_dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlhelpers.rollouts import EngineDeadError, vllm_inprocess
from rlhelpers.rollouts.vllm_client import VLLMClient

NAME = "rlhelpers.rollouts.weight_sync"
BASE = "vllm.distributed.weight_transfer"


class Anything:
    """A base class of vLLM's, with or without type parameters."""

    def __class_getitem__(cls, _):
        return cls

    def __init__(self, **given):
        self.__dict__ |= given


def made_up_vllm() -> dict[str, ModuleType]:
    """Of vLLM's modules what weight_sync imports at its top."""
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.distributed", BASE)}
    modules |= {f"{BASE}.{name}": ModuleType(name) for name in ("base", "clients", "factory")}
    names = ["TrainerWeightTransferEngine", "VLLMWeightSyncClient", "WeightSource"]
    names += ["WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo"]
    modules[f"{BASE}.base"].__dict__.update(dict.fromkeys(names, Anything))
    modules[f"{BASE}.base"].TrainerInitInfo = make_dataclass("TrainerInitInfo", [("rank", int)])
    modules[f"{BASE}.base"].ParamMeta = lambda name, dtype, shape: SimpleNamespace(name=name, dtype=dtype, shape=shape)
    modules[f"{BASE}.clients"]._json_safe_update_payload = lambda info: info
    for side in ("Engine", "Trainer"):
        register = staticmethod(lambda name, kind: None)
        factory = type("Factory", (), {"_registry": {}, "register_engine": register, "trainer_init": None})
        setattr(modules[f"{BASE}.factory"], f"WeightTransfer{side}Factory", factory)
    return modules


@pytest.fixture(params=["made up", pytest.param("real", marks=pytest.mark.vllm)])
def weight_sync(request, monkeypatch):
    """The module, new, with vLLM made up or real."""
    if request.param == "real":
        pytest.importorskip("vllm")
    else:
        for name, module in made_up_vllm().items():
            monkeypatch.setitem(sys.modules, name, module)
    spec = spec_from_file_location(NAME, Path(vllm_inprocess.__file__).with_name("weight_sync.py"))
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, NAME, module)
    spec.loader.exec_module(module)
    return module


def transfer(weight_sync, monkeypatch, trainer, call_workers=None, is_dead=lambda: False):
    """A connection whose transfer is this trainer, or a function that makes one from vLLM's arguments."""
    make = trainer if callable(trainer) else lambda info, client, source: trainer
    factory = weight_sync.WeightTransferTrainerFactory
    monkeypatch.setattr(factory, "trainer_init", staticmethod(make))
    monkeypatch.setattr(weight_sync, "_init_info", lambda backend: None)
    return weight_sync.WeightSync("shared_memory", call_workers, "cpu", is_dead)


class BlockedTrainer:
    """As NCCL is when the other side has died."""

    def __init__(self):
        self.end = threading.Event()

    def send_weights(self):
        self.end.wait()

    def shutdown(self):
        self.end.set()


def test_a_transfer_that_nobody_takes_ends(weight_sync, monkeypatch, tiny_gpt2):
    monkeypatch.setattr(weight_sync, "SECONDS", 0.2)
    sync = transfer(weight_sync, monkeypatch, BlockedTrainer())
    with pytest.raises(EngineDeadError, match=r"did not answer within 0\.2 s"):
        sync.send(tiny_gpt2())
    sync.close()


def test_a_transfer_ends_with_the_process_that_should_take_it(weight_sync, monkeypatch, tiny_gpt2):
    sync = transfer(weight_sync, monkeypatch, BlockedTrainer(), is_dead=lambda: True)
    with pytest.raises(EngineDeadError, match="process is gone"):
        sync.send(tiny_gpt2())
    sync.close()


def test_a_transfer_that_fails_is_no_death(weight_sync, monkeypatch, tiny_gpt2):
    trainer = BlockedTrainer()
    trainer.send_weights = lambda: exec("raise ConnectionError('refused')")
    with pytest.raises(ConnectionError, match="refused"):
        transfer(weight_sync, monkeypatch, trainer).send(tiny_gpt2())


@pytest.mark.field_report("C05")
def test_a_refused_connection_is_told_with_the_remedy_at_once(weight_sync, monkeypatch):
    """vLLM's trainer goes on waiting for the rendezvous that was refused; ours does not.  A server of our own ends with
    its trainer, so that this is one that was joined."""
    forever = threading.Event()

    def trainer_init(info, client, source):
        threading.Thread(target=refused, args=(client,), daemon=True).start()
        forever.wait(60)

    def refused(client):
        with pytest.raises(EngineDeadError):
            client.init_weight_transfer_engine({})

    class Client(VLLMClient):
        def _post(self, path, *_):
            raise EngineDeadError("the vLLM server failed: weight transfer engine already initialized")

    message = "already initialized; if it still holds the way of an earlier trainer, start the server again"
    with pytest.raises(EngineDeadError, match=rf"no way for weights to http://127.0.0.1:9: .*{message}"):
        transfer(weight_sync, monkeypatch, trainer_init, Client("http://127.0.0.1:9").call_workers)
    forever.set()


@pytest.mark.field_report("C03")
@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_goes_once_and_a_tied_head_does_not(weight_sync, tied):
    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, tie_word_embeddings=tied)
    source = weight_sync.PolicyWeights()
    source.policy = policy = GPT2LMHeadModel(config)
    sent = [name for name, _ in source]
    assert sent == [meta.name for meta in source.metadata()]
    wanted = {name for name, _ in policy.state_dict().items()} - ({"lm_head.weight"} if tied else set())
    assert sorted(sent) == sorted(wanted)


@pytest.mark.field_report("C04")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_announced_is_what_is_sent(weight_sync, tiny_gpt2, dtype):
    """In the policy's own dtype; vLLM's loader casts to the engine's: the trainer's weights are never touched."""
    source = weight_sync.PolicyWeights()
    source.policy = policy = tiny_gpt2(dtype)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    announced = [(meta.name, meta.dtype, tuple(meta.shape)) for meta in source.metadata()]
    assert [(name, weight.dtype, tuple(weight.shape)) for name, weight in source] == announced
    assert {kind for _, kind, _ in announced} == {dtype}
    parameters = dict(policy.named_parameters())
    for name, weight in source:
        assert weight.data_ptr() == parameters[name].data_ptr() and not weight.requires_grad
    assert all(weight.dtype == dtype and weight.equal(before[n]) for n, weight in policy.state_dict().items())


def test_left_overs_of_killed_trainers_are_removed(weight_sync, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_sync, "MEMORY", tmp_path)
    used, left, other = (tmp_path / f"rlhelpers-{pid}-x" for pid in (os.getpid(), 2**22 + 1, "someone"))
    for folder in (used, left, other):
        folder.mkdir()
    weight_sync.remove_left_overs()
    assert used.exists() and other.exists() and not left.exists()


def test_the_file_in_shared_memory_is_there_while_it_is_loaded(weight_sync, tmp_path, monkeypatch, tiny_gpt2):
    monkeypatch.setattr(weight_sync, "MEMORY", tmp_path)
    told = []

    def call_workers(method, **given):
        told.append((method, *(Path(info["path"]).exists() for info in given.values() if info)))

    source = weight_sync.PolicyWeights()
    source.policy = tiny_gpt2(torch.float32)
    info = weight_sync.SharedMemoryInitInfo(rank=0)
    weight_sync.SharedMemoryTrainer.trainer_init(
        info, client=weight_sync._Client(call_workers), source=source
    ).send_weights()
    names = ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
    assert told == [(names[0],), (names[1],), (names[2], True), (names[3],)]
    assert not list(tmp_path.iterdir())


@pytest.mark.vllm
def test_the_ways_between_gpus():
    pytest.importorskip("vllm")
    from rlhelpers.rollouts.weight_sync import _init_info

    info = _init_info("nccl")
    assert (info.backend, info.world_size, info.rank) == ("nccl", 2, 0)
    assert _init_info("ipc").backend == "ipc"
