r"""What people met with vLLM and its clients, one test for each report, under the report's number.

Where a report leaves a question to policy, its test pins ours.  The server is a stub on this machine's loopback; what
needs a GPU is in field_reports.md.
"""

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from copying_engine import CopyingEngine
from processes import is_alive, wait_until
from stub_vllm import StubVLLM, choice, stand_in
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from rlhelpers import paths
from rlhelpers.rollouts import Completion, EngineDeadError, Rollout, Sampling, vllm_inprocess
from rlhelpers.rollouts import processes as server_process
from rlhelpers.rollouts.engine import inspect_rollouts
from rlhelpers.rollouts.processes import free_port
from rlhelpers.rollouts.vllm_client import VLLMClient
from rlhelpers.rollouts.vllm_inprocess import VLLMEngine
from rlhelpers.rollouts.vllm_server import VLLMServer
from rlhelpers.rollouts.vllm_settings import prompt_seed
from rlhelpers.tasks import Grader, Problem, Task, get_prompt
from rlhelpers.tasks.grading import verify_answer
from rlhelpers.training.config import make_config
from rlhelpers.training.draws import derive_seed
from rlhelpers.training.evaluation import flatten, rows_to_read, truncated_fraction
from rlhelpers.training.loop import Run
from rlhelpers.training.sampler import NotInSyncError, Sampler

REPORTS = Path(__file__).parents[2] / "shared/cases/field_reports.jsonl"
PROMPT = get_prompt("r1_zero")
PROMPTS = [PROMPT(f"What is {i} + {i}?") for i in range(8)]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer_of_tiny():
    return AutoTokenizer.from_pretrained(paths.TINY)


@pytest.fixture
def stub():
    with StubVLLM("a policy", str(paths.TINY)).running() as stub:
        yield stub


@pytest.fixture
def server(stub, tokenizer_of_tiny):
    """A server that somebody else has started, joined."""
    server = VLLMServer(str(paths.TINY), port=stub.port, launch_server=False, tokenizer=tokenizer_of_tiny)
    yield server.start()
    server.stop()


class Way:
    """The way for the weights, which only a real vLLM has an end of."""

    def __init__(self, calls):
        self.calls = calls

    def send(self, policy):
        self.calls.append("weights")

    def close(self):
        pass


def answers(stub, *choices, **common):
    """The stub answers each request for completions with these choices."""
    full = [{"index": i, "finish_reason": "stop", **common, **given} for i, given in enumerate(choices)]
    text = json.dumps({"choices": full})
    stub.answer = lambda path, body: (200, text) if path == "/v1/completions" else None


def sampled(text, token_ids, **more):
    return {"text": text, "token_ids": token_ids, "logprobs": {"token_logprobs": [-1.0] * len(token_ids)}, **more}


def test_c01_old_keys_and_values_go_after_the_last_weight_and_before_the_next_request(
    server, stub, tiny_gpt2, tokenizer, monkeypatch
):
    """For the server, and for the engine in this process, which first wakes for the cache.  On a real vLLM:
    test_new_weights_are_in_effect_and_old_keys_and_values_are_not."""
    server._weights = Way(calls := [])
    stub.answer = lambda path, body: calls.append(path)
    for _ in range(2):
        server.sync_weights(tiny_gpt2())
        server.generate(PROMPTS[:1], Sampling())
    assert calls == ["weights", "/reset_prefix_cache", "/v1/completions"] * 2

    monkeypatch.setattr(vllm_inprocess.VLLMEngine, "_ask", lambda self, action: action())
    monkeypatch.setattr(vllm_inprocess, "engine_errors", nullcontext)
    engine, calls = VLLMEngine("a model", tokenizer), []
    engine.weights, engine.asleep = Way(calls), True
    engine.llm = types.SimpleNamespace(
        wake_up=lambda tags: calls.append(f"wake {tags[0]}"),
        reset_prefix_cache=lambda: calls.append("reset") or True,
    )
    engine.sync_weights(tiny_gpt2())
    assert calls == ["wake weights", "weights", "wake kv_cache", "reset"]


def test_c02_an_engine_that_reports_a_sync_and_kept_its_weights_ends_the_run(tiny_gpt2, tokenizer):
    """One layer is perturbed between the syncs."""
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


@pytest.fixture
def weight_sync(monkeypatch):
    """The module that sends weights, without vLLM: of that, what is needed, made up."""
    names = ["vllm", "vllm.distributed", "vllm.distributed.weight_transfer"]
    modules = {name: types.ModuleType(name) for name in names}
    base = modules[f"{names[2]}.base"] = types.ModuleType("base")
    base.ParamMeta = lambda name, dtype, shape: (name, dtype, shape)
    base.WeightSource = base.TrainerInitInfo = base.VLLMWeightSyncClient = object
    factory = modules[f"{names[2]}.factory"] = types.ModuleType("factory")
    factory.WeightTransferTrainerFactory = types.SimpleNamespace()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    from rlhelpers.rollouts import vllm_plugin

    monkeypatch.setattr(vllm_plugin, "register", lambda: None)
    path = Path(vllm_inprocess.__file__).with_name("weight_sync.py")
    return types.SimpleNamespace(**runpy.run_path(str(path)), factory=factory.WeightTransferTrainerFactory)


@pytest.mark.parametrize("tied", [True, False])
def test_c03_every_parameter_of_the_server_is_sent_once_and_a_tied_head_is_none(weight_sync, tied):
    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, tie_word_embeddings=tied)
    policy = GPT2LMHeadModel(config)
    source = weight_sync.PolicyWeights()
    source.policy = policy
    sent = [name for name, _ in source]
    assert sent == [name for name, _, _ in source.metadata()]
    wanted = {name for name, _ in policy.state_dict().items()} - ({"lm_head.weight"} if tied else set())
    assert sorted(sent) == sorted(wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c04_the_dtype_that_is_announced_is_that_of_what_is_sent(weight_sync, tiny_gpt2, dtype):
    """Ours is the policy's own; vLLM's loader casts to the engine's: the trainer's weights are never touched."""
    policy = tiny_gpt2(dtype)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    source = weight_sync.PolicyWeights()
    source.policy = policy
    assert [(n, w.dtype, tuple(w.shape)) for n, w in source] == source.metadata()
    assert {kind for _, kind, _ in source.metadata()} == {dtype}
    assert all(weight.dtype == dtype and weight.equal(before[n]) for n, weight in policy.state_dict().items())


def test_c05_a_server_that_keeps_the_way_of_a_dead_trainer_is_told_with_the_remedy_at_once(server, stub, weight_sync):
    """vLLM's trainer goes on waiting for the meeting that was refused; ours does not.  A server of our own ends with
    its trainer, so that this is one that was joined."""
    forever = threading.Event()

    def trainer_init(info, client, source):
        threading.Thread(target=refused, args=(client,), daemon=True).start()
        forever.wait(60)

    def refused(client):
        with pytest.raises(EngineDeadError):
            client.init_weight_transfer_engine({})

    weight_sync.factory.trainer_init = trainer_init
    weight_sync.WeightSync.__init__.__globals__["_init_info"] = lambda backend: None
    stub.answer = lambda path, body: (500, "weight transfer engine already initialized") if "init" in path else None
    message = "already initialized; if it still holds the way of an earlier trainer, start the server again"
    with pytest.raises(EngineDeadError, match=rf"no way for weights to http://127.0.0.1:{stub.port}: .*{message}"):
        weight_sync.WeightSync("nccl", server._client, "cpu", lambda: False)
    forever.set()


@pytest.fixture
def launch(tokenizer_of_tiny, tmp_path, monkeypatch):
    """A server whose command runs a script in place of vLLM's."""
    api_server = stand_in(tmp_path, monkeypatch)
    monkeypatch.setattr(server_process, "SECONDS_TO_STOP", 1)
    servers = []

    def launch(script="import stub_vllm; stub_vllm.main()", **settings):
        api_server.write_text(script, encoding="utf-8")
        servers.append(VLLMServer(str(paths.TINY), tokenizer=tokenizer_of_tiny, log=tmp_path / "log", **settings))
        return servers[-1]

    yield launch
    for server in servers:
        server.stop()


def test_c08_a_killed_server_starts_again_on_its_port_at_once(launch, monkeypatch):
    """Although a client holds a connection.  A port on which somebody listens is waited for by the seconds in which an
    orphan ends, and then named."""
    server = launch(port=free_port()).start()
    with socket.create_connection(("127.0.0.1", server.port)) as kept:
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(100).startswith(b"HTTP/1.1 200")
        os.kill(server._process.pid, signal.SIGKILL)
        server.restart()
        assert server.generate(PROMPTS[:1], Sampling())
    server.stop()
    assert server_process.SECONDS_FOR_A_PORT < 5
    monkeypatch.setattr(server_process, "SECONDS_FOR_A_PORT", 0.2)
    with socket.create_server(("127.0.0.1", server.port)), pytest.raises(ValueError, match=f"port: {server.port} is"):
        server.start()


# A server with a child that holds what a GPU's memory would be; both watch their owner, as vLLM's plugin has them do.
FAMILY = """
import os, runpy, subprocess, sys, threading, time
watch = runpy.run_path({plugin!r})["_end_with_owner"]
threading.Thread(target=watch, args=(int(os.environ["RLHELPERS_VLLM_OWNER"]),), daemon=True).start()
if "child" not in sys.argv:
    child = subprocess.Popen([sys.executable, __file__, "child"])
    print("family", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
OWNER = """
import os, runpy, sys, time
from pathlib import Path
module = runpy.run_path({process!r})
module["ServerProcess"].stop.__globals__["SECONDS_TO_STOP"] = 1
environment = {{"RLHELPERS_VLLM_OWNER": str(os.getpid())}}
server = module["ServerProcess"]([sys.executable, {family!r}], environment, Path({log!r}))
while "family" not in server.tail():
    time.sleep(0.02)
print("ready", flush=True)
{ending}
"""


@pytest.mark.parametrize("ending", ["server.stop()", "raise KeyError", "", "time.sleep(600)"])
def test_c09_no_process_of_the_server_outlives_its_owner(tmp_path, ending):
    """Stopped, after an exception, at the exit of the kernel, and when that was killed: then both end themselves."""
    family, log = tmp_path / "family.py", tmp_path / "log"
    plugin = Path(server_process.__file__).with_name("vllm_plugin.py")
    family.write_text(FAMILY.format(plugin=str(plugin)), encoding="utf-8")
    script = OWNER.format(process=server_process.__file__, family=str(family), log=str(log), ending=ending)
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert owner.stdout.readline() == b"ready\n"
        pids = [int(pid) for pid in re.search(r"family (\d+) (\d+)", log.read_text(encoding="utf-8")).groups()]
        if "sleep" in ending:
            assert all(map(is_alive, pids))
            owner.kill()
        owner.wait(60)
        wait_until(lambda: not any(map(is_alive, pids)), seconds=10)
    finally:
        owner.kill()
        owner.wait(60)
        owner.stdout.close()


def with_stop_string(body, index):
    """As vLLM does it: the ids are what was sampled, the text ends before the stop string or after it."""
    text = "2 </think> <answer> 2 </answer>"
    kept = text if body.get("include_stop_str_in_output") else text.removesuffix(body["stop"][0])
    return choice(body, index) | {"text": kept, "stop_reason": body["stop"][0]}


def test_c10_the_stop_string_stays_in_the_text_so_that_the_reward_sees_it(server, stub, monkeypatch):
    """By the engine, and by the course's dictionary unless it says otherwise."""
    monkeypatch.setattr("stub_vllm.choice", with_stop_string)
    reward = Grader(PROMPT, verify_answer)
    [rollout] = server.generate(PROMPTS[:1], Sampling(stop=PROMPT.stop, seed=1))
    [same] = server.generate_completions(PROMPTS[:1], {"n": 1, "stop": [PROMPT.stop], "seed": 1})
    for completion in (rollout.completions[0], same):
        assert reward(completion.text, "2")["reward"] == 1
        assert (completion.finish_reason, len(completion.token_ids)) == ("stop", 3)
    cut = {"n": 1, "stop": [PROMPT.stop], "seed": 1, "include_stop_str_in_output": False}
    assert server.generate_completions(PROMPTS[:1], cut)[0].text.endswith("<answer> 2 ")


def test_c10_a_server_that_cuts_it_all_the_same_is_refused(server, stub):
    answers(stub, sampled("2 </think> <answer> 2 ", [5, 6], stop_reason="</answer>"))
    with pytest.raises(RuntimeError, match="cut the stop string '</answer>'"):
        server.generate(PROMPTS[:1], Sampling(stop=PROMPT.stop))


def test_c11_a_prompt_without_room_is_left_out_and_counted_or_named_before_anything_is_sent(
    server, stub, tiny_gpt2, tokenizer
):
    """A run leaves problems out beforehand, so that groups stay whole; a call of the engine is refused as a whole, with
    the lengths.  A server that was joined may have less room than the model."""
    problems = [Problem("a b c d", "1")] * 7 + [Problem("a " * 30, "1")]
    sizes = {"group_size": 2, "rollout_batch_size": 14, "train_batch_size": 14}
    config = make_config(quick=True, prompt="question_only", max_tokens=4, **sizes)
    run = Run(config, Task("t", problems, problems, verify_answer), tiny_gpt2(), tokenizer, None)
    assert (len(run.train_problems), len(run.val_problems), run.too_long) == (7, 7, 2)
    server.stop()
    stub.models[0]["max_model_len"] = 200
    server.start()
    with pytest.raises(ValueError, match=r"prompt 7 has \d+ tokens; with max_tokens=64 it must fit .* context of 200"):
        server.generate([*PROMPTS[:7], "long " * 190], Sampling())
    assert not stub.requests
    stub.answer = lambda path, body: (400, "the prompt is too long") if body["seed"] == prompt_seed(0, 7) else None
    with pytest.raises(ValueError, match="refuses what /v1/completions was given: the prompt is too long"):
        server.generate(PROMPTS, Sampling(max_tokens=2))


def test_c12_what_was_cut_off_is_marked_and_counted(server, stub):
    """It is graded and trained on like any other: there is no mask for it."""
    text = r"so </think> <answer> 2 </answer> and then"
    answers(stub, sampled(text, [5, 6]), sampled(text, [5, 7], finish_reason="length"))
    samples = flatten([Problem("1+1?", "2")], server.generate(PROMPTS[:1], Sampling(n=2)))
    rows = rows_to_read(samples, Grader(PROMPT, verify_answer))
    assert [row["finish_reason"] for row in rows] == ["stop", "length"] and [row["tokens"] for row in rows] == [2, 2]
    assert truncated_fraction(samples) == 0.5 and [row["reward"] for row in rows] == [1, 1]


def test_c13_every_seed_and_every_step_samples_its_own_and_repeats_it(server, stub):
    """There is one server for a run, whose seed config.yaml has and every request's follows from."""

    def draw(seed, step):
        sampling = Sampling(n=2, seed=derive_seed(seed, "train", step))
        return [c.token_ids for r in server.generate(PROMPTS[:2], sampling) for c in r.completions]

    drawn = {(seed, step): draw(seed, step) for seed in (0, 1) for step in (1, 2)}
    assert len({tuple(ids) for rows in drawn.values() for ids in rows}) == 16
    assert len({body["seed"] for body in stub.requests}) == 8
    assert all(draw(*key) == rows for key, rows in drawn.items())


def test_c14_a_group_of_copies_ends_the_run_unless_chance_may_have_made_it(server, stub, monkeypatch):
    """A stub that takes the request's seed literally.  Ended rather than remarked: such a run would learn nothing."""
    monkeypatch.setattr("stub_vllm.choice", lambda body, index: choice(body, 0) | {"index": index})
    sampling = Sampling(n=4, temperature=1.0, seed=0)
    rollouts = server.generate(PROMPTS[:1], sampling)
    assert len({tuple(c.token_ids) for c in rollouts[0].completions}) == 1

    def inspect(log_prob, **changes):
        copies = [Completion("x", [1, 2], "stop", [log_prob, log_prob])] * 4
        inspect_rollouts([Rollout("p", [3], copies)], ["p"], Sampling(**{"n": 4} | changes), 16)

    with pytest.raises(RuntimeError, match=r"prompt 0 of 1: its 4 completions are all the same, .* share a seed"):
        inspect(-5.0)
    inspect(-0.1)  # a policy that is sure of itself
    for changes in ({"temperature": 0}, {"top_p": 0.1}, {"min_tokens": 2}):  # nothing was drawn by these log-probs
        inspect(-5.0, **changes)


def test_c15_the_server_reads_the_trainers_ids_and_no_second_bos(server, stub, tokenizer_of_tiny):
    """Ids are sent, not text; a server that says that it read others is refused, and so is one with another
    tokenizer."""
    prompt = f"{tokenizer_of_tiny.eos_token}User: hello"
    ids = tokenizer_of_tiny.encode(prompt, add_special_tokens=False)
    [rollout] = server.generate([prompt], Sampling())
    assert stub.requests[0]["prompt"] == rollout.prompt_token_ids == ids and ids[0] == tokenizer_of_tiny.eos_token_id
    answers(stub, sampled("x", [5], prompt_token_ids=[ids[0], *ids]))
    with pytest.raises(RuntimeError, match="read other token ids than the prompt's; one more in front is a second BOS"):
        server.generate([prompt], Sampling())
    server.stop()
    stub.tokenize = lambda text: [1, 2, 3]
    with pytest.raises(ValueError, match=f"port: the server at {stub.port} serves 'a policy' with another tokenizer"):
        server.start()


def test_c16_where_nobody_listens_it_is_said_at_once_and_given_up_in_time(tokenizer_of_tiny, capsys, monkeypatch):
    """By the name of this machine alone; proxies are not asked."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    settings = {"launch_server": False, "startup_timeout": 0.5, "tokenizer": tokenizer_of_tiny, "port": free_port()}
    for host in ("localhost", "127.0.0.1"):
        server = VLLMServer(str(paths.TINY), host=host, **settings)
        with pytest.raises(RuntimeError, match=rf"at 127.0.0.1:{server._wanted_port} within startup_timeout=0.5 s"):
            server.start()
        assert f"Waiting for the vLLM server at 127.0.0.1:{settings['port']}, at most 0.5 s" in capsys.readouterr().err
    for host in ("0.0.0.0", "::1", "::", "", "example.org", None):
        with pytest.raises(ValueError, match=rf"host: got {host!r}; accepted are 127.0.0.1 and localhost"):
            VLLMServer(str(paths.TINY), host=host, **settings)


def test_c16_a_server_that_takes_connections_and_never_answers_is_given_up_in_time(tokenizer_of_tiny):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        settings = {"launch_server": False, "startup_timeout": 0.5, "tokenizer": tokenizer_of_tiny}
        with pytest.raises(RuntimeError, match=rf"127.0.0.1:{port} within startup_timeout=0.5 s"):
            VLLMServer(str(paths.TINY), port=port, **settings).start()
        with pytest.raises(EngineDeadError, match=r"the vLLM server hangs: /path was not answered within 0.2 s"):
            VLLMClient(f"http://127.0.0.1:{port}")._post("/path", None, 0.2)


def test_c17_an_answer_without_token_ids_or_with_other_log_probs_is_an_error(server, stub):
    """Text is never encoded again: it may come to other tokens than were sampled."""
    five = {"token_logprobs": [-1.0] * 5}
    for given, message in (
        ({"text": "a b c", "logprobs": five}, "of another form: KeyError"),
        ({"text": "a b c", "logprobs": five, "token_ids": None}, "of another form: TypeError"),
        ({"text": "a b c", "logprobs": None, "token_ids": [1, 2, 3]}, "of another form: TypeError"),
        ({"text": "a b c", "logprobs": five, "token_ids": [1, 2, 3]}, "5 log-probs for 3 tokens"),
    ):
        answers(stub, given)
        with pytest.raises(RuntimeError, match=message):
            server.generate(PROMPTS[:1], Sampling())
    for text in ("<html>", "[]", "7"):
        stub.answer = lambda path, body, text=text: (200, text)
        with pytest.raises(RuntimeError, match=r"answered /v1/completions with no JSON object|of another form"):
            server.generate(PROMPTS[:1], Sampling())


@pytest.mark.skipif(not REPORTS.exists(), reason="the reports are not at hand")
def test_every_report_on_engines_has_its_test():
    with REPORTS.open(encoding="utf-8") as lines:
        reported = {report["id"].lower() for report in map(json.loads, lines) if report["group"] == "C"}
    assert {re.match(r"test_(c\d+)_|", name)[1] for name in globals()} - {None} == reported
