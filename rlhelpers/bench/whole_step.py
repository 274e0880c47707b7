"""A whole step, from problems to updated weights: the run's own, TRL's, and a plain loop on `generate`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

from transformers import PreTrainedModel

from rlhelpers.bench import step
from rlhelpers.bench.agreement import refuse_unless_unbiased, sampling_bias, score
from rlhelpers.bench.case import Batch, Case, configuration, difference, installed, refuse_unless_equal
from rlhelpers.bench.conditions import conditions
from rlhelpers.bench.memory import PeakMemory, in_own_process
from rlhelpers.bench.rounds import Clock, compare_seconds, in_turns
from rlhelpers.bench.textbook import GenerateEngine
from rlhelpers.models import can_share
from rlhelpers.rollouts import TorchEngine
from rlhelpers.training.config import RunConfig
from rlhelpers.training.loop import Run

ROUNDS = 5


class _Recorder(TorchEngine):
    def generate(self, prompts, sampling):
        self.rollouts = super().generate(prompts, sampling)
        return self.rollouts


def ours(case: Case, model: PreTrainedModel, number: int, meter: AbstractContextManager) -> Batch:
    """Step `number` of a run, all that a run does in it but validation; returns what it sampled and trained on.
    `meter` is entered around the step alone."""
    engine = _Recorder(model, case.tokenizer)
    run = Run(case.config, case.task, model, case.tokenizer, engine)
    run.updates.optimizer, run.grader = case.optimizer(model), case.grader
    run.updates.grader = case.grader
    can_share(model)  # which is found out once for a model, and so once in a run
    with meter:
        run.step(number)
    return Batch.of(case.problems(number), engine.rollouts)


def plain(case: Case, model: PreTrainedModel, number: int, meter: AbstractContextManager) -> Batch:
    engine, optimizer = GenerateEngine(model, case.tokenizer), case.optimizer(model)
    with meter:
        rollouts = engine.generate(case.prompts(number), case.sampling(number))
        batch = Batch.of(case.problems(number), rollouts)
        step.apply_textbook(case, model, optimizer, batch)
    return batch


def trl(case: Case, model: PreTrainedModel, number: int, meter: AbstractContextManager) -> Batch:
    from rlhelpers.bench.trl_trainer import sample_and_train

    return sample_and_train(case, model, number, meter)


Contestant = Callable[[Case, PreTrainedModel, int, AbstractContextManager], Batch]
CONTESTANTS: dict[str, Contestant] = {"rlhelpers": ours, "plain loop": plain, "TRL": trl}


@dataclass(frozen=True)
class Work:
    """`difference` of the update from what the textbook's step makes of the same samples, see case.difference; `bias`
    of the samples, see agreement.Agreement."""

    difference: float
    bias: float


def bench_whole_step(config: RunConfig | None = None, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure on the tiny model; returns the report.  Raises ValueError where samples are not the policy's, or an
    update is not the textbook's."""
    found = conditions()
    case = Case.of(config or configuration())
    names = installed(CONTESTANTS)
    work = {name: check(case, name) for name in names}
    turns = {name: partial(_measure, case, CONTESTANTS[name]) for name in names}
    measured = in_turns(turns, rounds)
    memory = {name: in_own_process(peak_memory, case.config, name) for name in names}
    return report(found, case, work, measured, memory)


def check(case: Case, name: str) -> Work:
    """One step, which is the warm-up too."""
    model, expected = case.model(), case.model()
    batch = CONTESTANTS[name](case, model, 1, nullcontext())
    _refuse_unless_done(case, batch, name)
    bias = sampling_bias(*score(batch.token_ids, case.policy, case.tokenizer))
    refuse_unless_unbiased(bias, name)
    step.textbook(case, expected, batch, nullcontext())
    found = difference(case.update(model), case.update(expected))
    refuse_unless_equal(found, name)
    return Work(found, bias)


def _refuse_unless_done(case: Case, batch: Batch, name: str) -> None:
    config = case.config
    repeated = [prompt for prompt in case.prompts(1) for _ in range(config.group_size)]
    lengths = [len(response) for _, response in batch.token_ids]
    if batch.prompts != repeated or not all(1 <= length <= config.max_tokens for length in lengths):
        raise ValueError(
            f"step: no speeds, for {name} trained on {len(lengths)} responses of {min(lengths)} to {max(lengths)} "
            f"tokens; accepted are {config.group_size} to each prompt, of 1 to {config.max_tokens} tokens"
        )


def _measure(case: Case, contestant: Contestant, number: int) -> tuple[float, int]:
    """Seconds, and the tokens that were sampled."""
    clock = Clock()
    batch = contestant(case, case.model(), number, clock)
    return clock.seconds, batch.response_tokens


def peak_memory(config: RunConfig, name: str) -> int:
    """As step.peak_memory, of a whole step."""
    case, meter = Case.of(config), PeakMemory()
    CONTESTANTS[name](case, case.model(), 1, meter)
    return meter.extra


def report(
    found: Mapping[str, Any],
    case: Case,
    work: Mapping[str, Work],
    measured: Mapping[str, Sequence[tuple[float, int]]],
    memory: Mapping[str, int],
) -> dict[str, Any]:
    """Everything that was measured, for a file."""
    times = compare_seconds({name: [seconds for seconds, _ in rows] for name, rows in measured.items()})
    responses = case.config.rollout_batch_size
    lengths = {name: fmean(tokens for _, tokens in rows) / responses for name, rows in measured.items()}
    return {
        "conditions": dict(found),
        "responses": responses,
        "group_size": case.config.group_size,
        "contestants": {
            name: {**times[name], **asdict(work[name]), "response_length": lengths[name], "extra_bytes": memory[name]}
            for name in times
        },
    }
