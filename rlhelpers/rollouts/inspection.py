"""Whether an engine's rollouts can be what it was asked for.

What is wrong here would train on quietly: a group that is too small, a token that the policy does not know, a log-prob
that is no number, or one sample in n copies, whose advantages are all zero.
"""

import math
from collections.abc import Sequence

from rlhelpers.rollouts.engine import Completion, Rollout, Sampling

PROBE = "Question: what is 17 + 25?\nAnswer:"  # what an engine is asked to see that it has the policy it should have
CHANCE_OF_COPIES = 1e-12


def inspect_rollouts(rollouts: Sequence[Rollout], prompts: Sequence[str], sampling: Sampling, vocabulary: int) -> None:
    """Raise RuntimeError naming the first thing that is wrong.  `vocabulary`: how many tokens the policy knows.

    It is no EngineDeadError: to start the engine again would hide the fault.
    """
    if [rollout.prompt for rollout in rollouts] != list(prompts):
        raise RuntimeError(f"engine: it gave {len(rollouts)} rollouts, and not one for each of {len(prompts)} prompts")
    for i, rollout in enumerate(rollouts):
        count = len(rollout.completions)
        problems = [problem for c in rollout.completions if (problem := _problem(c, sampling, vocabulary))]
        if count != sampling.n:
            problems.append(f"it has {count} completions; wanted are n={sampling.n}")
        elif not problems and _chance_of_copies(rollout.completions, sampling) < CHANCE_OF_COPIES:
            problems.append(f"its {count} completions are all the same, which is no chance: they share a seed")
        if problems:
            raise RuntimeError(f"engine: prompt {i} of {len(prompts)}: {problems[0]}")


def _problem(completion: Completion, sampling: Sampling, vocabulary: int) -> str | None:
    ids, log_probs = completion.token_ids, completion.log_probs
    if not 1 <= len(ids) <= sampling.max_tokens:
        return f"a completion has {len(ids)} tokens; wanted are 1 to max_tokens={sampling.max_tokens}"
    if len(log_probs) != len(ids):
        return f"a completion has {len(log_probs)} log-probs for {len(ids)} tokens"
    for token, log_prob in zip(ids, log_probs, strict=True):
        if not 0 <= token < vocabulary:
            return f"a completion holds token {token}; the policy knows those from 0 to {vocabulary - 1}"
        if not math.isfinite(log_prob):
            return f"token {token} has the log-prob {log_prob}; wanted are finite numbers"
    return None


def _chance_of_copies(completions: Sequence[Completion], sampling: Sampling) -> float:
    """That of drawing the first completion again and again; 1 where they differ, or where the log-probs are not those
    of the draw: at temperature 0, with top_p, and with min_tokens."""
    first, *others = completions
    is_draw = sampling.temperature > 0 and sampling.top_p == 1 and sampling.min_tokens == 0
    if not is_draw or any(other.token_ids != first.token_ids for other in others):
        return 1.0
    return math.exp(min(0.0, len(others) * sum(first.log_probs)))
