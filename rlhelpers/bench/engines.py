"""Rollout engines side by side: the same prompts, policy and sampling for all of them."""

import importlib.util
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlhelpers import paths
from rlhelpers.bench.agreement import agreement, refuse_unless_done, refuse_unless_same
from rlhelpers.bench.case import Case, configuration
from rlhelpers.bench.commands import ENGINES
from rlhelpers.bench.measure import Clock, Spread, in_turns
from rlhelpers.bench.report import Report, conditions
from rlhelpers.bench.textbook import GenerateEngine
from rlhelpers.rollouts import RolloutEngine, Sampling, TorchEngine
from rlhelpers.training.config import make_config
from rlhelpers.training.sampler import make_engine

ROUNDS = 5
REST_SECONDS = 1.5  # vLLM's processes look out for work for a second, at the cost of a core each, before they sleep
RESPONSES = 256  # of bench_rollouts
NOTES = [
    "threads: those that compute; vLLM's other processes (server, scheduler) come on top.",
    "startup seconds: the first sync is in it; of the first vLLM engine also the import of vllm by the trainer.",
]


class Workload(NamedTuple):
    """One call of `generate`, but for the seed."""

    name: str
    prompts: Sequence[str]
    sampling: Sampling


class Measurement(NamedTuple):
    """One call, and the sync before it."""

    tokens: int
    seconds: float
    cores: float
    sync_seconds: float


def bench_engines(engines: Sequence[str] | None = None, rounds: int = ROUNDS) -> Report:
    """Measure the package's engines on the tiny model.  `engines` None: those that are installed.

    Raise ValueError for an engine that is not here, and for one that does not sample from the policy.
    """
    here = [name for name in ENGINES if name == "torch" or importlib.util.find_spec("vllm")]
    names = list(dict.fromkeys(engines or here))
    case = Case.of(make_config(experiment="bench"))
    found = conditions() | {"device": str(case.policy.device)}
    with ExitStack() as stack:
        started = {name: _start(stack, name, case) for name in names}
        work, rest = workloads(case), 0.0 if names == ["torch"] else REST_SECONDS
        measured, agreements = compare({n: engine for n, (engine, _) in started.items()}, work, case, rounds, rest)
    lives = {name: life for name, (_, life) in started.items()}
    return report("engines", found, work, measured, agreements, lives)


def bench_rollouts(rounds: int = ROUNDS) -> Report:
    """Measure the in-process engine against transformers' `generate` on the tiny model.  Raise ValueError where one of
    the two does not sample from the policy."""
    found, case = conditions(), Case.of(configuration(rollout_batch_size=RESPONSES))
    engines = {"generate": GenerateEngine, "torch": TorchEngine}
    engines = {name: engine(case.policy, case.tokenizer) for name, engine in engines.items()}
    work = workloads(case)[:2]
    return report("rollouts", found, work, *compare(engines, work, case, rounds), {})


def workloads(case: Case) -> list[Workload]:
    """Return the run's first batch, with responses of one length and as trained, and its validation."""
    as_trained = replace(case.sampling(1), seed=0)
    fixed = replace(as_trained, min_tokens=as_trained.max_tokens, stop=None)
    validation = [case.grader.prompt(problem.question) for problem in case.task.validation]
    return [
        Workload("fixed length", case.prompts(1), fixed),
        Workload("stop string", case.prompts(1), as_trained),
        Workload("validation", validation, replace(as_trained, n=1)),
    ]


def _start(stack: ExitStack, name: str, case: Case) -> tuple[RolloutEngine, dict[str, Any]]:
    """Start an engine, which ends with the stack; return it and what was seen."""
    log = paths.RUNS / "bench" / f"{name}.log"
    log.unlink(missing_ok=True)
    with Clock() as clock:
        engine = make_engine(make_config(engine=name), case.policy, case.tokenizer, log)
        stack.callback(engine.close)
        engine.sync_weights(case.policy)
    threads = torch.get_num_threads() if name == "torch" else vllm_threads(log)
    return engine, {"threads": threads, "startup_seconds": clock.seconds}


def vllm_threads(log: Path) -> int | None:
    """Return how many threads vLLM's worker computes with, each bound to a core, as its log says.  It sets
    OMP_NUM_THREADS for its workers, unless VLLM_CPU_OMP_THREADS_BIND is "nobind".  None where neither says."""
    bound = re.findall(r"local_rank=0, core ids=\[([\d, ]+)\]", log.read_text(encoding="utf-8", errors="replace"))
    if bound:
        return len(bound[-1].split(","))
    return int(os.environ["OMP_NUM_THREADS"]) if os.environ.get("OMP_NUM_THREADS", "").isdecimal() else None


def compare(
    engines: Mapping[str, RolloutEngine], work: Sequence[Workload], case: Case, rounds: int, rest: float = 0.0
) -> tuple[dict, dict]:
    """Check all engines on all of the work, which warms them up; then measure.  `rest`: seconds before each call.

    Return the measurements and the agreements, each by workload and engine.
    """
    agreements = {load.name: {n: check(n, engine, load, case) for n, engine in engines.items()} for load in work}
    measured = {}
    for load in work:
        turns = {n: partial(_measure, engine, load, case, rest) for n, engine in engines.items()}
        measured[load.name] = in_turns(turns, rounds)
    return measured, agreements


def check(name: str, engine: RolloutEngine, load: Workload, case: Case) -> dict[str, float | None]:
    """Return the agreement with the policy; raise ValueError where there is none."""
    rollouts = engine.generate(load.prompts, load.sampling)
    refuse_unless_done(rollouts, load.prompts, load.sampling, name)
    found = agreement(rollouts, load.sampling, case.policy, case.tokenizer)
    refuse_unless_same(found, name, case.policy.dtype)
    return found


def _measure(engine: RolloutEngine, load: Workload, case: Case, rest: float, number: int) -> Measurement:
    """As in a run, every batch follows a sync, so that nothing is left in a cache of prompts."""
    time.sleep(rest)
    with Clock() as sync:
        engine.sync_weights(case.policy)
    with Clock() as clock:
        rollouts = engine.generate(load.prompts, replace(load.sampling, seed=number))
    tokens = sum(len(completion.token_ids) for rollout in rollouts for completion in rollout.completions)
    return Measurement(tokens, clock.seconds, clock.cores, sync.seconds)


def report(
    name: str, found: Mapping, work: Sequence[Workload], measured: Mapping, agreements: Mapping, lives: Mapping
) -> Report:
    """Make a row for each workload and engine, and one for the life of each engine."""
    rows = []
    for load, by_engine in measured.items():
        speeds = {engine: [m.tokens / m.seconds for m in turns] for engine, turns in by_engine.items()}
        base = next(iter(speeds.values()))
        for engine, turns in by_engine.items():
            row = {"workload": load, "engine": engine, "tokens_per_second": Spread.of(speeds[engine])}
            row |= {"speed_ratio": Spread.of_ratios(speeds[engine], base), "cores": Spread.of([m.cores for m in turns])}
            rows.append(row | {"tokens": [m.tokens for m in turns]} | agreements[load][engine])
    for engine, life in lives.items():
        sync = Spread.of([m.sync_seconds for by_engine in measured.values() for m in by_engine[engine]])
        rows.append({"engine": engine, **life, "sync_seconds": sync})
    settings = {load.name: {"prompts": len(load.prompts), **asdict(load.sampling)} for load in work}
    return Report(name, found, settings | {"rounds": len(turns)}, rows, NOTES if lives else [])
