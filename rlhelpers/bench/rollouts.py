"""The in-process engine against transformers' own `generate`: the same prompts, policy and sampling."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhelpers.bench.agreement import MAX_STANDARD_ERRORS, score
from rlhelpers.bench.case import Case, configuration
from rlhelpers.bench.conditions import conditions
from rlhelpers.bench.engines import Contestant, Workload, compare
from rlhelpers.bench.textbook import GenerateEngine
from rlhelpers.rollouts import Rollout, TorchEngine
from rlhelpers.training.config import RunConfig

RESPONSES = 256
ROUNDS = 5


def bench_rollouts(config: RunConfig | None = None, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure on the tiny model; returns the report, as `bench_engines` does, with `likelihood`: see
    difference_of_likelihood.  Raises ValueError where one of the two does not sample from the policy."""
    found = conditions()
    case = Case.of(config or configuration(rollout_batch_size=RESPONSES))
    threads = torch.get_num_threads()
    engines = {"generate": GenerateEngine, "torch": TorchEngine}
    contestants = {n: Contestant(engine(case.policy, case.tokenizer), 0.0, threads) for n, engine in engines.items()}
    work = workloads(case)
    likelihood = {workload.name: check(workload, contestants, case) for workload in work}
    report = compare(found, contestants, work, case.policy, case.tokenizer, rounds)
    return report | {"likelihood": likelihood}


def workloads(case: Case) -> list[Workload]:
    sampling = case.sampling(1)
    fixed = replace(sampling, min_tokens=sampling.max_tokens, stop=None)
    return [Workload("stop string", case.prompts(1), sampling), Workload("fixed length", case.prompts(1), fixed)]


def check(workload: Workload, contestants: dict[str, Contestant], case: Case) -> float:
    """Raises ValueError where the two give samples of different likelihood."""
    rollouts = [c.engine.generate(workload.prompts, workload.sampling) for c in contestants.values()]
    found = difference_of_likelihood(*rollouts, case.policy, case.tokenizer)
    if not abs(found) <= MAX_STANDARD_ERRORS:
        raise ValueError(
            "rollouts: no speeds, for the log-probs of the two engines' responses differ by "
            f"{found:.1f} standard errors ({workload.name}); accepted are {MAX_STANDARD_ERRORS:.0f}"
        )
    return found


def difference_of_likelihood(
    rollouts: Sequence[Rollout],
    others: Sequence[Rollout],
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> float:
    """In standard errors, the difference of the mean log-prob of a response, as the policy scores both.

    The two have the same prompts, and so the error is that of the differences within prompts.
    """
    means = [_log_likelihood(given, policy, tokenizer).mean(dim=1) for given in (rollouts, others)]
    differences = means[0] - means[1]
    return (differences.mean() / (differences.std() / math.sqrt(len(differences)))).item()


def _log_likelihood(rollouts: Sequence[Rollout], policy, tokenizer) -> Tensor:
    """(prompts, n) float64."""
    token_ids = [(r.prompt_token_ids, c.token_ids) for r in rollouts for c in r.completions]
    log_probs, _ = score(token_ids, policy, tokenizer)
    rows = log_probs.double().split([len(response) for _, response in token_ids])
    return torch.stack([row.sum() for row in rows]).view(len(rollouts), -1)
