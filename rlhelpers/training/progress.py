"""What a person sees while a run works: a bar where it can move, else one line per step."""

import os
import sys
from typing import Any

from tqdm.auto import tqdm


class Progress:
    """A context manager around `steps` steps, of which `done` were done before."""

    def __init__(self, steps: int, done: int = 0):
        self.steps = steps
        self._bar = tqdm(total=steps, initial=done, unit="step") if bar_can_move() else None

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, metrics: dict[str, Any]) -> None:
        """After a step (step 0: the validation before training)."""
        text = _summary(metrics)
        if self._bar is None:
            print(f"step {metrics['step']:>{len(str(self.steps))}}/{self.steps}  {text}", flush=True)
        else:
            self._bar.set_postfix_str(text)
            self._bar.update(min(1, metrics["step"]))

    def say(self, text: str) -> None:
        """A line of its own, which a bar does not tear."""
        if self._bar is None:
            print(text, flush=True)
        else:
            tqdm.write(text)


def bar_can_move() -> bool:
    """In a terminal, and in a notebook that a person has open; not under papermill, nbconvert or a pipe.

    Jupyter's server names the notebook of each kernel that it starts; tools that only execute a notebook do not.
    """
    in_kernel = "ipykernel" in sys.modules and hasattr(sys.stdout, "pub_thread")
    return "JPY_SESSION_NAME" in os.environ if in_kernel else sys.stderr.isatty()


def _summary(metrics: dict[str, Any]) -> str:
    shown = {
        "reward": metrics.get("reward"),
        "format": metrics.get("format_reward"),
        "length": metrics.get("response_length"),
        "val_reward": metrics.get("val_reward"),
        "seconds": metrics.get("seconds"),
    }
    digits = {"length": 1, "seconds": 1}
    return "  ".join(f"{k} {v:.{digits.get(k, 3)}f}" for k, v in shown.items() if v is not None)
