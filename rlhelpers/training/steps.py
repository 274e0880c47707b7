"""The steps of a run of any kind, one after the other: shown, logged, tracked, and kept in checkpoints."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlhelpers.training.checkpoint import Checkpoint
from rlhelpers.training.progress import Progress
from rlhelpers.training.records import RunRecords
from rlhelpers.training.termination import terminated_in_order
from rlhelpers.training.tracker import Tracker


@dataclass(frozen=True)
class Log:
    """Where a run that is at work says what it does: its folder, its reader, and a dashboard."""

    records: RunRecords
    progress: Progress
    tracker: Tracker

    def remark(self, text: str) -> None:
        """Something that a reader of the results must know."""
        self.records.remark(text)
        self.progress.say(text)

    def say_goes_on(self, checkpoint: Checkpoint) -> None:
        self.progress.say(f"Goes on after step {checkpoint.step} of {self.progress.steps}, from its checkpoint.")

    def add(self, metrics: dict[str, Any]) -> None:
        """The metrics of one step."""
        self.records.log(metrics)
        self.tracker.log(metrics)
        self.progress.show(metrics)


@contextmanager
def open_log(records: RunRecords, steps: int) -> Iterator[Log]:
    """The run's folder is open inside; it says "complete" behind the block, or "failed", and "killed" after SIGTERM."""
    with terminated_in_order(), records, Progress(steps, records.step) as progress:
        tracker = Tracker(records.config, records.about["id"], records.tracked)
        for text in records.news:
            progress.say(text)
        try:
            yield Log(records, progress, tracker)
        finally:
            tracker.close()


def take_steps(
    log: Log,
    steps: range,
    step: Callable[[int], dict[str, Any]],
    stop_if_diverged: Callable[[], None],
    take_checkpoint: Callable[[int], Checkpoint],
) -> None:
    """Step 0 is what is done before the first update.  `step` gives a step's metrics; when they are in the log,
    `stop_if_diverged` may raise."""
    for number in steps:
        started = time.perf_counter()
        metrics = {"step": number} | step(number)
        log.add(metrics | {"seconds": time.perf_counter() - started})
        stop_if_diverged()
        if number > 0 and is_due(number, log.records.config.checkpoint_every, steps[-1]):
            log.records.keep(take_checkpoint(number))


def is_due(step: int, every: int, last: int) -> bool:
    """Every so many steps, and after the last one."""
    return step % every == 0 or step == last
