"""Processes beside this one: a server with its log, its end with its owner, ports, output, and waits that end."""

import io
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
import zmq
from ipykernel.iostream import IOPubThread, OutStream
from jupyter_client.session import Session
from processes import is_alive, wait_until

from rlhelpers.rollouts import EngineDeadError, processes
from rlhelpers.rollouts.processes import ServerProcess, environment, free_port, is_free, output_to, with_timeout

slow = pytest.mark.slow
# The module in a child, by its path: its package brings torch, which takes seconds.
LOAD = f"""
import os, runpy, subprocess, sys, time, types
from pathlib import Path
sys.modules["rlhelpers.rollouts.engine"] = types.SimpleNamespace(EngineDeadError=RuntimeError)
module = types.SimpleNamespace(**runpy.run_path({processes.__file__!r}))
module.ServerProcess.stop.__globals__["SECONDS_TO_STOP"] = 1
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('stubborn', flush=True); "
# A server with a child that ends when it is told to and one that does not.
FAMILY = f"""
import os, subprocess, sys, time
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
stubborn = subprocess.Popen([sys.executable, "-c", {STUBBORN + "time.sleep(600)"!r}])
print("family", os.getpid(), sleeper.pid, stubborn.pid, flush=True)
time.sleep(600)
"""
# A program that starts a server, waits until it runs, and ends in some way.
PROGRAM = f"""{LOAD}
server = module.ServerProcess([sys.executable, "-c", {FAMILY!r}], {{}}, Path(sys.argv[1]))
while not ("family" in server.tail() and "stubborn" in server.tail()):
    time.sleep(0.02)
"""
# What vLLM's processes do: they watch their owner.
WATCHING = f"{LOAD}\nmodule.end_with_owner()\n"
CHILD = f"{WATCHING}\nprint(os.getpid(), flush=True)\ntime.sleep(100)"
# A server with a child, as vLLM's server has an engine, of which both hold what would be a GPU's memory.
WATCHING_FAMILY = f"""{WATCHING}
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print("family", os.getpid(), child.pid, flush=True)
time.sleep(100)
"""
OWNER = f"""{LOAD}
environment = module.owner_environment()
server = module.ServerProcess([sys.executable, "-c", {WATCHING_FAMILY!r}], environment, Path(sys.argv[1]))
while "family" not in server.tail():
    time.sleep(0.02)
print("ready", flush=True)
time.sleep(100)
"""


@pytest.fixture
def log(tmp_path):
    return tmp_path / "logs" / "server.log"


@pytest.fixture
def start(log):
    """Starts a script as a server, and ends it after the test."""
    servers = []

    def start(script, **environment):
        servers.append(ServerProcess([sys.executable, "-c", script], environment, log))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def family(text: str) -> list[int]:
    """The process ids that FAMILY printed."""
    [line] = [line for line in text.splitlines() if line.startswith("family")]
    return [int(pid) for pid in line.split()[1:]]


@slow
def test_output_lands_in_the_log(start, log, monkeypatch):
    monkeypatch.setenv("INHERITED", "from here")
    script = "import os, sys; print(os.environ['INHERITED']); print(os.environ['GIVEN'], file=sys.stderr); sys.exit(3)"
    server = start(script, GIVEN="for the server")
    wait_until(lambda: server.exit_status is not None)
    assert server.exit_status == 3
    assert sorted(log.read_text(encoding="utf-8").splitlines()) == ["for the server", "from here"]


@slow
def test_the_tail_is_of_this_process_alone(start, log):
    log.parent.mkdir()
    log.write_text("an earlier server\n", encoding="utf-8")
    server = start("for i in range(30): print('line', i)")
    wait_until(lambda: server.exit_status == 0)
    assert server.tail(2) == "line 28\nline 29"
    assert server.tail(100).splitlines() == [f"line {i}" for i in range(30)]
    assert log.read_text(encoding="utf-8").startswith("an earlier server\nline 0\n")
    silent = start("")
    wait_until(lambda: silent.exit_status == 0)
    assert silent.tail() == ""


@slow
def test_output_that_is_no_text_is_no_trouble(start):
    server = start("import sys; sys.stdout.buffer.write(b'bad \\xff byte')")
    wait_until(lambda: server.exit_status == 0)
    assert server.tail() == "bad \ufffd byte"


@slow
def test_stop_ends_the_whole_group_also_who_does_not_listen(start, monkeypatch):
    monkeypatch.setattr(processes, "SECONDS_TO_STOP", 1)
    server = start(FAMILY)
    wait_until(lambda: {"family", "stubborn"} <= set(server.tail().split()))
    pids = family(server.tail())
    assert pids[0] == server.pid and all(map(is_alive, pids))
    server.stop()
    wait_until(lambda: not any(map(is_alive, pids)))
    assert server.exit_status is not None
    server.stop()


@slow
def test_children_end_though_the_server_itself_has_died(start, monkeypatch):
    monkeypatch.setattr(processes, "SECONDS_TO_STOP", 1)
    server = start(FAMILY.replace("time.sleep(600)\n", "sys.exit(1)\n"))
    wait_until(lambda: server.exit_status == 1 and "stubborn" in server.tail().split())
    pids = family(server.tail())
    assert all(map(is_alive, pids[1:]))
    server.stop()
    wait_until(lambda: not any(map(is_alive, pids)))


@slow
def test_an_interrupt_while_it_stops_saves_nobody(start, monkeypatch):
    server = start(FAMILY)
    wait_until(lambda: {"family", "stubborn"} <= set(server.tail().split()))
    pids = family(server.tail())

    def interrupt(seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(processes.time, "sleep", interrupt)
        server.stop()
    wait_until(lambda: not any(map(is_alive, pids)))


@slow
def test_stop_is_polite_first(start):
    """What a server does at SIGTERM it has the time to do."""
    server = start(
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('goodbye')))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    wait_until(lambda: server.tail() == "ready")
    server.stop()
    assert server.tail() == "ready\ngoodbye" and server.exit_status == 0


@slow
@pytest.mark.field_report("C09")
@pytest.mark.parametrize(
    ("ending", "status"), [("server.stop()", 0), ("", 0), ("raise ZeroDivisionError", 1), ("sys.exit(5)", 5)]
)
def test_nothing_outlives_the_program_that_started_it(log, ending, status):
    program = subprocess.run([sys.executable, "-c", PROGRAM + ending, log], capture_output=True, text=True, timeout=120)
    pids = family(log.read_text(encoding="utf-8"))
    try:
        assert program.returncode == status, program.stderr
        assert (program.stderr == "") == (status != 1)
        wait_until(lambda: not any(map(is_alive, pids)), seconds=30)
    finally:
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


# The owner of vLLM's processes.


def watch(script: str, owner: int):
    """A finished child whose owner has this number."""
    variables = os.environ | {processes.OWNER: str(owner)}
    return subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=120)


def test_the_environment_names_this_process():
    assert processes.owner_environment() == {processes.OWNER: str(os.getpid())}


@slow
@pytest.mark.field_report("C09")
@pytest.mark.parametrize("asked_for", [True, False])
def test_a_killed_owner_takes_its_family_with_it(log, asked_for):
    """Also when nobody has asked for the owner's status, and its number is still there."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, log], stdout=subprocess.PIPE)
    try:
        assert owner.stdout.readline() == b"ready\n"
        pids = family(log.read_text(encoding="utf-8"))
        assert len(pids) == 2 and all(map(is_alive, pids))
        owner.send_signal(signal.SIGKILL)
        if asked_for:
            owner.wait(60)
        wait_until(lambda: not any(map(is_alive, pids)), seconds=30)
    finally:
        owner.kill()
        owner.wait(60)
        owner.stdout.close()


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="how psutil computes a start time is a matter of the system")
def test_a_process_lives_with_its_owner_though_the_clock_is_set():
    setting_the_clock = """
import psutil
time.sleep(0.3)
boot_time = psutil._pslinux.boot_time
psutil._pslinux.boot_time = lambda: boot_time() + 3600
time.sleep(2.5)
print("alive", flush=True)
"""
    child = watch(WATCHING + setting_the_clock, os.getpid())
    assert (child.returncode, child.stdout) == (0, "alive\n"), child.stderr


@slow
def test_a_later_process_with_the_owners_number_is_no_owner():
    """It runs, and is no ancestor."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        assert watch(CHILD, other.pid).returncode == 1 and is_alive(other.pid)
    finally:
        other.kill()
        other.wait(60)


@slow
def test_an_owner_that_never_was():
    assert watch(CHILD, 2**22 + 1).returncode == 1


@slow
def test_without_an_owner_a_process_is_left_alone():
    script = f"{WATCHING}\ntime.sleep(0.5)"
    bare = {name: value for name, value in os.environ.items() if name != processes.OWNER}
    assert subprocess.run([sys.executable, "-c", script], env=bare, timeout=120).returncode == 0


# Environment, output, ports.


def test_the_environment_is_as_before_afterwards(monkeypatch):
    monkeypatch.setenv("THERE", "before")
    monkeypatch.delenv("NOT_THERE", raising=False)
    with pytest.raises(ZeroDivisionError), environment({"THERE": "inside", "NOT_THERE": "inside"}):
        assert (os.environ["THERE"], os.environ["NOT_THERE"]) == ("inside", "inside")
        raise ZeroDivisionError
    assert os.environ["THERE"] == "before" and "NOT_THERE" not in os.environ


@slow
@pytest.mark.parametrize("error", ["", "raise ZeroDivisionError"])
def test_output_goes_to_the_log_and_comes_back(log, error):
    """Also what a child writes, and what is written below Python; also after an exception."""
    script = f"""{LOAD}
from contextlib import suppress
print("before")
with suppress(ZeroDivisionError), module.output_to(Path(sys.argv[1])):
    print("inside")
    print("inside, an error", file=sys.stderr)
    os.write(1, b"below Python\\n")
    subprocess.run([sys.executable, "-c", "import sys; print('child'); print('its error', file=sys.stderr)"])
    {error}
print("after")
print("after, an error", file=sys.stderr)
"""
    program = subprocess.run([sys.executable, "-c", script, log], capture_output=True, text=True, timeout=120)
    assert (program.stdout, program.stderr) == ("before\nafter\n", "after, an error\n")
    expected = {"inside", "inside, an error", "below Python", "child", "its error"}
    assert set(log.read_text(encoding="utf-8").splitlines()) == expected


def test_a_free_port_is_free_until_somebody_listens():
    port = free_port()
    assert is_free("127.0.0.1", port)
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.create_server((address, port)):
            assert not is_free("127.0.0.1", port)
        assert is_free("127.0.0.1", port)


def test_a_port_that_a_server_has_just_left_is_free():
    """Its closed connections linger for a minute; a server may start on it all the same."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()
    assert is_free("127.0.0.1", port)


@pytest.fixture(params=["StringIO", "OutStream"])
def stream_without_a_file(request, monkeypatch):
    """Standard output and error of a notebook, with no descriptor behind them."""
    if request.param == "StringIO":
        stream = io.StringIO()
    else:
        thread = IOPubThread(zmq.Context.instance().socket(zmq.PUB))
        request.addfinalizer(thread.close)
        stream = OutStream(Session(), thread, "stdout", watchfd=False)
        request.addfinalizer(stream.close)
    with pytest.raises(io.UnsupportedOperation):
        stream.fileno()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)


@pytest.mark.slow
@pytest.mark.field_report("D16")
def test_a_server_is_started_from_a_notebook(stream_without_a_file, tmp_path):
    server = ServerProcess([sys.executable, "-c", "print('it fails'); raise SystemExit(4)"], {}, tmp_path / "a.log")
    wait_until(lambda: server.exit_status is not None)
    server.stop()
    assert server.exit_status == 4 and server.tail() == "it fails"
    with output_to(tmp_path / "b.log"):
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        print("from here")
    assert (tmp_path / "b.log").read_text(encoding="utf-8") == "from a child\nfrom here\n"


# Waiting.


@pytest.fixture
def never():
    """An event that nothing sets before the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_the_result_comes_through_also_none():
    assert with_timeout(lambda: 5) == 5
    assert with_timeout(lambda: None, seconds=10) is None


def test_the_actions_own_error_comes_through():
    with pytest.raises(ZeroDivisionError):
        with_timeout(lambda: 1 / 0)


def test_time_is_up(never):
    with pytest.raises(EngineDeadError, match=r"did not answer within 0\.1 s"):
        with_timeout(never.wait, seconds=0.1)


def test_nobody_is_left_to_answer(never):
    with pytest.raises(EngineDeadError, match="process is gone"):
        with_timeout(never.wait, is_dead=lambda: True)


def test_an_answer_of_one_who_then_died_counts():
    assert with_timeout(lambda: 5, is_dead=lambda: True) == 5
