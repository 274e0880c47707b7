"""The steps of a run of any kind: shown to a person, logged in the run's folder, sent to a dashboard, and kept in
checkpoints."""

import importlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from rlhelpers.training.checkpoint import Checkpoint
from rlhelpers.training.run_folder import RunRecords, terminated_in_order
from rlhelpers.training.settings import RunSettings


class Progress:
    """A context manager around `steps` steps, of which `done` were done before: a bar where it can move, else one line
    per step."""

    def __init__(self, steps: int, done: int = 0):
        self.steps = steps
        self._bar = tqdm(total=steps, initial=done, unit="step", disable=not bar_can_move())

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def show(self, metrics: dict[str, Any]) -> None:
        """Show a step that is done; step 0 is the validation before training."""
        text = _summary(metrics)
        if self._bar.disable:
            print(f"step {metrics['step']:>{len(str(self.steps))}}/{self.steps}  {text}", flush=True)
        self._bar.set_postfix_str(text)
        self._bar.update(min(1, metrics["step"]))

    def say(self, text: str) -> None:
        """Print a line that does not break the bar."""
        print(text, flush=True) if self._bar.disable else tqdm.write(text)


def bar_can_move() -> bool:
    """Return True in a terminal, and in a notebook that a person has open; not under papermill, nbconvert or a pipe."""
    # Jupyter's server names the notebook of each kernel that it starts; tools that only execute a notebook do not.
    in_kernel = "ipykernel" in sys.modules and hasattr(sys.stdout, "pub_thread")
    return "JPY_SESSION_NAME" in os.environ if in_kernel else sys.stderr.isatty()


SHOWN = {  # of a step's metrics: under which names, with how many decimal places
    "reward": ("reward", 3),
    "format_reward": ("format", 3),
    "response_length": ("length", 1),
    "val_reward": ("val_reward", 3),
    "seconds": ("seconds", 1),
}


def _summary(metrics: dict[str, Any]) -> str:
    known = ((name, metrics.get(metric), digits) for metric, (name, digits) in SHOWN.items())
    return "  ".join(f"{name} {value:.{digits}f}" for name, value, digits in known if value is not None)


class Tracker:
    """An optional dashboard beside the records: wandb or trackio.  It never stops a run: its first error is a warning
    and turns it off.

    A resumed run has the same `run_id` as before, and steps up to `tracked` are not logged again.  A step that was on
    its way when the process was killed may be missing.
    """

    def __init__(self, config: RunSettings, run_id: str | None = None, tracked: int = -1):
        self._library, self._tracked = None, tracked
        if config.tracker is not None:  # both libraries have init, log and finish
            self._library = self._try("import", lambda: importlib.import_module(config.tracker))
            name = f"{config.variant}/seed={config.seed}"
            settings = config.model_dump(mode="json")
            # wandb knows a run by its id, trackio by its name.
            known = {"id": run_id} if config.tracker == "wandb" and run_id else {}
            known |= {"resume": "allow"} if tracked >= 0 else {}
            self._call("init", project=f"rlhelpers-{config.experiment}", name=name, config=settings, **known)

    def log(self, metrics: dict[str, Any]) -> None:
        known = {name: value for name, value in metrics.items() if value is not None}
        if metrics["step"] > self._tracked:
            self._call("log", known, step=metrics["step"])

    def close(self) -> None:
        self._call("finish")

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        if self._library is not None:
            self._try(name, lambda: getattr(self._library, name)(*args, **kwargs))

    def _try(self, what: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (Exception, SystemExit) as error:
            warnings.warn(f"tracker: {what} failed and is off from now on ({error!r})", stacklevel=3)
            self._library = None


@dataclass(frozen=True)
class Log:
    """Where a run says what it does: its folder, the person who watches, and a dashboard."""

    records: RunRecords
    progress: Progress
    tracker: Tracker

    def remark(self, text: str) -> None:
        """Say and write down what a reader of the results must know."""
        self.records.remark(text)
        self.progress.say(text)

    def add(self, metrics: dict[str, Any]) -> None:
        """Log the metrics of one step."""
        self.records.log(metrics)
        self.tracker.log(metrics)
        self.progress.show(metrics)


@contextmanager
def open_log(records: RunRecords, steps: int, remarks: Sequence[str]) -> Iterator[Log]:
    """Open the run's folder.  After the block it says "complete", "failed", or, by SIGTERM, "killed".

    remarks: what a reader of the results must know from the start.
    """
    with terminated_in_order(), records, Progress(steps, records.step) as progress:
        tracker = Tracker(records.config, records.about["id"], records.tracked)
        for text in records.news:
            progress.say(text)
        try:
            log = Log(records, progress, tracker)
            if records.checkpoint is not None:
                progress.say(f"Goes on after step {records.step} of {steps}, from its checkpoint.")
            for text in remarks if records.checkpoint is None else ():
                log.remark(text)
            yield log
        finally:
            tracker.close()


def take_steps(
    log: Log,
    steps: range,
    step: Callable[[int], dict[str, Any]],
    stop_if_diverged: Callable[[], None],
    make_checkpoint: Callable[[int], Checkpoint],
) -> None:
    """Do the steps, log the metrics of each, and keep checkpoints.

    step: returns the metrics of a step; step 0 is what is done before the first update.
    stop_if_diverged: may raise, when the step's metrics are in the log.
    """
    for number in steps:
        started = time.perf_counter()
        metrics = {"step": number} | step(number)
        log.add(metrics | {"seconds": time.perf_counter() - started})
        stop_if_diverged()
        if number > 0 and is_due(number, log.records.config.checkpoint_every, steps[-1]):
            log.records.keep(make_checkpoint(number))


def is_due(step: int, every: int, last: int) -> bool:
    """Return True every so many steps, and after the last one."""
    return step % every == 0 or step == last
