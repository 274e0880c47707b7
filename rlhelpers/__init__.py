"""Reinforcement learning for reasoning language models: the package behind the workbook."""

import os
import sys
import warnings

__version__ = "0.1.0"

# OpenMP's threads spin while they wait for each other, and where another process has their core that costs ten times
# the step.  With these they sleep soon.  GNU's OpenMP counts turns, LLVM's and Intel's count milliseconds.
SHORT_WAITS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


def _wait_briefly() -> None:
    """Set SHORT_WAITS for this process and its children, except what the user has set.

    OpenMP reads them once, when torch is loaded: warn where torch was loaded before and the user has set nothing.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return
    is_unset = not SHORT_WAITS.keys() & os.environ.keys()
    for name, value in SHORT_WAITS.items():
        os.environ.setdefault(name, value)
    torch = sys.modules.get("torch")
    if is_unset and torch is not None and torch.get_num_threads() > 1 and not torch.cuda.is_available():
        message = (
            "torch was imported before rlhelpers: its threads spin while they wait, which is slow on a busy machine"
        )
        warnings.warn(f"{message}; import rlhelpers first, or set GOMP_SPINCOUNT=1000", stacklevel=3)


_wait_briefly()
