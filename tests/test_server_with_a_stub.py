"""VLLMServer against a stub that speaks vLLM's HTTP: no vLLM is needed here."""

import os
import re
import signal
import sys
import threading

import pytest
from processes import is_alive, wait_until
from stub_vllm import StubVLLM, choice, stand_in
from transformers import AutoTokenizer

from rlhelpers import paths
from rlhelpers.rollouts import EngineDeadError, Sampling, vllm_server
from rlhelpers.rollouts import processes as server_process
from rlhelpers.rollouts.processes import free_port
from rlhelpers.rollouts.vllm_client import VLLMClient
from rlhelpers.rollouts.vllm_plugin import OWNER
from rlhelpers.rollouts.vllm_server import VLLMServer
from rlhelpers.rollouts.vllm_settings import prompt_seed

PROMPTS = ["Question: what is 1 + 1?\nAnswer:", "User: Ben", "Question: what is 1 + 1?\nAnswer:"]
COURSE = {"n": 2, "temperature": 1.0, "top_p": 1.0, "max_tokens": 32, "stop": ["</answer>"], "seed": 5}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(paths.TINY)


@pytest.fixture
def stub():
    with StubVLLM("a policy", str(paths.TINY)).running() as stub:
        yield stub


@pytest.fixture
def join(stub, tokenizer):
    """Joins the stub as a server that somebody else has started."""
    servers = []

    def join(**settings):
        defaults = {"port": stub.port, "launch_server": False, "startup_timeout": 30, "tokenizer": tokenizer}
        servers.append(VLLMServer(str(paths.TINY), **defaults | settings))
        return servers[-1].start()

    yield join
    for server in servers:
        server.stop()


@pytest.fixture
def launch(tokenizer, tmp_path, monkeypatch):
    """A server whose command runs this script in place of vLLM's; it ends after the test."""
    api_server = stand_in(tmp_path, monkeypatch)
    monkeypatch.setattr(server_process, "SECONDS_TO_STOP", 2)
    servers = []

    def launch(script="import stub_vllm; stub_vllm.main()", **settings):
        api_server.write_text(script, encoding="utf-8")
        log = tmp_path / "server.log"
        servers.append(VLLMServer(str(paths.TINY), tokenizer=tokenizer, log=log, **settings))
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


def test_without_a_port_there_is_nothing_to_join(tokenizer):
    with pytest.raises(ValueError, match="port: got None; accepted is the port of the server to join"):
        VLLMServer(str(paths.TINY), launch_server=False, tokenizer=tokenizer)


def test_proxies_of_the_environment_are_not_asked(join, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = join()
    assert server.generate(PROMPTS, Sampling())
    server._client.start_weight_update()  # a call of the weight transfer


def test_a_server_that_was_not_started(tokenizer):
    server = VLLMServer(str(paths.TINY), tokenizer=tokenizer)
    with pytest.raises(RuntimeError, match=r"not running; call start\(\)"):
        server.generate(PROMPTS, Sampling())
    with pytest.raises(RuntimeError, match="call init_weight_sync"):
        server.sync_policy_weights(None)


# Requests and answers.


def test_every_prompt_is_a_request_with_token_ids_and_a_seed_of_its_own(join, stub, tokenizer):
    sampling = Sampling(n=3, temperature=1.0, top_p=0.9, max_tokens=20, min_tokens=2, stop="</answer>", seed=7)
    server = join()
    rollouts = server.generate(PROMPTS, sampling)
    bodies = sorted(stub.requests, key=lambda body: [prompt_seed(7, i) for i in range(3)].index(body["seed"]))
    assert [body["prompt"] for body in bodies] == encode(tokenizer, PROMPTS)  # numbers: nothing to encode twice
    assert [rollout.prompt_token_ids for rollout in rollouts] == encode(tokenizer, PROMPTS)
    assert [rollout.prompt for rollout in rollouts] == PROMPTS
    for body in bodies:
        assert (body["n"], body["temperature"], body["top_p"]) == (3, 1.0, 0.9)
        assert (body["max_tokens"], body["min_tokens"]) == (20, 2)
        assert (body["stop"], body["include_stop_str_in_output"]) == (["</answer>"], True)
        assert body["stop_token_ids"] == [tokenizer.eos_token_id]
        assert body["return_token_ids"] is True and body["logprobs"] == 0


def test_samples_come_as_they_were_sampled_in_the_order_of_their_numbers(join, stub):
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


def test_the_same_call_gives_the_same_samples_and_another_seed_gives_others(join):
    server = join()
    first, again, other = (server.generate(PROMPTS, Sampling(n=2, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert first[0].prompt == first[2].prompt and first[0].completions != first[2].completions


def test_no_prompts_are_no_requests(join, stub):
    assert join().generate([], Sampling()) == [] and not stub.requests


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_sent(join, stub):
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


def test_a_temperature_whose_log_probs_the_server_does_not_have_is_refused(join, stub):
    with pytest.raises(ValueError, match=r"temperature: got 1.0; this engine was started for 0.7 and 0"):
        join(temperature=0.7).generate(PROMPTS, Sampling())
    with pytest.raises(ValueError, match=r"top_p and min_tokens: got 0.9 and 0"):
        join(temperature=0.7).generate(PROMPTS, Sampling(temperature=0.7, top_p=0.9))
    assert not stub.requests


# The course's interface.


def test_the_courses_dictionary_gives_a_flat_list_a_prompts_samples_side_by_side(join, stub, tokenizer):
    given = dict(COURSE)
    completions = join().generate_completions(PROMPTS, given)
    expected = [choice({"seed": prompt_seed(5, i)}, index) for i in range(3) for index in range(2)]
    assert [c.token_ids for c in completions] == [e["token_ids"] for e in expected]
    assert [c.text for c in completions] == [e["text"] for e in expected]
    assert {c.finish_reason for c in completions} == {"stop"} and given == COURSE
    for body in stub.requests:
        assert (body["n"], body["stop"], body["max_tokens"]) == (2, ["</answer>"], 32)
        assert body["prompt"] in encode(tokenizer, PROMPTS) and body["stop_token_ids"] == [tokenizer.eos_token_id]


def test_any_setting_of_the_endpoint_is_passed_on(join, stub):
    join().generate_completions(PROMPTS[:1], COURSE | {"top_k": 5, "include_stop_str_in_output": True})
    assert stub.requests[0]["top_k"] == 5 and stub.requests[0]["include_stop_str_in_output"] is True


def test_without_a_seed_two_calls_differ_and_another_server_repeats_them(join):
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
def test_what_the_server_refuses_is_the_callers_error_and_the_server_stays_usable(join, stub, status):
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


def test_old_keys_and_values_are_forgotten_after_the_weights_and_before_the_next_sample(join, stub, tiny_gpt2):
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


def test_our_own_server_runs_until_it_is_stopped(launch, tmp_path):
    server = launch(f"import os; print('owner', os.environ['{OWNER}']); import stub_vllm; stub_vllm.main()")
    with pytest.raises(ZeroDivisionError), server:
        process = server._process.pid
        assert is_alive(process) and len(server.generate(PROMPTS, Sampling(n=2))) == 3
        raise ZeroDivisionError  # as in a cell of a notebook
    wait_until(lambda: not is_alive(process))
    server.stop()
    log = (tmp_path / "server.log").read_text(encoding="utf-8")
    assert f"owner {os.getpid()}" in log and "--dtype auto --seed 0 --max-model-len 2048" in log


def test_a_server_that_is_entered_again_ends_with_the_outermost_exit(launch):
    with launch() as server:
        process = server._process.pid
        with pytest.raises(ZeroDivisionError), server as same:
            assert same is server and server._process.pid == process
            raise ZeroDivisionError
        assert is_alive(process) and server.generate(PROMPTS, Sampling())
    wait_until(lambda: not is_alive(process))
    with pytest.raises(RuntimeError, match=r"not running; call start\(\)"):
        server.generate(PROMPTS, Sampling())


def test_a_killed_server_is_dead_says_its_last_words_and_starts_again_on_its_port(launch):
    server = launch(port=free_port()).start()
    assert server.generate(PROMPTS, Sampling())  # a connection that is kept
    before, process = server.generate(PROMPTS, Sampling(seed=3)), server._process.pid
    os.kill(process, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"(?s)does not answer: .*server\.log:\na stub of vLLM"):
        server.generate(PROMPTS, Sampling())
    port = server.port
    server.restart()
    assert server.port == port and server._process.pid != process
    assert server.generate(PROMPTS, Sampling(seed=3)) == before


def test_a_port_that_is_taken_is_named(launch, stub, monkeypatch):
    monkeypatch.setattr(server_process, "SECONDS_FOR_A_PORT", 0)
    server = launch(port=stub.port)
    with pytest.raises(ValueError, match=f"port: {stub.port} is taken by another program; None takes a free one"):
        server.start()
    assert server._process is None and not stub.received


def test_a_port_that_becomes_free_is_waited_for(launch):
    with StubVLLM("another", "another").running() as other:
        server = launch(port=other.port)
        threading.Timer(0.3, lambda: (other.shutdown(), other.server_close())).start()
        server.start()
    assert server.served_model.startswith("rlhelpers-")


def test_a_command_that_fails_is_told_with_the_end_of_its_log(launch, tmp_path):
    (tmp_path / "server.log").write_text("an earlier failure\n", encoding="utf-8")
    server = launch("import sys; print('there is no such model'); sys.exit(3)", startup_timeout=300)
    with pytest.raises(RuntimeError, match=r"(?s)ended with status 3\n.*server\.log:\nthere is no such model") as error:
        server.start()
    assert "an earlier failure" not in str(error.value)
    assert server._process is None


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
def test_what_is_no_port(tokenizer, port):
    with pytest.raises(ValueError, match=f"port: got {port!r}; accepted is None or a whole number from 1 to 65535"):
        VLLMServer(str(paths.TINY), port=port, tokenizer=tokenizer)


def test_what_is_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"model_id: got .*; accepted is a directory with a model and its tokenizer"):
        VLLMServer(str(tmp_path))
