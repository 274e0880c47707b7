"""Equality of two short formulas, decided by sympy in a process of its own.

A formula can keep sympy busy for ever, or ask for more memory than there is.  So the asking process never parses one.
The sympy process reads one pair a line and answers one word a line.  A watchdog thread in it ends it when a pair takes
too long, and the next question starts another.  The asking process uses neither signals nor alarms, so it may ask from
any thread and in a notebook.
"""

import atexit
import faulthandler
import json
import os
import re
import subprocess
import sys
import threading
from functools import lru_cache

TIME_LIMIT = 2.0  # seconds for one pair
MEMORY_LIMIT = 512 * 2**20  # bytes of address space, where the system has such a limit (Linux)

EQUAL, DIFFERENT, UNREADABLE, TIMED_OUT = "equal", "different", "unreadable", "timed out"


@lru_cache(maxsize=10_000)
def compare(answer: str, truth: str, time_limit: float = TIME_LIMIT) -> str:
    """Return EQUAL, DIFFERENT, UNREADABLE (no formula, or sympy failed) or TIMED_OUT (too slow, or the process died).

    `time_limit`: seconds of wall clock, without the start of the process (about a second, before the first pair and
    after one that timed out).  Threads wait for one another.  Raises ValueError unless it is a positive number.
    """
    check_time_limit(time_limit)
    return _process_of(os.getpid()).ask(answer, truth, time_limit)


def check_time_limit(time_limit: float) -> None:
    is_number = isinstance(time_limit, int | float) and not isinstance(time_limit, bool)
    if not is_number or not 0 < time_limit <= threading.TIMEOUT_MAX:
        accepted = f"a positive number of seconds, at most {threading.TIMEOUT_MAX:g}"
        raise ValueError(f"time_limit: got {time_limit!r}; accepted is {accepted}")


@lru_cache(maxsize=1)
def _process_of(pid: int) -> "_Algebra":
    """Return this process's own: a fork must not write to its parent's pipe, nor end its parent's sympy process."""
    algebra = _Algebra()
    atexit.register(lambda: algebra.end() if os.getpid() == pid else None)
    return algebra


class _Algebra:
    """The asking side: starts the sympy process where there is none."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process = None

    def ask(self, answer: str, truth: str, time_limit: float) -> str:
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:  # not yet started, or killed since
                    self.end()
                    self._process = _start()
                self._process.stdin.write(json.dumps([answer, truth, time_limit]) + "\n")
                self._process.stdin.flush()
                verdict = self._process.stdout.readline().strip()
            except OSError:  # it was killed just now
                verdict = ""
            except BaseException:  # an interrupt: the answer to this pair must not be read as the next one's
                self.end()
                raise
            if not verdict:
                self.end()
            return verdict or TIMED_OUT

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _start() -> subprocess.Popen:
    # By its path and with -P: nothing in the working directory can stand in for a module that it imports.
    return subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
    )


def _serve() -> None:
    """The sympy process: answer until the asking side closes its pipe, or is gone."""
    import logging
    import signal

    from sympy.core.cache import clear_cache

    _compare("x+1", "1+x")  # the first pair imports math_verify and builds its parsers: before a clock runs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asks
    logging.disable(logging.CRITICAL)
    _limit_memory()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    sys.stdout = sys.stderr  # whatever a library prints is no answer
    for line in sys.stdin:
        answer, truth, time_limit = json.loads(line)
        faulthandler.dump_traceback_later(time_limit, exit=True)
        verdict = _compare(answer, truth)
        faulthandler.cancel_dump_traceback_later()
        print(verdict, file=answers, flush=True)
        clear_cache()  # large numbers stay there otherwise, until no pair has the memory that it needs


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    except (ImportError, ValueError, OSError):  # Windows has none; macOS does not keep to it
        pass


def _compare(answer: str, truth: str) -> str:
    try:
        formulas = [_read(text) for text in (truth, answer)]
        return EQUAL if _are_equal(*formulas) else DIFFERENT
    except Exception:  # sympy and its parsers raise nearly everything, MemoryError too
        return UNREADABLE


def _read(text: str):
    """Parse a text with math-verify's LaTeX parser.

    Without its search, which leaves out what it does not understand.  `2(3)` is written out first: the parser would
    take it for the mixed number 2 + 3.
    """
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    latex = re.sub(r"(?<![\\a-zA-Z])(pi|sin|cos|tan|ln|log|exp)(?![a-zA-Z])", r"\\\1 ", text)
    latex = re.sub(r"(?<=[0-9])\s*\(", "*(", latex.replace("**", "^"))
    formula = latex2sympy(
        latex,
        normalization_config=NormalizationConfig(basic_latex=True, malformed_operators=True),
        conversion_config=ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False),
    )
    if isinstance(formula, str):
        raise ValueError(text)
    return formula


def _are_equal(truth, answer) -> bool:
    """Compare terms exactly: 1/3 is not 0.333333.  Leave the rest, such as intervals and tuples, to math-verify."""
    from math_verify import verify
    from sympy import Expr

    if isinstance(truth, Expr) and isinstance(answer, Expr):
        return bool(_exact(truth).equals(_exact(answer)))
    return verify(truth, answer, timeout_seconds=None)


def _exact(term):
    """Replace every decimal by the fraction that it is."""
    from sympy import Float, Rational

    return term.xreplace({decimal: Rational(str(decimal)) for decimal in term.atoms(Float)})


if __name__ == "__main__":
    _serve()
