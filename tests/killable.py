"""Training runs in processes of their own, which are really killed: by themselves at a moment that is named, or by the
test.  A server that has imported everything forks them, so that each starts in a fraction of a second."""

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, Olmo2Config, Olmo2ForCausalLM, PreTrainedModel

from rlhelpers import paths
from rlhelpers.files import NotWrittenError
from rlhelpers.kernels.estimators import Estimator
from rlhelpers.training import checkpoint, loop
from rlhelpers.training import console as progress
from rlhelpers.training import run_folder as records
from rlhelpers.training.config import make_config

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["killable", "transformers.models.olmo2.modeling_olmo2"])
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def _ramp(rewards: Tensor) -> Tensor:
    """Of the responses of a group the first are always pushed up and the last down: any model learns, without end."""
    return rewards + torch.linspace(-1, 1, rewards.shape[1]).expand_as(rewards)


PUSH = Estimator("push", _ramp, "none", "sequence", "grpo", 0.01)


def write_model(folder: Path) -> None:
    """A model that takes no time, with the tokenizer of the tiny one."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Olmo2Config.from_pretrained(paths.TINY, **sizes, num_key_value_heads=2)
    torch.manual_seed(0)
    Olmo2ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(paths.TINY).save_pretrained(folder)


def start(runs: Path, settings: dict[str, Any], moment: tuple | None = None) -> multiprocessing.Process:
    """Train in another process, with data/runs in `runs`; what it prints is appended to `runs`/output.txt.

    `moment`: a name of MOMENTS and a number, "the how many-th"; or ("change", n), before the n-th change of a file or
    folder.  The process kills itself then.  Or a name of FAULTS, which do not kill it; a disk stays full until the run
    has failed.
    """
    process = CONTEXT.Process(target=_train, args=(runs, settings, moment), daemon=True)
    process.start()
    return process


def finish(process: multiprocessing.Process, seconds: float = 120) -> bool:
    """Wait for it; whether it was killed.  Fails the test where it ended with an error."""
    process.join(seconds)
    assert process.exitcode in (0, -signal.SIGKILL), f"exit code {process.exitcode}; see output.txt"
    return process.exitcode != 0


def _train(runs: Path, settings: dict[str, Any], moment: tuple | None) -> None:
    runs.mkdir(parents=True, exist_ok=True)
    sys.stdout = sys.stderr = open(runs / "output.txt", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    torch.set_num_threads(1)
    paths.RUNS = runs
    if moment is not None:
        name, number = moment
        _die_before_a_change(runs, number) if name == "change" else (MOMENTS | FAULTS)[name](number)
    try:
        loop.train(make_config(**settings))
    except NotWrittenError as error:
        limit_files(resource.RLIM_INFINITY)
        print(f"NotWrittenError: {error}")
        raise


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_before_a_change(runs: Path, number: int) -> None:
    """Paths that are not absolute are those of shutil.rmtree."""
    left = number

    def hook(event: str, arguments: tuple) -> None:
        nonlocal left
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writes or event in CHANGES) or isinstance(arguments[0], int):
            return
        path = os.fspath(arguments[0])
        if not os.path.isabs(path) or path.startswith(str(runs)):
            left -= 1
            if left == 0:
                _die()

    sys.addaudithook(hook)


def _after(owner: Any, name: str, damage: Callable[..., None]) -> Callable[[int], None]:
    """A moment: after the n-th call of `owner.name`, whose arguments and result `damage` gets; then death."""

    def arm(number: int) -> None:
        original, calls = getattr(owner, name), 0

        def patched(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            result = original(*arguments, **named)
            calls += 1
            if calls == number:
                damage(*arguments)
                _die()
            return result

        setattr(owner, name, patched)

    return arm


def limit_files(size: int) -> None:
    """No file of this process grows beyond `size` bytes: what is written above fails as it does on a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


def _before(owner: Any, name: str, action: Callable[[], None]) -> Callable[[int], None]:
    """A moment: before the n-th call of `owner.name`."""

    def arm(number: int) -> None:
        original, calls = getattr(owner, name), 0

        def patched(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                action()
            return original(*arguments, **named)

        setattr(owner, name, patched)

    return arm


def _fill_up() -> None:
    limit_files(20)


def _leave_half_a_line() -> None:
    [file] = paths.RUNS.rglob("metrics.jsonl")
    limit_files(file.stat().st_size + 20)


def _cut(file: Path) -> None:
    """As if only half of it, or of the line that was appended, had been written."""
    content = file.read_bytes()
    start = content[:-1].rfind(b"\n") + 1 if file.suffix == ".jsonl" else 0
    file.write_bytes(content[: (start + len(content)) // 2])


def _cut_all(folder: Path) -> None:
    for file in folder.iterdir():
        _cut(file)


MOMENTS = {
    "half the weights of a checkpoint": _after(checkpoint, "save_file", lambda _, file: _cut(file)),
    "half the state of a checkpoint": _after(torch, "save", lambda _, file: _cut(file)),
    "a checkpoint without its name": _after(checkpoint, "sha256", lambda _: None),
    "half a line of metrics": _after(records.RunRecords, "log", lambda self, _: _cut(self.folder / "metrics.jsonl")),
    "half the responses": _after(
        records.RunRecords,
        "write_rollouts",
        lambda self, step, split, _: _cut(self.folder / f"rollouts/step_{step:05d}_{split}.jsonl"),
    ),
    "logged and no checkpoint": _after(progress.Progress, "show", _die),
    "a checkpoint": _after(checkpoint.Checkpoint, "save", _die),
    "half the policy": _after(PreTrainedModel, "save_pretrained", lambda _, folder: _cut_all(folder)),
    "the policy": _after(loop, "save_policy", _die),
}
FAULTS = {
    "full before metrics": _before(records.RunRecords, "log", _leave_half_a_line),
    "full before responses": _before(records.RunRecords, "write_rollouts", _fill_up),
    "full before a checkpoint": _before(checkpoint.Checkpoint, "save", _fill_up),
    "full before the policy": _before(loop, "save_policy", _fill_up),
    "full before the time is taken": _before(records, "_now", _fill_up),  # at the beginning and at the end
    "slow": _before(loop.Run, "train", lambda: time.sleep(4)),
}
