"""VLLMServer against a stub that speaks vLLM's HTTP: no vLLM is needed here."""

import json
import os
import re
import signal
import socket
import sys
import threading

import pytest
import torch
from processes import is_alive, wait_until
from stub_vllm import StubVLLM, choice, stand_in
from transformers import AutoTokenizer

from rlhelpers import paths
from rlhelpers.rollouts import EngineDeadError, Sampling, processes, vllm_server
from rlhelpers.rollouts.processes import OWNER, free_port
from rlhelpers.rollouts.vllm_client import VLLMClient
from rlhelpers.rollouts.vllm_server import VLLMServer
from rlhelpers.rollouts.vllm_settings import prompt_seed
from rlhelpers.tasks import Grader, Problem, Task, get_prompt
from rlhelpers.tasks.grading import verify_answer
from rlhelpers.training.config import make_config
from rlhelpers.training.draws import derive_seed
from rlhelpers.training.evaluation import flatten, grade_all, rows_to_read, truncated_fraction
from rlhelpers.training.loop import problems_that_fit

PROMPTS = ["Question: what is 1 + 1?\nAnswer:", "User: Ben", "Question: what is 1 + 1?\nAnswer:"]
COURSE = {"n": 2, "temperature": 1.0, "top_p": 1.0, "max_tokens": 32, "stop": ["</answer>"], "seed": 5}
R1 = get_prompt("r1_zero")
R1_PROMPTS = [R1(f"What is {i} + {i}?") for i in range(8)]


@pytest.fixture(scope="module")
def tokenizer_of_tiny():
    return AutoTokenizer.from_pretrained(paths.TINY)


@pytest.fixture
def stub():
    with StubVLLM("a policy", str(paths.TINY)).running() as stub:
        yield stub


@pytest.fixture
def join(stub, tokenizer_of_tiny):
    """Joins the stub as a server that somebody else has started."""
    servers = []

    def join(**settings):
        defaults = {"port": stub.port, "launch_server": False, "startup_timeout": 30, "tokenizer": tokenizer_of_tiny}
        servers.append(VLLMServer(str(paths.TINY), **defaults | settings))
        return servers[-1].start()

    yield join
    for server in servers:
        server.stop()


@pytest.fixture
def server(join):
    return join()


@pytest.fixture
def launch(tokenizer_of_tiny, tmp_path, monkeypatch):
    """A server whose command runs this script in place of vLLM's; it ends after the test."""
    api_server = stand_in(tmp_path, monkeypatch)
    monkeypatch.setattr(processes, "SECONDS_TO_STOP", 2)
    servers = []

    def launch(script="import stub_vllm; stub_vllm.main()", **settings):
        api_server.write_text(script, encoding="utf-8")
        log = tmp_path / "server.log"
        servers.append(VLLMServer(str(paths.TINY), tokenizer=tokenizer_of_tiny, log=log, **settings))
        return servers[-1]

    yield launch
    for server in servers:
        server.stop()


def encode(tokenizer, prompts):
    return [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]


# A server that somebody else has started.


def test_a_server_is_joined_and_left_running(join, stub):
    server = join()
    assert server.served_model == "a policy"  # its root is the model that was asked for
    assert server.start() is server
    server.stop()
    server.stop()
    server.close()
    assert join().generate(PROMPTS, Sampling())


def test_it_is_asked_for_by_the_name_that_it_serves(join, stub):
    stub.models = [{"id": "something else", "root": None}, {"id": str(paths.TINY), "root": None}]
    join().generate(PROMPTS[:1], Sampling())
    assert stub.requests[0]["model"] == str(paths.TINY)


def test_another_models_server_is_refused_and_named(join, stub):
    stub.models = [{"id": "theirs", "root": "their/model"}]
    with pytest.raises(ValueError, match=rf"port: another server answers at {stub.port}; it serves \['theirs'\]"):
        join()
    assert not stub.requests


@pytest.mark.parametrize("answer", [(200, "<html>"), (200, "[]"), (200, '{"data": null}'), (404, "not found")])
def test_what_answers_and_is_no_vllm_is_refused_at_once(join, stub, answer):
    stub.answer = lambda path, body: answer
    with pytest.raises(ValueError, match=rf"port: what answers at http://127.0.0.1:{stub.port} is no vLLM server"):
        join(startup_timeout=300)


def test_a_server_that_is_starting_is_waited_for(join, stub):
    asked = []
    stub.answer = lambda path, body: (503, "loading") if len(asked) < 3 and not asked.append(path) else None
    assert join().served_model == "a policy"
    assert asked == ["/health"] * 3


def test_without_a_port_there_is_nothing_to_join(tokenizer_of_tiny):
    with pytest.raises(ValueError, match="port: got None; accepted is the port of the server to join"):
        VLLMServer(str(paths.TINY), launch_server=False, tokenizer=tokenizer_of_tiny)


def test_proxies_of_the_environment_are_not_asked(join, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = join()
    assert server.generate(PROMPTS, Sampling())
    server._client.call_workers("start_weight_update")  # a call of the weight transfer


def test_a_server_that_was_not_started(tokenizer_of_tiny):
    server = VLLMServer(str(paths.TINY), tokenizer=tokenizer_of_tiny)
    with pytest.raises(RuntimeError, match=r"not running; call start\(\)"):
        server.generate(PROMPTS, Sampling())
    with pytest.raises(RuntimeError, match="call init_weight_sync"):
        server.sync_policy_weights(None)


# Requests and answers.


def test_every_prompt_is_a_request_with_a_seed_of_its_own(join, stub, tokenizer_of_tiny):
    sampling = Sampling(n=3, temperature=1.0, top_p=0.9, max_tokens=20, min_tokens=2, stop="</answer>", seed=7)
    server = join()
    rollouts = server.generate(PROMPTS, sampling)
    bodies = sorted(stub.requests, key=lambda body: [prompt_seed(7, i) for i in range(3)].index(body["seed"]))
    assert [body["prompt"] for body in bodies] == encode(tokenizer_of_tiny, PROMPTS)  # numbers: nothing to encode twice
    assert [rollout.prompt_token_ids for rollout in rollouts] == encode(tokenizer_of_tiny, PROMPTS)
    assert [rollout.prompt for rollout in rollouts] == PROMPTS
    for body in bodies:
        assert (body["n"], body["temperature"], body["top_p"]) == (3, 1.0, 0.9)
        assert (body["max_tokens"], body["min_tokens"]) == (20, 2)
        assert (body["stop"], body["include_stop_str_in_output"]) == (["</answer>"], True)
        assert body["stop_token_ids"] == [tokenizer_of_tiny.eos_token_id]
        assert body["return_token_ids"] is True and body["logprobs"] == 0


def test_samples_come_in_the_order_of_their_numbers(join, stub):
    rollouts = join().generate(PROMPTS, Sampling(n=4, seed=3))
    for i, rollout in enumerate(rollouts):
        expected = [choice({"seed": prompt_seed(3, i)}, index) for index in range(4)]
        assert [c.token_ids for c in rollout.completions] == [e["token_ids"] for e in expected]
        assert [c.text for c in rollout.completions] == [e["text"] for e in expected]
        assert [c.log_probs for c in rollout.completions] == [e["logprobs"]["token_logprobs"] for e in expected]


def test_answers_that_come_out_of_order_are_put_in_order(join, stub):
    """Each prompt is answered only after the next one."""
    prompts = [f"Question: {i}" for i in range(5)]
    answered = [threading.Event() for _ in range(6)]
    answered[5].set()
    seeds = [prompt_seed(0, i) for i in range(5)]

    def answer(path, body):
        if body is not None:
            i = seeds.index(body["seed"])
            assert answered[i + 1].wait(60)
            answered[i].set()

    server = join()
    stub.answer = answer
    rollouts = server.generate(prompts, Sampling())
    assert [r.completions[0].token_ids for r in rollouts] == [choice({"seed": s}, 0)["token_ids"] for s in seeds]


def test_the_same_call_gives_the_same_samples(join):
    server = join()
    first, again, other = (server.generate(PROMPTS, Sampling(n=2, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert first[0].prompt == first[2].prompt and first[0].completions != first[2].completions


def test_no_prompts_are_no_requests(join, stub):
    assert join().generate([], Sampling()) == [] and not stub.requests


def test_a_prompt_that_does_not_fit_is_named(join, stub):
    server = join()
    prompts = [*PROMPTS, "word " * 2500]
    with pytest.raises(ValueError, match=r"prompts: prompt 3 has \d+ tokens; with max_tokens=64 it must fit .* 2048"):
        server.generate(prompts, Sampling())
    with pytest.raises(ValueError, match=r"prompts: prompt 3 has \d+ tokens; with max_tokens=32"):
        server.generate_completions(prompts, COURSE)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        server.generate([""], Sampling())
    with pytest.raises(ValueError, match="prompts: got 'User: Ben'; accepted is a list"):
        server.generate("User: Ben", Sampling())
    assert not stub.requests
    assert len(server.generate(PROMPTS, Sampling())) == 3


def test_a_temperature_without_log_probs_is_refused(join, stub):
    with pytest.raises(ValueError, match=r"temperature: got 1.0; this engine was started for 0.7 and 0"):
        join(temperature=0.7).generate(PROMPTS, Sampling())
    with pytest.raises(ValueError, match=r"top_p and min_tokens: got 0.9 and 0"):
        join(temperature=0.7).generate(PROMPTS, Sampling(temperature=0.7, top_p=0.9))
    assert not stub.requests


# The course's interface.


def test_the_courses_dictionary_gives_a_flat_list(join, stub, tokenizer_of_tiny):
    given = dict(COURSE)
    completions = join().generate_completions(PROMPTS, given)
    expected = [choice({"seed": prompt_seed(5, i)}, index) for i in range(3) for index in range(2)]
    assert [c.token_ids for c in completions] == [e["token_ids"] for e in expected]
    assert [c.text for c in completions] == [e["text"] for e in expected]
    assert {c.finish_reason for c in completions} == {"stop"} and given == COURSE
    for body in stub.requests:
        assert (body["n"], body["stop"], body["max_tokens"]) == (2, ["</answer>"], 32)
        assert body["prompt"] in encode(tokenizer_of_tiny, PROMPTS) and body["stop_token_ids"] == [
            tokenizer_of_tiny.eos_token_id
        ]


def test_any_setting_of_the_endpoint_is_passed_on(join, stub):
    join().generate_completions(PROMPTS[:1], COURSE | {"top_k": 5, "include_stop_str_in_output": True})
    assert stub.requests[0]["top_k"] == 5 and stub.requests[0]["include_stop_str_in_output"] is True


def test_without_a_seed_two_calls_differ(join):
    params = {name: value for name, value in COURSE.items() if name != "seed"}
    server, same, other = join(seed=1), join(seed=1), join(seed=2)
    calls = [server.generate_completions(PROMPTS, params) for _ in range(2)]
    assert calls[0] != calls[1]
    assert calls == [same.generate_completions(PROMPTS, params) for _ in range(2)]
    assert calls[0] != other.generate_completions(PROMPTS, params)
    assert server.generate_completions(PROMPTS, COURSE) == other.generate_completions(PROMPTS, COURSE)


def test_batch_size_bounds_the_prompts_under_way(join, stub):
    under_way, most, lock = 0, 0, threading.Lock()
    several = threading.Event()

    def answer(path, body):
        nonlocal under_way, most
        if body is not None:
            with lock:
                under_way += 1
                most = max(most, under_way)
            if under_way == 3:
                several.set()
            several.wait(0.2)
            with lock:
                under_way -= 1

    server = join()
    stub.answer = answer
    completions = server.generate_completions([f"Question: {i}" for i in range(8)], COURSE, batch_size=3)
    assert len(completions) == 16 and most <= 3


# Trouble.


@pytest.mark.parametrize("status", [400, 404, 422])
def test_what_the_server_refuses_is_the_callers_error(join, stub, status):
    server = join()
    stub.answer = lambda path, body: (status, '{"message": "min_p must be in [0, 1], got 7"}')
    with pytest.raises(ValueError, match=r"refuses what /v1/completions was given: .*min_p must be in .* got 7"):
        server.generate_completions(PROMPTS, COURSE | {"min_p": 7})
    stub.answer = lambda path, body: None
    assert len(server.generate_completions(PROMPTS, COURSE)) == 6


def test_a_server_whose_engine_has_failed_is_dead(join, stub):
    server = join()
    stub.answer = lambda path, body: (500, "EngineCore encountered an issue")
    with pytest.raises(EngineDeadError, match="the vLLM server failed: EngineCore encountered an issue"):
        server.generate(PROMPTS, Sampling())


def test_a_connection_that_is_closed_is_a_dead_server(join, stub):
    server = join()
    stub.answer = lambda path, body: (0, "") if body and body["seed"] == prompt_seed(0, 1) else None
    with pytest.raises(EngineDeadError, match="the vLLM server does not answer"):
        server.generate(PROMPTS, Sampling())


def test_a_server_that_is_stopped_while_it_samples_is_dead(join, stub):
    """By another thread: an exception in the notebook, say, while the next batch is under way."""
    server, sampling, go = join(), threading.Event(), threading.Event()
    stub.answer = lambda path, body: body and (sampling.set(), go.wait(60), None)[-1]
    outcome = []

    def generate():
        try:
            server.generate(PROMPTS, Sampling())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    assert sampling.wait(60)
    server.stop()
    go.set()
    thread.join(60)
    assert not thread.is_alive() and all(isinstance(error, EngineDeadError) for error in outcome)
    assert join().generate(PROMPTS, Sampling())


class Weights:
    """The way for the weights, which only a real vLLM has an end of."""

    def __init__(self, stub):
        self.stub = stub

    def send(self, policy):
        self.stub.received.append(("weights", None))

    def close(self):
        pass


@pytest.mark.field_report("C01")
def test_old_keys_and_values_are_forgotten_after_the_weights(join, stub, tiny_gpt2):
    server = join()
    server._weights = Weights(stub)
    for _ in range(2):
        server.sync_weights(tiny_gpt2())
        server.generate(PROMPTS[:1], Sampling())
    assert [path for path, _ in stub.received] == ["weights", "/reset_prefix_cache", "/v1/completions"] * 2


def test_a_server_that_does_not_forget_is_of_no_use(join, stub, tiny_gpt2):
    server = join()
    server._weights = Weights(stub)
    stub.answer = lambda path, body: (200, '{"success": false}')
    with pytest.raises(EngineDeadError, match="did not forget the keys and values"):
        server.sync_weights(tiny_gpt2())


# A server of our own.


@pytest.mark.slow
def test_our_own_server_runs_until_it_is_stopped(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")  # as the package does
    shown = f"print('owner', os.environ['{OWNER}'], os.environ['GOMP_SPINCOUNT'])"
    server = launch(f"import os; {shown}; import stub_vllm; stub_vllm.main()")
    with pytest.raises(ZeroDivisionError), server:
        process = server._process.pid
        assert is_alive(process) and len(server.generate(PROMPTS, Sampling(n=2))) == 3
        raise ZeroDivisionError  # as in a cell of a notebook
    wait_until(lambda: not is_alive(process))
    server.stop()
    log = (tmp_path / "server.log").read_text(encoding="utf-8")
    assert f"owner {os.getpid()} 1000" in log and "--dtype auto --seed 0 --max-model-len 2048" in log


@pytest.mark.slow
def test_the_outermost_exit_ends_a_server_entered_twice(launch):
    with launch() as server:
        process = server._process.pid
        with pytest.raises(ZeroDivisionError), server as same:
            assert same is server and server._process.pid == process
            raise ZeroDivisionError
        assert is_alive(process) and server.generate(PROMPTS, Sampling())
    wait_until(lambda: not is_alive(process))
    with pytest.raises(RuntimeError, match=r"not running; call start\(\)"):
        server.generate(PROMPTS, Sampling())


@pytest.mark.slow
@pytest.mark.field_report("C08")
def test_a_killed_server_starts_again_on_its_port(launch):
    server = launch(port=free_port()).start()
    assert server.generate(PROMPTS, Sampling())  # a connection that is kept
    before, process, port = server.generate(PROMPTS, Sampling(seed=3)), server._process.pid, server.port
    with socket.create_connection(("127.0.0.1", port)) as kept:  # and another client's
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(100).startswith(b"HTTP/1.1 200")
        os.kill(process, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"(?s)does not answer: .*server\.log:\na stub of vLLM"):
            server.generate(PROMPTS, Sampling())
        server.restart()
    assert server.port == port and server._process.pid != process
    assert server.generate(PROMPTS, Sampling(seed=3)) == before


@pytest.mark.field_report("C08")
def test_a_port_that_is_taken_is_named(launch, stub, monkeypatch):
    assert processes.SECONDS_FOR_A_PORT < 5  # an orphan ends within two
    monkeypatch.setattr(processes, "SECONDS_FOR_A_PORT", 0)
    server = launch(port=stub.port)
    with pytest.raises(ValueError, match=f"port: {stub.port} is taken by another program; None takes a free one"):
        server.start()
    assert server._process is None and not stub.received


@pytest.mark.slow
def test_a_port_that_becomes_free_is_waited_for(launch):
    with StubVLLM("another", "another").running() as other:
        server = launch(port=other.port)
        threading.Timer(0.3, lambda: (other.shutdown(), other.server_close())).start()
        server.start()
    assert server.served_model.startswith("rlhelpers-")


@pytest.mark.slow
def test_a_command_that_fails_is_told_with_the_end_of_its_log(launch, tmp_path):
    (tmp_path / "server.log").write_text("an earlier failure\n", encoding="utf-8")
    server = launch("import sys; print('there is no such model'); sys.exit(3)", startup_timeout=300)
    with pytest.raises(RuntimeError, match=r"(?s)ended with status 3\n.*server\.log:\nthere is no such model") as error:
        server.start()
    assert "an earlier failure" not in str(error.value)
    assert server._process is None


@pytest.mark.slow
def test_a_server_that_takes_too_long_is_ended(launch, monkeypatch):
    server = launch("import time; print('loading', flush=True); time.sleep(600)", startup_timeout=3)
    started = []
    wait_until_ready = VLLMServer._wait_until_ready
    monkeypatch.setattr(
        VLLMServer,
        "_wait_until_ready",
        lambda self, where: (started.append(self._process.pid), wait_until_ready(self, where)),
    )
    with pytest.raises(RuntimeError, match=re.escape("within startup_timeout=3 s")):
        server.start()
    wait_until(lambda: not is_alive(started[0]))


@pytest.mark.slow
def test_a_server_whose_start_is_interrupted_is_ended(launch, monkeypatch):
    started = []

    def interrupt(client, seconds):
        started.append(server._process.pid)
        raise KeyboardInterrupt

    server = launch()
    monkeypatch.setattr(VLLMClient, "is_ready", interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.start()
    wait_until(lambda: not is_alive(started[0]))


def test_the_command_is_vllms(launch, monkeypatch):
    commands = []
    monkeypatch.setattr(vllm_server, "ServerProcess", lambda command, *_: commands.append(command) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        launch(port=free_port(), load_format="dummy", seed=4).start()
    [command] = commands
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    flags = " ".join(command[3:])
    assert "--load-format dummy" in flags and "--seed 4" in flags and "--host 127.0.0.1" in flags


def test_the_settings_on_two_gpus(monkeypatch):
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


def test_the_settings_on_one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    server = VLLMServer(str(paths.TINY), gpu=0, weight_backend="ipc")
    assert server._environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temprature": 1.0}, "sampling_params: got temprature; accepted are .*temperature"),
        ({"prompt": "x", "stream": True}, "sampling_params: got prompt, stream; accepted are"),
        ({"logprobs": 5}, "sampling_params: got logprobs"),
        ({"max_tokens": "4"}, "sampling_params: max_tokens is '4'; accepted is a whole number"),
        ({"n": 0}, "sampling_params: n is 0"),
        ("greedy", "sampling_params: got str; accepted is a dict"),
    ],
)
def test_sampling_params_that_are_not_the_callers_to_give(join, stub, params, message):
    server = join()
    with pytest.raises(ValueError, match=message):
        server.generate_completions(PROMPTS, params)
    assert not stub.requests


@pytest.mark.parametrize("port", [0, -1, 99999, "8000"])
def test_what_is_no_port(tokenizer_of_tiny, port):
    with pytest.raises(ValueError, match=f"port: got {port!r}; accepted is None or a whole number from 1 to 65535"):
        VLLMServer(str(paths.TINY), port=port, tokenizer=tokenizer_of_tiny)


def test_what_is_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"model_id: got .*; accepted is a directory with a model and its tokenizer"):
        VLLMServer(str(tmp_path))


# What people met with vLLM and its clients.


def answers(stub, *choices, **common):
    """The stub answers each request for completions with these choices."""
    full = [{"index": i, "finish_reason": "stop", **common, **given} for i, given in enumerate(choices)]
    text = json.dumps({"choices": full})
    stub.answer = lambda path, body: (200, text) if path == "/v1/completions" else None


def sampled(text, token_ids, **more):
    return {"text": text, "token_ids": token_ids, "logprobs": {"token_logprobs": [-1.0] * len(token_ids)}, **more}


def with_stop_string(body, index):
    """As vLLM does it: the ids are what was sampled, the text ends before the stop string or after it."""
    text = "2 </think> <answer> 2 </answer>"
    kept = text if body.get("include_stop_str_in_output") else text.removesuffix(body["stop"][0])
    return choice(body, index) | {"text": kept, "stop_reason": body["stop"][0]}


@pytest.mark.field_report("C10")
def test_the_stop_string_stays_so_that_the_reward_sees_it(server, stub, monkeypatch):
    """By the engine, and by the course's dictionary unless it says otherwise."""
    monkeypatch.setattr("stub_vllm.choice", with_stop_string)
    reward = Grader(R1, verify_answer)
    [rollout] = server.generate(R1_PROMPTS[:1], Sampling(stop=R1.stop, seed=1))
    [same] = server.generate_completions(R1_PROMPTS[:1], {"n": 1, "stop": [R1.stop], "seed": 1})
    for completion in (rollout.completions[0], same):
        assert reward(completion.text, "2")["reward"] == 1
        assert (completion.finish_reason, len(completion.token_ids)) == ("stop", 3)
    cut = {"n": 1, "stop": [R1.stop], "seed": 1, "include_stop_str_in_output": False}
    assert server.generate_completions(R1_PROMPTS[:1], cut)[0].text.endswith("<answer> 2 ")


@pytest.mark.field_report("C10")
def test_a_server_that_cuts_the_stop_string_is_refused(server, stub):
    answers(stub, sampled("2 </think> <answer> 2 ", [5, 6], stop_reason="</answer>"))
    with pytest.raises(RuntimeError, match="cut the stop string '</answer>'"):
        server.generate(R1_PROMPTS[:1], Sampling(stop=R1.stop))


@pytest.mark.field_report("C11")
def test_a_prompt_without_room_is_left_out_and_counted(server, stub, tiny_gpt2, tokenizer):
    """A run leaves problems out beforehand, so that groups stay whole; a call of the engine is refused as a whole, with
    the lengths.  A server that was joined may have less room than the model."""
    problems = [Problem("a b c d", "1")] * 7 + [Problem("a " * 30, "1")]
    sizes = {"group_size": 2, "rollout_batch_size": 14, "train_batch_size": 14}
    config = make_config(quick=True, prompt="question_only", max_tokens=4, **sizes)
    task, left_out = problems_that_fit(config, Task("t", problems, problems, verify_answer), tokenizer, context=32)
    assert (len(task.train), len(task.validation), left_out) == (7, 7, 2)
    server.stop()
    stub.models[0]["max_model_len"] = 200
    server.start()
    with pytest.raises(ValueError, match=r"prompt 7 has \d+ tokens; with max_tokens=64 it must fit .* context of 200"):
        server.generate([*R1_PROMPTS[:7], "long " * 190], Sampling())
    assert not stub.requests
    stub.answer = lambda path, body: (400, "the prompt is too long") if body["seed"] == prompt_seed(0, 7) else None
    with pytest.raises(ValueError, match="refuses what /v1/completions was given: the prompt is too long"):
        server.generate(R1_PROMPTS, Sampling(max_tokens=2))


@pytest.mark.field_report("C12")
def test_what_was_cut_off_is_marked_and_counted(server, stub):
    """It is graded and trained on like any other: there is no mask for it."""
    text = r"so </think> <answer> 2 </answer> and then"
    answers(stub, sampled(text, [5, 6]), sampled(text, [5, 7], finish_reason="length"))
    samples = flatten([Problem("1+1?", "2")], server.generate(R1_PROMPTS[:1], Sampling(n=2)))
    rows = rows_to_read(samples, grade_all(Grader(R1, verify_answer), samples))
    assert [row["finish_reason"] for row in rows] == ["stop", "length"] and [row["tokens"] for row in rows] == [2, 2]
    assert truncated_fraction(samples) == 0.5 and [row["reward"] for row in rows] == [1, 1]


@pytest.mark.field_report("C13")
def test_every_seed_and_every_step_samples_its_own(server, stub):
    """There is one server for a run, whose seed config.yaml has and every request's follows from."""

    def draw(seed, step):
        sampling = Sampling(n=2, seed=derive_seed(seed, "train", step))
        return [c.token_ids for r in server.generate(R1_PROMPTS[:2], sampling) for c in r.completions]

    drawn = {(seed, step): draw(seed, step) for seed in (0, 1) for step in (1, 2)}
    assert len({tuple(ids) for rows in drawn.values() for ids in rows}) == 16
    assert len({body["seed"] for body in stub.requests}) == 8
    assert all(draw(*key) == rows for key, rows in drawn.items())


@pytest.mark.field_report("C15")
def test_the_server_reads_the_trainers_ids_and_no_second_bos(server, stub, tokenizer_of_tiny):
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


@pytest.mark.field_report("C16")
def test_where_nobody_listens_it_is_said_and_given_up(tokenizer_of_tiny, capsys, monkeypatch):
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


@pytest.mark.field_report("C16")
def test_a_server_that_never_answers_is_given_up(tokenizer_of_tiny):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        settings = {"launch_server": False, "startup_timeout": 0.5, "tokenizer": tokenizer_of_tiny}
        with pytest.raises(RuntimeError, match=rf"127.0.0.1:{port} within startup_timeout=0.5 s"):
            VLLMServer(str(paths.TINY), port=port, **settings).start()
        with pytest.raises(EngineDeadError, match=r"the vLLM server hangs: /path was not answered within 0.2 s"):
            VLLMClient(f"http://127.0.0.1:{port}")._post("/path", None, 0.2)


@pytest.mark.field_report("C17")
def test_an_answer_without_ids_or_log_probs_is_an_error(server, stub):
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
            server.generate(R1_PROMPTS[:1], Sampling())
    for text in ("<html>", "[]", "7"):
        stub.answer = lambda path, body, text=text: (200, text)
        with pytest.raises(RuntimeError, match=r"answered /v1/completions with no JSON object|of another form"):
            server.generate(R1_PROMPTS[:1], Sampling())
