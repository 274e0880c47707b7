"""sympy in a process of its own: right about formulas, and impossible to hang, to bomb, or to confuse."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import psutil
import pytest
from processes import is_alive, wait_until

from rlhelpers import paths
from rlhelpers.tasks import algebra
from rlhelpers.tasks.algebra import DIFFERENT, EQUAL, MEMORY_LIMIT, TIMED_OUT, UNREADABLE, compare

LONG = 60.0  # seconds: a limit that no test reaches
ENDLESS = "9^{9^{9}}"


def workers(pid=None):
    children = psutil.Process(pid).children()
    return [child for child in children if is_alive(child.pid) and algebra.__file__ in child.cmdline()]


@pytest.fixture(autouse=True)
def forgetful():
    """Every question is asked: none is answered out of the cache."""
    compare.cache_clear()


@pytest.fixture
def new_worker():
    """Ends the process that an earlier test has started, so that the next question starts one."""
    for worker in workers():
        worker.kill()
        worker.wait()


@pytest.fixture
def peak_memory():
    """Looks every few milliseconds how much memory the process has, and keeps the most."""

    @contextmanager
    def watched():
        peak, is_over = SimpleNamespace(bytes=0), threading.Event()

        def watch():
            while not is_over.wait(0.005):
                with suppress(psutil.NoSuchProcess):
                    peak.bytes = max([peak.bytes, *(worker.memory_info().rss for worker in workers())])

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield peak
        finally:
            is_over.set()
            watcher.join()

    return watched


@pytest.fixture
def run_script(tmp_path):
    """Runs a script in tmp_path, in a process group of its own."""

    def run(script: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(paths.ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return run


@pytest.mark.parametrize(
    ("answer", "truth", "verdict"),
    [
        ("x+x", "2x", EQUAL),
        ("2(x+1)", "2x+2", EQUAL),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", EQUAL),
        (r"\sin(x)^2+\cos(x)^2", "1", EQUAL),
        ("0.125x", r"\frac{x}{8}", EQUAL),
        ("2*pi", r"2\pi", EQUAL),
        ("(0,1]", "(0, 1]", EQUAL),
        ("2,3", "3,2", EQUAL),
        ("x+x", "3x", DIFFERENT),
        ("2(3)", "5", DIFFERENT),
        ("0.333333333333333x", r"\frac{x}{3}", DIFFERENT),
        ("X", "x", DIFFERENT),
        ("(0,1]", "(0,1)", DIFFERENT),
        (r"\frac{1}{0}", "0", DIFFERENT),
        ("", "x", UNREADABLE),
        ("+", "x", UNREADABLE),
        (r"\frac{1}{", "x", UNREADABLE),
        ("\ud800", "x", UNREADABLE),
    ],
)
def test_verdicts(answer, truth, verdict):
    assert compare(answer, truth, LONG) == verdict


@pytest.mark.parametrize("time_limit", [0, -1, math.nan, math.inf, -math.inf, 10**10, "2", None])
def test_a_limit_that_is_none(time_limit):
    with pytest.raises(ValueError, match=r"time_limit: got .*; accepted is a positive number of seconds"):
        compare("x", "x", time_limit)


def test_a_limit_may_be_a_fraction_of_a_second():
    assert compare("x+x", "2x", LONG) == EQUAL
    started = time.monotonic()
    assert compare(ENDLESS, "x", 0.5) == TIMED_OUT
    assert 0.5 <= time.monotonic() - started < 20
    assert compare(r"\sin(\sin(x))", "x", 0.001) == TIMED_OUT
    assert compare("x+x", "2x", LONG) == EQUAL


BOMBS = [
    "99999999999!",
    ENDLESS,
    "(x+1)^{9999}",
    r"\binom{99999999}{9999999}",
    r"\sum_{n=1}^{99999999} \frac{1}{n}",
    "1" * 5000,
    "9" * 10**6,
    "(" * 2000 + "1" + ")" * 2000,
    r"\frac" * 200_000,
]


@pytest.mark.slow
def test_bombs_end_in_time_and_within_the_memory(peak_memory):
    assert compare("x+x", "2x", LONG) == EQUAL
    with peak_memory() as peak:
        started = time.monotonic()
        for bomb in BOMBS:
            assert compare(bomb, r"\frac{x}{3}", 0.3) in {DIFFERENT, UNREADABLE, TIMED_OUT}, bomb[:20]
        assert compare(r"\frac{x}{3}", ENDLESS, 0.3) == TIMED_OUT
        assert time.monotonic() - started < 120
        assert compare("(x+1)^{999999}", "x", LONG) == UNREADABLE  # it asks for more memory than there is
        (worker,) = workers()
        assert compare("x+x", "2x", 1 + LONG) == EQUAL
        assert workers() == [worker]  # which an error of memory does not end
    if sys.platform == "linux":  # others do not keep to a limit
        assert worker.rlimit(psutil.RLIMIT_AS) == (MEMORY_LIMIT, MEMORY_LIMIT)
        assert 100 * 2**20 < peak.bytes < MEMORY_LIMIT == 512 * 2**20


CODE = [
    'open("pwned","w")',
    '__import__("os").mkdir("pwned")',
    r"\pi+__import__(\"os\").mkdir(\"pwned\")",
    r"\begin{pmatrix}__import__('os').mkdir('pwned')\end{pmatrix}",
    "().__class__.__base__.__subclasses__()",
    "print(7)",
    "exit()",
    'x", "x", 60]\n["x", "x',
    "x\n[1]",
]


@pytest.mark.usefixtures("new_worker")
def test_code_is_not_run_nothing_is_printed_and_no_file_is_made(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert compare("x+x", "2x", LONG) == EQUAL  # starts the process in tmp_path
    for code in CODE:
        assert compare(code, "x", LONG) in {DIFFERENT, UNREADABLE}
    assert compare("7", "x+8", LONG) == DIFFERENT
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("new_worker")
def test_no_file_of_the_working_directory_is_imported(tmp_path, monkeypatch):
    for name in ("math_verify", "sympy", "json", "logging", "rlhelpers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(1)", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert compare("x+x", "2x", LONG) == EQUAL


def test_threads_get_their_own_answers_also_beside_a_bomb():
    questions = [(f"{n}x+{m}x", f"{n + m}x") for n in range(3) for m in range(3)]
    questions[4:4] = [(ENDLESS, "x")]
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda question: compare(*question, 0.5 if ENDLESS in question else LONG), questions))
    assert verdicts == [EQUAL] * 4 + [TIMED_OUT] + [EQUAL] * 5
    assert len(workers()) == 1


def test_in_a_running_event_loop():
    async def ask():
        return compare("x+x", "2x", LONG), await asyncio.to_thread(compare, "x+x", "3x", LONG)

    assert asyncio.run(ask()) == (EQUAL, DIFFERENT)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no alarms")
def test_handlers_and_a_pending_alarm_are_left_alone():
    alarms = []
    previous = signal.signal(signal.SIGALRM, lambda *_: alarms.append(1))
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        signal.setitimer(signal.ITIMER_REAL, 3600)
        assert compare("x+x", "2x", LONG) == EQUAL
        assert compare(ENDLESS, "x", 0.2) == TIMED_OUT
        assert 3000 < signal.getitimer(signal.ITIMER_REAL)[0] < 3600 and not alarms
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # it goes off in the middle of the question
        assert compare(ENDLESS, "x", 0.5) == TIMED_OUT
        assert alarms == [1]
        assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_process_killed_between_questions_costs_nothing():
    assert compare("x+x", "2x", LONG) == EQUAL
    (worker,) = workers()
    worker.kill()
    wait_until(lambda: not is_alive(worker.pid))
    assert compare("x+x", "2x + 0", LONG) == EQUAL
    assert len(workers()) == 1


def test_a_process_killed_at_a_question_costs_this_one():
    assert compare("x+x", "2x", LONG) == EQUAL
    (worker,) = workers()
    threading.Timer(0.3, worker.kill).start()
    assert compare(ENDLESS, "x", LONG) == TIMED_OUT
    assert compare("x+x", "2x + 0", LONG) == EQUAL


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_at_a_question_does_not_shift_the_answers(run_script):
    """The terminal sends it to both processes; a notebook's kernel too."""
    script = f"""
import os, signal, threading
from rlhelpers.tasks.algebra import compare
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits that it is ignored
print(compare("x+x", "2x", {LONG}))
threading.Timer(0.3, os.killpg, [0, signal.SIGINT]).start()
try:
    compare("{ENDLESS}", "x", {LONG})
except KeyboardInterrupt:
    print("interrupted")
print(compare("x+x", "3x", {LONG}), compare("x+x", "2x+0", {LONG}))
try:
    os.killpg(0, signal.SIGINT)  # and while nobody asks
except KeyboardInterrupt:
    print("interrupted")
print(compare("x+x", "4x", {LONG}), compare("x+x", "2x-0", {LONG}))
"""
    out, errors = run_script(script).communicate(timeout=120)
    assert out.split() == ["equal", "interrupted", "different", "equal", "interrupted", "different", "equal"]
    assert errors == ""


@pytest.mark.slow
def test_nothing_is_left_open_at_the_end(run_script):
    script = f"""
import warnings
warnings.simplefilter("always")
from rlhelpers.tasks.algebra import compare
assert compare("x+x", "2x", {LONG}) == "equal"
"""
    process = run_script(script)
    assert process.communicate(timeout=120) == ("", "") and process.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_after_a_fork_each_has_its_own(run_script):
    script = f"""
import os, psutil
from rlhelpers.tasks.algebra import compare
assert compare("x+x", "2x", {LONG}) == "equal"
(worker,) = psutil.Process().children()
child = os.fork()
n = 100 if child else 1
for m in range(10):
    assert compare(f"{{n}}x+{{m}}x", f"{{n + m}}x", {LONG}) == "equal"
    assert compare(f"{{n}}x+{{m}}x", f"{{n + m + 1}}x", {LONG}) == "different"
assert not child or os.waitpid(child, 0)[1] == 0
assert not child or psutil.Process().children() == [worker]  # the child has ended its own, not ours
"""
    process = run_script(script)
    assert process.communicate(timeout=120) == ("", "") and process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("end", ["by itself", "killed while idle", "killed during a bomb"])
def test_the_process_ends_with_its_owner(run_script, end):
    script = f"""
import threading
from rlhelpers.tasks.algebra import compare
print(compare("x+x", "2x", {LONG}), flush=True)
if {end!r} == "killed during a bomb":
    compare("{ENDLESS}", "x", 3)
input() if {end!r} == "by itself" else threading.Event().wait()
"""
    owner = run_script(script)
    assert owner.stdout.readline() == "equal\n"
    (worker,) = workers(owner.pid)
    if end == "killed during a bomb":
        busy = worker.cpu_times().user
        wait_until(lambda: worker.cpu_times().user > busy + 0.1)
    if end != "by itself":
        owner.kill()
    owner.communicate(timeout=120)
    wait_until(lambda: not is_alive(worker.pid))
