"""A server's process: its log, its end with all its children, ports, and output that goes to a log."""

import io
import os
import signal
import socket
import subprocess
import sys

import pytest
import zmq
from ipykernel.iostream import IOPubThread, OutStream
from jupyter_client.session import Session
from processes import is_alive, wait_until

from rlhelpers.rollouts import processes as server_process
from rlhelpers.rollouts.processes import ServerProcess, free_port, is_free, output_to

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
PROGRAM = f"""
import os, runpy, sys, time
from pathlib import Path
ServerProcess = runpy.run_path({server_process.__file__!r}, init_globals={{}})["ServerProcess"]
ServerProcess.stop.__globals__["SECONDS_TO_STOP"] = 1
server = ServerProcess([sys.executable, "-c", {FAMILY!r}], {{}}, Path(sys.argv[1]))
while not ("family" in server.tail() and "stubborn" in server.tail()):
    time.sleep(0.02)
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


def test_output_and_errors_land_in_the_log_and_the_environment_is_added_to(start, log, monkeypatch):
    monkeypatch.setenv("INHERITED", "from here")
    script = "import os, sys; print(os.environ['INHERITED']); print(os.environ['GIVEN'], file=sys.stderr); sys.exit(3)"
    server = start(script, GIVEN="for the server")
    wait_until(lambda: server.exit_status is not None)
    assert server.exit_status == 3
    assert sorted(log.read_text(encoding="utf-8").splitlines()) == ["for the server", "from here"]


def test_the_tail_is_of_this_process_alone_and_the_earlier_log_is_kept(start, log):
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


def test_output_that_is_no_text_is_no_trouble(start):
    server = start("import sys; sys.stdout.buffer.write(b'bad \\xff byte')")
    wait_until(lambda: server.exit_status == 0)
    assert server.tail() == "bad \ufffd byte"


def test_stop_ends_the_whole_group_also_who_does_not_listen(start, monkeypatch):
    monkeypatch.setattr(server_process, "SECONDS_TO_STOP", 1)
    server = start(FAMILY)
    wait_until(lambda: {"family", "stubborn"} <= set(server.tail().split()))
    pids = family(server.tail())
    assert pids[0] == server.pid and all(map(is_alive, pids))
    server.stop()
    wait_until(lambda: not any(map(is_alive, pids)))
    assert server.exit_status is not None
    server.stop()


def test_children_end_though_the_server_itself_has_died(start, monkeypatch):
    monkeypatch.setattr(server_process, "SECONDS_TO_STOP", 1)
    server = start(FAMILY.replace("time.sleep(600)\n", "sys.exit(1)\n"))
    wait_until(lambda: server.exit_status == 1 and "stubborn" in server.tail().split())
    pids = family(server.tail())
    assert all(map(is_alive, pids[1:]))
    server.stop()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_an_interrupt_while_it_stops_saves_nobody(start, monkeypatch):
    server = start(FAMILY)
    wait_until(lambda: {"family", "stubborn"} <= set(server.tail().split()))
    pids = family(server.tail())

    def interrupt(seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(server_process.time, "sleep", interrupt)
        server.stop()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_stop_is_polite_first(start):
    """What a server does at SIGTERM it has the time to do."""
    server = start(
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('goodbye')))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    wait_until(lambda: server.tail() == "ready")
    server.stop()
    assert server.tail() == "ready\ngoodbye" and server.exit_status == 0


@pytest.mark.parametrize(("ending", "status"), [("", 0), ("raise ZeroDivisionError", 1), ("sys.exit(5)", 5)])
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


@pytest.mark.parametrize("error", ["", "raise ZeroDivisionError"])
def test_output_goes_to_the_log_and_comes_back(log, error):
    """Also what a child writes, and what is written below Python; also after an exception."""
    script = f"""
import os, runpy, subprocess, sys
from contextlib import suppress
from pathlib import Path
output_to = runpy.run_path({server_process.__file__!r})["output_to"]
print("before")
with suppress(ZeroDivisionError), output_to(Path(sys.argv[1])):
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
