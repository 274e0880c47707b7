"""The training step alone, and with sampling and grading: the package's, the textbook's and TRL's from the same
weights."""

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel

from rlhelpers.bench.agreement import refuse_unless_same, sampling_bias, score
from rlhelpers.bench.case import Batch, Case, configuration, difference, package_step, refuse_unless_equal
from rlhelpers.bench.measure import MIB, Clock, PeakMemory, compare_seconds, in_own_process, in_turns, reading
from rlhelpers.bench.report import Report, conditions
from rlhelpers.bench.textbook import GenerateEngine, textbook_step
from rlhelpers.models import can_share
from rlhelpers.rollouts import TorchEngine
from rlhelpers.training.config import RunConfig
from rlhelpers.training.loop import Run

ROUNDS = 5


class _Recorder(TorchEngine):
    def generate(self, prompts, sampling):
        self.rollouts = super().generate(prompts, sampling)
        return self.rollouts


def package(case: Case, model: PreTrainedModel, number: int, meter, given: Batch | None = None) -> Batch:
    """On its own samples, all that a run does in a step but validation."""
    can_share(model)  # found out once for a model, and so once in a run
    optimizer, engine = case.optimizer(model), _Recorder(model, case.tokenizer)
    if given is not None:
        with meter:
            case.train(package_step, model, optimizer, given)
        return given
    no_log = SimpleNamespace(remark=print, records=None)
    run = Run(case.config, case.task, case.grader, model, case.tokenizer, engine, optimizer, no_log)
    with meter:
        run.step(number)
    return Batch.of(case.problems(number), engine.rollouts)


def textbook(case: Case, model: PreTrainedModel, number: int, meter, given: Batch | None = None) -> Batch:
    optimizer, engine = case.optimizer(model), GenerateEngine(model, case.tokenizer)
    with meter:
        batch = given or Batch.of(case.problems(number), engine.generate(case.prompts(number), case.sampling(number)))
        case.train(textbook_step, model, optimizer, batch)
    return batch


def trl(case: Case, model: PreTrainedModel, number: int, meter, given: Batch | None = None) -> Batch:
    from rlhelpers.bench.trl_trainer import take_step

    return take_step(case, model, number, meter, given)


CONTESTANTS: dict[str, Callable[..., Batch]] = {"rlhelpers": package, "textbook": textbook, "TRL": trl}
"""Each takes step `number` of the case on its own samples, or on the batch that is given, and returns what was trained
on.  `meter`, a context manager, is entered around the step alone."""


def installed() -> list[str]:
    """Leave out "TRL" where it is not installed."""
    return [name for name in CONTESTANTS if name != "TRL" or importlib.util.find_spec("trl")]


def bench_step(rounds: int = ROUNDS) -> Report:
    """Measure the step on given responses of the tiny model.  Raise ValueError where updates differ."""
    found, case = conditions(), Case.of(configuration())
    given = sample_batch(case)
    rewards, size = case.rewards(given), case.config.group_size
    groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
    settings = {
        "response_tokens": given.response_tokens,
        "without_advantage": sum(size for group in groups if min(group) == max(group)),
    }
    notes = ["One step of Dr. GRPO, one update by AdamW, on the same responses.  without advantage: responses."]
    return Report("step", found, settings | _settings(case, rounds), compare(case, rounds, given), notes)


def bench_whole_step(rounds: int = ROUNDS) -> Report:
    """Measure sampling, grading and training on the tiny model.  Raise ValueError where samples are not the policy's,
    or an update is not the textbook's."""
    found, case = conditions(), Case.of(configuration())
    notes = [
        "One step of Dr. GRPO, one update by AdamW, each on its own samples.  rlhelpers: all that a run does in a step "
        "but validation.  textbook: with `generate` of transformers."
    ]
    return Report("whole-step", found, _settings(case, rounds), compare(case, rounds), notes)


def _settings(case: Case, rounds: int) -> dict[str, Any]:
    return {"responses": case.config.rollout_batch_size, "group_size": case.config.group_size, "rounds": rounds}


def sample_batch(case: Case) -> Batch:
    """Return the responses of the run's first step."""
    rollouts = TorchEngine(case.policy, case.tokenizer).generate(case.prompts(1), case.sampling(1))
    return Batch.of(case.problems(1), rollouts)


def compare(case: Case, rounds: int, given: Batch | None = None) -> list[dict[str, Any]]:
    """Return a row for each contestant, on its own samples or on the batch that is given."""
    work = {name: check(case, name, given) for name in installed()}
    measured = in_turns({name: partial(_measure, case, name, given) for name in work}, rounds)
    if given is None:
        for name, turns in measured.items():
            work[name]["response_length"] = fmean(tokens for _, tokens in turns) / case.config.rollout_batch_size
    times = compare_seconds({name: [seconds for seconds, _ in turns] for name, turns in measured.items()})
    memory = {name: in_own_process(peak_memory, case.config, name, given) for name in work}
    return [{"step": n, **times[n], **work[n], "extra_MiB": memory[n] / MIB} for n in work]


def check(case: Case, name: str, given: Batch | None = None) -> dict[str, Any]:
    """Return what one step of the contestant did, of which this is the warm-up too."""
    model, expected = case.model(), case.model()
    can_share(model)  # else its trial would be counted
    with reading(model) as reads:
        batch = CONTESTANTS[name](case, model, 1, nullcontext(), given)
    work = {"tokens_read": sum(read.tokens for read in reads)}
    if given is None:
        _refuse_unless_done(case, batch, name)
        work = {"bias": sampling_bias(*score(batch.token_ids, case.policy, case.tokenizer))}
        refuse_unless_same(work, name, case.policy.dtype)
    textbook(case, expected, 1, nullcontext(), batch)
    found = difference(case.update(model), case.update(expected))
    refuse_unless_equal(found, name)
    return work | {"difference": found}


def _refuse_unless_done(case: Case, batch: Batch, name: str) -> None:
    config = case.config
    repeated = [prompt for prompt in case.prompts(1) for _ in range(config.group_size)]
    lengths = [len(response) for _, response in batch.token_ids]
    if batch.prompts != repeated or not all(1 <= length <= config.max_tokens for length in lengths):
        raise ValueError(
            f"step: no speeds, for {name} trained on {len(lengths)} responses of {min(lengths)} to {max(lengths)} "
            f"tokens; accepted are {config.group_size} to each prompt, of 1 to {config.max_tokens} tokens"
        )


def _measure(case: Case, name: str, given: Batch | None, number: int) -> tuple[float, int]:
    """Seconds, and response tokens that were trained on."""
    clock = Clock()
    batch = CONTESTANTS[name](case, case.model(), number, clock, given)
    return clock.seconds, batch.response_tokens


def peak_memory(config: RunConfig, name: str, given: Batch | None) -> int:
    """Return the bytes that a step takes beyond weights, optimizer and batch, in a process that has done nothing
    else."""
    case, meter = Case.of(config), PeakMemory()
    CONTESTANTS[name](case, case.model(), 1, meter, given)
    return meter.extra
