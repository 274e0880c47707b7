"""The training step: the package's, the textbook's and TRL's, on the same responses from the same weights."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer
from transformers import PreTrainedModel

from rlhelpers.bench.case import Batch, Case, configuration, difference, installed, refuse_unless_equal
from rlhelpers.bench.conditions import conditions
from rlhelpers.bench.flops import reading
from rlhelpers.bench.memory import PeakMemory, in_own_process
from rlhelpers.bench.rounds import Clock, compare_seconds, in_turns
from rlhelpers.bench.textbook import textbook_step
from rlhelpers.kernels import grpo_train_step
from rlhelpers.models import can_share
from rlhelpers.rollouts import TorchEngine
from rlhelpers.training.config import RunConfig

ROUNDS = 5


def ours(case: Case, model: PreTrainedModel, batch: Batch, meter: AbstractContextManager) -> None:
    """Trains the model; `meter` is entered around the step alone."""
    config, optimizer = case.config, case.optimizer(model)
    can_share(model)  # which is found out once for a model, and so once in a run
    with meter:
        grpo_train_step(
            model,
            case.tokenizer,
            optimizer,
            config.gradient_accumulation_steps,
            config.max_grad_norm,
            case.grader,
            batch.prompts,
            batch.responses,
            batch.ground_truths,
            config.group_size,
            **config.estimator.step_arguments(),
            normalization_constant=config.normalization_constant,
            rollout_token_ids=batch.token_ids,
        )


def textbook(case: Case, model: PreTrainedModel, batch: Batch, meter: AbstractContextManager) -> None:
    optimizer = case.optimizer(model)
    with meter:
        apply_textbook(case, model, optimizer, batch)


def apply_textbook(case: Case, model: PreTrainedModel, optimizer: Optimizer, batch: Batch) -> None:
    config = case.config
    textbook_step(
        model,
        case.tokenizer,
        optimizer,
        batch.token_ids,
        case.rewards(batch),
        config.group_size,
        config.microbatch_size,
        config.normalization_constant,
        config.max_grad_norm,
    )


def trl(case: Case, model: PreTrainedModel, batch: Batch, meter: AbstractContextManager) -> None:
    from rlhelpers.bench.trl_trainer import train

    train(case, model, batch, meter)


Contestant = Callable[[Case, PreTrainedModel, Batch, AbstractContextManager], None]
CONTESTANTS: dict[str, Contestant] = {"rlhelpers": ours, "textbook": textbook, "TRL": trl}


@dataclass(frozen=True)
class Work:
    """`difference` of the update from the textbook's, see case.difference; `tokens_read`: how many went through the
    model forward, padding included."""

    difference: float
    tokens_read: int


def bench_step(config: RunConfig | None = None, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure on the tiny model; returns the report.  Raises ValueError where updates differ."""
    found = conditions()
    case = Case.of(config or configuration())
    batch = sample_batch(case)
    names = installed(CONTESTANTS)
    work = check(case, batch, names)
    turns = {name: partial(_seconds, case, batch, CONTESTANTS[name]) for name in names}
    seconds = in_turns(turns, rounds)
    memory = {name: in_own_process(peak_memory, case.config, batch, name) for name in names}
    return report(found, case, batch, work, seconds, memory)


def sample_batch(case: Case) -> Batch:
    """The responses of the run's first step."""
    rollouts = TorchEngine(case.policy, case.tokenizer).generate(case.prompts(1), case.sampling(1))
    return Batch.of(case.problems(1), rollouts)


def check(case: Case, batch: Batch, names: Sequence[str]) -> dict[str, Work]:
    """What each did; the warm-up too."""
    expected = case.model()
    textbook(case, expected, batch, nullcontext())
    work = {}
    for name in names:
        model = case.model()
        with reading(model) as reads:
            CONTESTANTS[name](case, model, batch, nullcontext())
        tokens = sum(read.tokens for read in reads)
        work[name] = Work(difference(case.update(model), case.update(expected)), tokens)
        refuse_unless_equal(work[name].difference, name)
    return work


def _seconds(case: Case, batch: Batch, contestant: Contestant, number: int) -> float:
    clock = Clock()
    contestant(case, case.model(), batch, clock)
    return clock.seconds


def peak_memory(config: RunConfig, batch: Batch, name: str) -> int:
    """Bytes that a step takes beyond weights, optimizer and batch, in this process, which should have done nothing
    else."""
    case, meter = Case.of(config), PeakMemory()
    CONTESTANTS[name](case, case.model(), batch, meter)
    return meter.extra


def report(
    found: Mapping[str, Any],
    case: Case,
    batch: Batch,
    work: Mapping[str, Work],
    seconds: Mapping[str, Sequence[float]],
    memory: Mapping[str, int],
) -> dict[str, Any]:
    """Everything that was measured, for a file."""
    groups = case.rewards(batch).view(-1, case.config.group_size)
    times = compare_seconds(seconds)
    return {
        "conditions": dict(found),
        "responses": len(batch.responses),
        "group_size": case.config.group_size,
        "response_tokens": batch.response_tokens,
        "without_advantage": int((groups == groups.mean(dim=1, keepdim=True)).sum()),
        "contestants": {n: {**times[n], **asdict(work[n]), "extra_bytes": memory[n]} for n in times},
    }
