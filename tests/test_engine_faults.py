"""An engine that fails in the middle of a run: the error says how, no step that was complete is lost, every file can be
read, and with a good engine the run goes on as if nothing had happened."""

import copy
import json
import threading
from functools import partial

import pytest
import torch
import yaml
from copying_engine import CopyingEngine
from killable import PUSH, write_model
from safetensors.torch import load_file
from stub_vllm import StubVLLM
from test_engine import of_the_first, too_few

from rlhelpers import paths
from rlhelpers.evidence.runs import read_jsonl, read_metrics
from rlhelpers.rollouts import EngineDeadError, Sampling, TorchEngine, vllm_client
from rlhelpers.rollouts.vllm_server import VLLMServer
from rlhelpers.training import loop
from rlhelpers.training.config import make_config
from rlhelpers.training.loop import train
from rlhelpers.training.sampler import NotInSyncError, Sampler

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SMALL = {
    "quick": True,
    "device": "cpu",
    "engine": "vllm-server",
    "n_train_examples": 8,
    "n_val_examples": 2,
    "rollout_batch_size": 16,
    "train_batch_size": 16,
    "max_tokens": 8,
    "num_rollout_steps": 3,
    "learning_rate": 1e-2,
    "estimator": PUSH,
    "variant": "small",
}
SYNCS = 2  # before the batch of step 2: one at the start, one after step 1


class Server:
    """A stub that samples with a copy of the run's policy, in this process.  `fault` is asked with it at each request
    for a batch; what it gives is answered instead, where it is not None."""

    def __init__(self, policy, tokenizer, fault):
        self.policy, self.tokenizer, self.fault = policy, tokenizer, fault
        self.copy = copy.deepcopy(policy)
        self.syncs, self.is_gone, self._lock = 0, False, threading.Lock()

    def answer(self, path, body):
        if self.is_gone:
            return 0, ""
        if path == "/reset_prefix_cache":
            self.syncs += 1
            self.copy.load_state_dict(self.policy.state_dict())
        if path != "/v1/completions":
            return None
        if body["n"] == 8 and (answer := self.fault(self)):
            return answer
        return 200, json.dumps({"choices": self._choices(body)})

    def _choices(self, body):
        sampling = Sampling(
            n=body["n"], max_tokens=body["max_tokens"], stop=(body["stop"] or [None])[0], seed=body["seed"]
        )
        with self._lock:
            text = self.tokenizer.decode(body["prompt"])
            [rollout] = TorchEngine(self.copy, self.tokenizer).generate([text], sampling)
        assert rollout.prompt_token_ids == body["prompt"]
        return [
            {"index": i, "text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason}
            | {"logprobs": {"token_logprobs": c.log_probs}}
            for i, c in enumerate(rollout.completions)
        ]


class Way:
    """The stub is in this process, and takes them itself."""

    send = close = staticmethod(lambda *_: None)


class Object(CopyingEngine):
    """An engine whose second batch goes through `spoil`."""

    def __init__(self, policy, tokenizer, spoil):
        super().__init__(policy, tokenizer)
        self.spoil, self.batches = spoil, 0

    def generate(self, prompts, sampling):
        rollouts = super().generate(prompts, sampling)
        self.batches += sampling.n == 8
        return self.spoil(rollouts) if self.batches == 2 and sampling.n == 8 else rollouts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def run(model):
    """Trains under `runs` with an engine that `make` gives for a policy and its tokenizer; returns the run's folder."""

    def run(runs, make, **settings):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paths, "RUNS", runs)
            patch.setattr(loop, "check_engine", lambda *_: None)
            patch.setattr(loop, "make_engine", lambda config, policy, tokenizer, log: make(policy, tokenizer))
            patch.setattr(VLLMServer, "init_weight_sync", lambda self, device: setattr(self, "_weights", Way()))
            train(make_config(model=model, **SMALL | settings))
        return runs / "quick/small/seed=0"

    return run


@pytest.fixture(scope="module")
def serving(model):
    """Makes engines: a server that was joined, with such a fault."""
    stubs = []

    def make(fault, policy, tokenizer):
        stub = StubVLLM("a policy", model)
        stub.answer = Server(policy, tokenizer, fault).answer
        stubs.append(stub.running())
        stubs[-1].__enter__()
        return VLLMServer(model, port=stub.port, launch_server=False, startup_timeout=1, tokenizer=tokenizer)

    yield lambda fault: partial(make, fault)
    for stub in stubs:
        stub.__exit__(None, None, None)


def no_fault(_):
    return None


@pytest.fixture(scope="module")
def undisturbed(run, serving, tmp_path_factory):
    runs = {
        "server": run(tmp_path_factory.mktemp("server"), serving(no_fault)),
        "ahead": run(tmp_path_factory.mktemp("ahead"), serving(no_fault), rollouts_ahead=True),
        "object": run(tmp_path_factory.mktemp("object"), CopyingEngine),
    }
    assert all(read_metrics(folder).grad_norm.dropna().gt(0).all() for folder in runs.values())
    return runs


def read_everything(folder):
    """Fails where a file is not what its name says, or is of another kind."""
    readers = {
        ".jsonl": read_jsonl,
        ".json": lambda file: json.loads(file.read_text(encoding="utf-8")),
        ".yaml": lambda file: yaml.safe_load(file.read_text(encoding="utf-8")),
        ".safetensors": load_file,
        ".pt": partial(torch.load, weights_only=True),
        "": lambda file: file.read_text(encoding="utf-8"),
    }
    for file in folder.rglob("*"):
        if file.is_file():
            readers[file.suffix](file)


def check(run, runs, broken, good, whole, error, message, **settings):
    """The whole of this file's promise, for one fault."""
    with pytest.raises(error, match=message) as raised:
        run(runs, broken, **settings)
    folder = runs / "quick/small/seed=0"
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert about["status"] == "failed" and about["error"] == f"{type(raised.value).__name__}: {raised.value}"
    assert read_metrics(folder).index.tolist() == [0, 1]
    read_everything(folder)
    assert run(runs, good, resume=True, **settings) == folder
    assert_same(folder, whole)
    assert not list(runs.rglob("*earlier*"))
    read_everything(folder)


def assert_same(folder, whole):
    without_times = [read_metrics(f).filter(regex="^(?!.*seconds)") for f in (folder, whole)]
    assert without_times[0].equals(without_times[1])
    assert (folder / "policy/model.safetensors").read_bytes() == (whole / "policy/model.safetensors").read_bytes()


def gone(server):
    server.is_gone |= server.syncs == SYNCS
    return (0, "") if server.is_gone else None


def answering(status, text):
    return lambda server: (status, text) if server.syncs >= SYNCS else None


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (gone, RuntimeError, r"no vLLM server answered at 127.0.0.1:\d+ within startup_timeout=1 s"),
        (answering(400, "too long"), ValueError, "the vLLM server refuses what /v1/completions was given: too long"),
    ],
    ids=["dies for good", "refuses"],
)
def test_a_server_that_fails_in_the_middle(run, serving, undisturbed, tmp_path, fault, error, message):
    check(run, tmp_path, serving(fault), serving(no_fault), undisturbed["server"], error, message)


def test_a_server_that_fails_over_a_batch_ahead(run, serving, undisturbed, tmp_path):
    """The batch of step 3, which is asked for while step 2 trains."""
    fault, whole = answering(400, "too long"), undisturbed["ahead"]
    check(run, tmp_path, serving(fault), serving(no_fault), whole, ValueError, "refuses", rollouts_ahead=True)


def test_a_server_that_hangs_in_the_middle(run, serving, undisturbed, tmp_path, monkeypatch):
    forever = threading.Event()
    hangs = serving(lambda server: forever.wait(60) and None if server.syncs >= SYNCS else None)
    monkeypatch.setattr(vllm_client, "SECONDS_FOR_AN_ANSWER", 1)
    message = "the vLLM server hangs: /v1/completions was not answered within 1 s"
    check(run, tmp_path, hangs, serving(no_fault), undisturbed["server"], EngineDeadError, message)
    forever.set()


def test_a_server_that_dies_once_is_started_again(run, serving, undisturbed, tmp_path):
    folder = run(tmp_path, serving(lambda server: (0, "") if server.syncs == SYNCS else None))
    assert_same(folder, undisturbed["server"])
    remarks = json.loads((folder / "run.json").read_text(encoding="utf-8"))["remarks"]
    assert len(remarks) == 1 and remarks[0].startswith("The engine died and was started again: the vLLM server does no")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (too_few, "engine: prompt 1 of 2: it has 7 completions; wanted are n=8"),
        (of_the_first(token_ids=lambda ids: [5000, *ids[1:]]), "engine: prompt 0 of 2: a completion holds token 5000"),
        (of_the_first(log_probs=lambda p: [float("nan"), *p[1:]]), "has the log-prob nan; wanted are finite numbers"),
    ],
    ids=["too few", "unknown token", "nan"],
)
def test_an_engine_that_gives_what_it_cannot_have_sampled(run, undisturbed, tmp_path, spoil, message):
    check(run, tmp_path, partial(Object, spoil=spoil), CopyingEngine, undisturbed["object"], RuntimeError, message)


@pytest.mark.field_report("C02")
def test_an_engine_that_kept_its_weights_ends_the_run(tiny_gpt2, tokenizer):
    """It reports a sync.  One layer is perturbed between the syncs."""
    policy = tiny_gpt2(torch.float32)
    for keeps in (False, True):
        engine = CopyingEngine(policy, tokenizer, keeps_weights=keeps)
        sampler = Sampler(engine, policy, tokenizer, 1.0, pytest.fail)
        sampler.sync()
        with torch.no_grad():
            policy.transformer.h[0].mlp.c_fc.weight.mul_(3)
        if keeps:
            with pytest.raises(NotInSyncError, match=r"weights not in sync: .* the limit for torch.float32 is 0.001"):
                sampler.sync()
        else:
            sampler.sync()
        sampler.close()
