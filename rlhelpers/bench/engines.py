"""How fast the rollout engines are on this machine: the same prompts, policy and sampling for all of them."""

import importlib.util
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhelpers import paths
from rlhelpers.bench.agreement import Agreement, agreement, refuse_unless_done, refuse_unless_same
from rlhelpers.bench.conditions import conditions
from rlhelpers.bench.rounds import Clock, Spread, in_turns
from rlhelpers.models import load_policy
from rlhelpers.rollouts import RolloutEngine, Sampling
from rlhelpers.tasks import get_prompt, load_task
from rlhelpers.training.config import make_config
from rlhelpers.training.loop import draw_batch
from rlhelpers.training.sampler import make_engine

ENGINES = ("torch", "vllm", "vllm-server")  # the first that is measured is what the others are compared with
ROUNDS = 5
REST_SECONDS = 1.5  # vLLM's processes look out for work for a second, at the cost of a core each, before they sleep


@dataclass(frozen=True)
class Workload:
    """One call of `generate`, but for the seed."""

    name: str
    prompts: Sequence[str]
    sampling: Sampling


@dataclass(frozen=True)
class Contestant:
    """An engine that has the policy's weights, how long that took from nothing, and how many threads compute in it."""

    engine: RolloutEngine
    startup_seconds: float
    threads: int | None


@dataclass(frozen=True)
class Measurement:
    """One call, and the sync before it.  `cores`: how many were busy, the trainer's waiting and idle engines too."""

    tokens: int
    seconds: float
    cores: float
    sync_seconds: float

    @property
    def speed(self) -> float:
        """Sampled tokens per second."""
        return self.tokens / self.seconds


def bench_engines(engines: Sequence[str] | None = None, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure on the tiny model; returns the report.  `engines` None: those that are installed.

    Raises ValueError for an engine that is not here, and for one that does not sample from the policy.
    """
    names = installed() if engines is None else list(dict.fromkeys(engines))
    rest = REST_SECONDS if set(names) != {"torch"} else 0.0
    policy, tokenizer = load_policy("tiny")
    found = conditions() | {"device": str(policy.device)}
    with ExitStack() as stack:
        contestants = {name: _enter(stack, name, policy, tokenizer) for name in names}
        return compare(found, contestants, default_work(), policy, tokenizer, rounds, rest)


def compare(
    found: Mapping[str, Any],
    contestants: Mapping[str, Contestant],
    work: Sequence[Workload],
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rounds: int,
    rest: float = 0.0,
) -> dict[str, Any]:
    """The report.  All are checked on all of the work, which warms them up too, before the first is measured.  `rest`:
    seconds before each call."""
    agreements, measured = {}, {}
    for workload in work:
        agreements[workload.name] = {
            name: _agree(name, contestant.engine, workload, policy, tokenizer)
            for name, contestant in contestants.items()
        }
    for workload in work:
        turns = {n: partial(_measure, c.engine, workload, policy, rest) for n, c in contestants.items()}
        measured[workload.name] = in_turns(turns, rounds)
    return report(found, work, contestants, agreements, measured)


def installed() -> list[str]:
    return [name for name in ENGINES if name == "torch" or importlib.util.find_spec("vllm")]


def default_work() -> list[Workload]:
    """The default run's first batch and its validation, and the batch again with responses of one length."""
    config = make_config()
    task, prompt = load_task(config.task, config.n_train_examples, config.n_val_examples), get_prompt(config.prompt)
    batch = [prompt(p.question) for p in draw_batch(task.train, 0, config.prompts_per_step, config.seed)]
    validation = [prompt(p.question) for p in task.validation]
    as_trained = Sampling(n=config.group_size, max_tokens=config.max_tokens, stop=prompt.stop)
    fixed = replace(as_trained, min_tokens=config.max_tokens, stop=None)
    return [
        Workload("fixed length", batch, fixed),
        Workload("stop string", batch, as_trained),
        Workload("validation", validation, replace(as_trained, n=1)),
    ]


def _enter(stack: ExitStack, name: str, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Contestant:
    """Start an engine; it ends with the stack."""
    log = paths.RUNS / "bench" / f"{name}.log"
    log.unlink(missing_ok=True)
    with Clock() as clock:
        engine = make_engine(make_config(engine=name), policy, tokenizer, log)
        stack.callback(engine.close)
        engine.sync_weights(policy)
    return Contestant(engine, clock.seconds, torch.get_num_threads() if name == "torch" else vllm_threads(log))


def vllm_threads(log: Path) -> int | None:
    """How many threads vLLM's worker computes with, each bound to a core, as it says itself: it sets OMP_NUM_THREADS
    for its workers, unless VLLM_CPU_OMP_THREADS_BIND is "nobind".  None where neither says."""
    bound = re.findall(r"local_rank=0, core ids=\[([\d, ]+)\]", log.read_text(encoding="utf-8", errors="replace"))
    if bound:
        return len(bound[-1].split(","))
    return int(os.environ["OMP_NUM_THREADS"]) if os.environ.get("OMP_NUM_THREADS", "").isdecimal() else None


def _agree(
    name: str,
    engine: RolloutEngine,
    workload: Workload,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Agreement:
    rollouts = engine.generate(workload.prompts, workload.sampling)
    refuse_unless_done(rollouts, workload.prompts, workload.sampling, name)
    found = agreement(rollouts, workload.sampling, policy, tokenizer)
    refuse_unless_same(found, name, policy.dtype)
    return found


def _measure(
    engine: RolloutEngine, workload: Workload, policy: PreTrainedModel, rest: float, number: int
) -> Measurement:
    """As in a run: every batch follows a sync, so nothing is left in a cache of prompts."""
    time.sleep(rest)
    with Clock() as sync:
        engine.sync_weights(policy)
    with Clock() as clock:
        rollouts = engine.generate(workload.prompts, replace(workload.sampling, seed=number))
    tokens = sum(len(completion.token_ids) for rollout in rollouts for completion in rollout.completions)
    return Measurement(tokens, clock.seconds, clock.cores, sync.seconds)


def report(
    found: Mapping[str, Any],
    work: Sequence[Workload],
    contestants: Mapping[str, Contestant],
    agreements: Mapping[str, Mapping[str, Agreement]],
    measured: Mapping[str, Mapping[str, Sequence[Measurement]]],
) -> dict[str, Any]:
    """Everything that was measured, for a file.  The names that `measured` and `agreements` have in common: workload,
    then engine."""
    engines = {}
    for name, contestant in contestants.items():
        sync = Spread.of([m.sync_seconds for rows in measured.values() for m in rows[name]])
        first = {"startup_seconds": contestant.startup_seconds, "threads": contestant.threads}
        engines[name] = first | {"sync_seconds": asdict(sync)}
    workloads = {
        workload.name: {"prompts": len(workload.prompts), **asdict(workload.sampling)}
        | {"engines": speeds(measured[workload.name], agreements[workload.name])}
        for workload in work
    }
    return {"conditions": dict(found), "engines": engines, "workloads": workloads}


def speeds(
    measured: Mapping[str, Sequence[Measurement]], agreements: Mapping[str, Agreement]
) -> dict[str, dict[str, Any]]:
    """For each engine, of one workload: tokens per second; `ratio` to the first engine, round by round; cores that
    were busy; tokens of each round; and its agreement with the policy."""
    base = next(iter(measured.values()))
    return {
        name: {
            "tokens_per_second": asdict(Spread.of([m.speed for m in rows])),
            "ratio": asdict(Spread.of([m.speed / b.speed for m, b in zip(rows, base, strict=True)])),
            "cores": asdict(Spread.of([m.cores for m in rows])),
            "tokens": [m.tokens for m in rows],
            **asdict(agreements[name]),
        }
        for name, rows in measured.items()
    }
