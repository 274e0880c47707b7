"""What every rollout engine takes and gives, and whether what it gave can have been sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Literal, Protocol

from rlhelpers.checks import check_texts, refused

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROBE = "Question: what is 17 + 25?\nAnswer:"  # the prompt used to verify the engine's weights
CHANCE_OF_COPIES = 1e-12  # a group of copies less likely than this shares a seed


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    `n`: completions per prompt.  `temperature`: 0 is greedy.  `top_p`: the smallest set of tokens with at least that
    probability is kept.  A completion ends at an end-of-text token, after `stop` (which the text keeps), or at
    `max_tokens`; the first two do not count before `min_tokens`.  `seed` decides everything random.

    Raises ValueError naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 64
    min_tokens: int = 0
    stop: str | None = None
    seed: int = 0

    def __post_init__(self):
        checks = {
            "n": (int, lambda n: n >= 1, "a whole number of at least 1"),
            "temperature": (Real, lambda t: t == 0 or 0.01 <= t <= 100, "0 or a number from 0.01 to 100"),
            "top_p": (Real, lambda p: 0 < p <= 1, "a number above 0 and at most 1"),
            "max_tokens": (int, lambda n: n >= 1, "a whole number of at least 1"),
            "min_tokens": (int, lambda n: 0 <= n <= self.max_tokens, "a whole number from 0 to max_tokens"),
            "stop": (str | None, lambda s: s != "", "None or a string that is not empty"),
            "seed": (int, lambda s: 0 <= s < 2**63, "a whole number from 0 to 2^63 - 1"),
        }
        for name, (kind, fits, accepted) in checks.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
                raise refused(name, value, accepted)


@dataclass(frozen=True)
class Completion:
    """One sample.

    `text` ends with the stop string where that ended it, and never shows the end-of-text token.  `token_ids` are
    exactly what was sampled, end-of-text included.  `log_probs`: one per token, under the whole distribution at the
    sampling temperature (at 1 where that is 0), before top_p and min_tokens.
    """

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    log_probs: list[float]


@dataclass(frozen=True)
class Rollout:
    """A prompt, the token ids that the engine read for it, and its G completions."""

    prompt: str
    prompt_token_ids: list[int]
    completions: list[Completion]


class EngineDeadError(RuntimeError):
    """The engine is gone, and its unfinished samples too; `restart` and `sync_weights` bring it back."""


class RolloutEngine(Protocol):
    """Samples from the policy whose weights it was given last.

    An engine in another process may raise EngineDeadError from every method.
    """

    def generate(self, prompts: Sequence[str], sampling: Sampling) -> list[Rollout]:
        """Return `sampling.n` completions for each prompt, in the order of the prompts.

        The same call gives the same samples.  No two rows share random numbers, even if their prompts are equal.
        """
        ...

    def sync_weights(self, policy: PreTrainedModel) -> None:
        """Sample from these weights from now on; forget keys and values of the old ones."""
        ...

    def sleep(self) -> None:
        """Free what memory can be freed; nothing is sampled before the next sync_weights."""
        ...

    def restart(self) -> None:
        """Start again after EngineDeadError, without weights."""
        ...

    def close(self) -> None:
        """Free everything.  Safe to call twice."""
        ...


def end_of_text_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return all ids that end a text: those of the model's generation config and the tokenizer's own."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_tokens: int, context: int
) -> list[list[int]]:
    """Return the ids of each prompt: those that the trainer scores and every engine reads.

    Raises ValueError for an empty prompt, and for one that leaves no room for max_tokens in the context.
    """
    check_texts(prompts=prompts)
    prompt_ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    for i, ids in enumerate(prompt_ids):
        if not ids:
            raise ValueError(f"prompts: prompt {i} is empty; accepted is a text of at least one token")
        if len(ids) + max_tokens > context:
            raise ValueError(
                f"prompts: prompt {i} has {len(ids)} tokens; with max_tokens={max_tokens} "
                f"it must fit the model's context of {context}"
            )
    return prompt_ids


def inspect_rollouts(rollouts: Sequence[Rollout], prompts: Sequence[str], sampling: Sampling, vocabulary: int) -> None:
    """Raise RuntimeError naming the first rollout that this call cannot have sampled.

    Training on it would go wrong quietly: a group is too small, a token is unknown to the policy, a log-prob is not
    finite, or a group is one sample in n copies, whose advantages are all zero.  `vocabulary`: the policy's number of
    tokens.  It is no EngineDeadError, because a restart would hide the fault.
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
    """Return the probability of drawing the first completion n - 1 times again; 1 where the completions differ."""
    first, *others = completions
    # Else the log-probs are not those of the draw.
    is_draw = sampling.temperature > 0 and sampling.top_p == 1 and sampling.min_tokens == 0
    if not is_draw or any(other.token_ids != first.token_ids for other in others):
        return 1.0
    return math.exp(min(0.0, len(others) * sum(first.log_probs)))
