"""How time and memory grow with the work: a training step and the sampling of a batch, by the tiny model."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from scipy import stats
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhelpers.bench.agreement import refuse_unless_done
from rlhelpers.bench.conditions import conditions
from rlhelpers.bench.made_up import MadeUpBatch, make_batch, train
from rlhelpers.bench.memory import PeakMemory, in_own_process
from rlhelpers.bench.rounds import Clock, Spread, in_turns
from rlhelpers.models import can_share, load_policy, make_optimizer
from rlhelpers.rollouts import Rollout, Sampling, TorchEngine
from rlhelpers.tasks import get_prompt, load_task
from rlhelpers.training.config import make_config

ROUNDS = 3
PROMPT_TOKENS = 128  # those of the tiny task have about as many
MICROBATCH = 32  # rows, as in the default run
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Size:
    """Of a batch; the defaults are the default run's.  All responses have `tokens` tokens."""

    responses: int = 128
    tokens: int = 64
    group_size: int = 8


SWEEPS: dict[str, Sequence[int]] = {
    "responses": (16, 32, 64, 128, 256),
    "tokens": (8, 16, 32, 64, 128),
    "group_size": (2, 4, 8, 16, 32),
}
BATCHES = (64, 128, 256, 512, 1024)  # responses, two microbatches and more: over these memory is measured


@dataclass(frozen=True)
class Seconds:
    training: float
    sampling: float


MEASURED = ("training", "sampling")


def bench_growth(
    sweeps: Mapping[str, Sequence[int]] = SWEEPS,
    batches: Sequence[int] = BATCHES,
    size: Size = Size(),
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Measure; returns the report.  `sweeps`: which number of `size` takes which values while the others stay.  Raises
    ValueError where less was done than was asked for."""
    found = conditions()
    policy, tokenizer = load_policy("tiny", "cpu")
    sizes = {replace(size, **{name: value}): None for name, values in sweeps.items() for value in values}
    for one in sizes:  # the warm-up too
        check(one, policy, tokenizer)
    turns = {one: partial(_measure, one, policy, tokenizer) for one in sizes}
    measured = in_turns(turns, rounds)
    extra = {batch: in_own_process(extra_bytes, replace(size, responses=batch)) for batch in batches}
    return report(found, sweeps, size, measured, extra)


def check(size: Size, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError unless all tokens are sampled, and every row is trained on."""
    refuse_unless_done(_sample(size, policy, tokenizer, 0), _prompts(size), _sampling(size, 0), "torch")
    batch = _batch(size, policy)
    _, metadata = _train(batch, policy)
    if metadata["pruned_rows"] or metadata["skipped_update"] or not metadata["grad_norm"] > 0:
        raise ValueError(f"growth: no times, for {size} was not trained on: {metadata}")


def _measure(size: Size, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, number: int) -> Seconds:
    batch = _batch(size, policy)
    with Clock() as training:
        _train(batch, policy)
    with Clock() as sampling:
        _sample(size, policy, tokenizer, number)
    return Seconds(training.seconds, sampling.seconds)


def extra_bytes(size: Size) -> int:
    """What a training step takes beside weights and batch, in this process, which should have done nothing else."""
    policy, _ = load_policy("tiny", "cpu")
    batch = _batch(size, policy)
    can_share(policy)  # which is found out once for a model, and so once in a run
    with PeakMemory() as memory:
        _train(batch, policy)
    return memory.extra


def _batch(size: Size, policy: PreTrainedModel) -> MadeUpBatch:
    groups, prompt = size.responses // size.group_size, (PROMPT_TOKENS, PROMPT_TOKENS)
    return make_batch(policy.config.vocab_size, groups, size.group_size, prompt, (size.tokens, size.tokens))


def _train(batch: MadeUpBatch, policy: PreTrainedModel) -> tuple:
    """With a learning rate that moves nothing, so that every step is the same."""
    optimizer = make_optimizer(policy, make_config(learning_rate=1e-30))
    return train(policy, optimizer, batch, min(MICROBATCH, len(batch.rewards)))


def _sample(size: Size, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[Rollout]:
    return TorchEngine(policy, tokenizer).generate(_prompts(size), _sampling(size, seed))


def _sampling(size: Size, seed: int) -> Sampling:
    return Sampling(n=size.group_size, max_tokens=size.tokens, min_tokens=size.tokens, seed=seed)


def _prompts(size: Size) -> list[str]:
    config = make_config()
    problems = load_task(config.task, config.n_train_examples, 1).train[: size.responses // size.group_size]
    return [get_prompt(config.prompt)(problem.question) for problem in problems]


def report(
    found: Mapping[str, Any],
    sweeps: Mapping[str, Sequence[int]],
    size: Size,
    measured: Mapping[Size, Sequence[Seconds]],
    extra: Mapping[int, int],
) -> dict[str, Any]:
    """Everything that was measured, for a file.  `extra`: bytes, by responses."""
    times = {}
    for name, values in sweeps.items():
        rows = [measured[replace(size, **{name: value})] for value in values]
        curves = {what: _curve(values, [[getattr(m, what) for m in row] for row in rows]) for what in MEASURED}
        times[name] = {"values": list(values), **curves}
    memory = {"values": list(extra), "extra_bytes": list(extra.values())}
    memory["exponent"] = exponent(memory["values"], memory["extra_bytes"])
    fixed = {"size": asdict(size), "prompt_tokens": PROMPT_TOKENS, "microbatch_size": MICROBATCH}
    rounds = len(next(iter(measured.values())))
    return {"conditions": dict(found), **fixed, "rounds": rounds, "times": times, "memory": memory}


def _curve(values: Sequence[int], seconds: Sequence[Sequence[float]]) -> dict[str, Any]:
    spreads = [Spread.of(rows) for rows in seconds]
    return {"seconds": [asdict(s) for s in spreads], "exponent": exponent(values, [s.median for s in spreads])}


def exponent(values: Sequence[float], measured: Sequence[float]) -> dict[str, float]:
    """k of the power law c x^k that fits best in logarithms, with its interval of 95%, which takes the scatter about
    the straight line for chance; `scale` is c."""
    fit = stats.linregress(np.log(values), np.log(measured))
    # Where all are equal there is no scatter, and scipy divides 0 by 0.
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 2) * np.nan_to_num(fit.stderr)
    return {
        "exponent": float(fit.slope),
        "low": float(fit.slope - half),
        "high": float(fit.slope + half),
        "scale": float(np.exp(fit.intercept)),
    }
