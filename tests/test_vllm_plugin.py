"""vLLM's processes end with the process that owns them."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from processes import is_alive, wait_until

from rlhelpers.rollouts import vllm_plugin
from rlhelpers.rollouts.vllm_plugin import OWNER, owner_environment

# By path: the package brings torch, which takes seconds.
WATCH = f"""
import os, runpy, sys, threading, time
end_with_owner = runpy.run_path({vllm_plugin.__file__!r})["_end_with_owner"]
threading.Thread(target=end_with_owner, args=(int(sys.argv[1]),), daemon=True).start()
"""
CHILD = WATCH + "print(os.getpid(), flush=True)\ntime.sleep(100)"
# Starts a child, as vLLM's server does, that starts another one, as vLLM's engine does; both watch this process.
OWNING = f"""
import os, subprocess, sys, time
between = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[2], sys.argv[1]])"
command = [sys.executable, "-c", between, str(os.getpid()), {CHILD!r}]
subprocess.Popen(command)
time.sleep(100)
"""


def test_the_environment_names_this_process():
    assert owner_environment() == {OWNER: str(os.getpid())}


@pytest.mark.parametrize("asked_for", [True, False])
def test_a_process_ends_soon_after_its_owner_was_killed(asked_for):
    """Also when nobody has asked for the owner's status, and its number is still there."""
    owner = subprocess.Popen([sys.executable, "-c", OWNING], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(owner.stdout.readline())
        watching = psutil.Process(pid)
        assert is_alive(pid) and owner.pid in [process.pid for process in watching.parents()]
        owner.send_signal(signal.SIGKILL)
        if asked_for:
            owner.wait(60)
        wait_until(lambda: not is_alive(pid), seconds=30)
    finally:
        owner.kill()
        owner.wait(60)
        owner.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="how psutil computes a start time is a matter of the system")
def test_a_process_lives_on_while_its_owner_does_even_when_the_clock_is_set():
    setting_the_clock = """
import psutil
time.sleep(0.3)
boot_time = psutil._pslinux.boot_time
psutil._pslinux.boot_time = lambda: boot_time() + 3600
time.sleep(2.5)
print("alive", flush=True)
"""
    command = [sys.executable, "-c", WATCH + setting_the_clock, str(os.getpid())]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (child.returncode, child.stdout) == (0, "alive\n"), child.stderr


def test_a_later_process_with_the_owners_number_is_not_the_owner():
    """It runs, and is no ancestor."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        child = subprocess.run([sys.executable, "-c", CHILD, str(other.pid)], capture_output=True, timeout=60)
        assert child.returncode == 1 and is_alive(other.pid)
    finally:
        other.kill()
        other.wait(60)


def test_an_owner_that_never_was():
    child = subprocess.run([sys.executable, "-c", CHILD, str(2**22 + 1)], capture_output=True, timeout=60)
    assert child.returncode == 1
