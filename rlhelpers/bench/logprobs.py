"""Log-probs over a large vocabulary, forward and backward: the logits of a chunk of words at a time against all at
once."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from rlhelpers.bench.conditions import conditions
from rlhelpers.bench.memory import PeakMemory, in_own_process
from rlhelpers.bench.rounds import Clock, Spread, compare_seconds, in_turns
from rlhelpers.kernels.fused_logprobs import log_probs_and_entropy
from rlhelpers.kernels.logprobs import log_probs_from_logits

ROUNDS = 2
TOKENS = 8 * 512
# Of the largest number, in each of log-probs, entropies and gradients.  Two bfloat16 next to each other differ by 2^-7,
# so that two results that are both right may do so too.
LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Work:
    """Random hidden states, weights and labels.  Logits have standard deviation 2, so that probabilities are of all
    sizes; at 4, torch's own log_softmax of so many words is wrong by up to 2e-5 in float32 on a CPU."""

    dtype: str
    tokens: int = TOKENS
    hidden: int = 2048
    vocabulary: int = 100_352

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states (tokens, hidden) and weight (vocabulary, hidden), for which gradients are wanted, and labels
        (tokens,)."""
        generator, dtype = torch.Generator().manual_seed(0), getattr(torch, self.dtype)
        hidden = torch.empty(self.tokens, self.hidden, dtype=dtype).normal_(generator=generator)
        weight = torch.empty(self.vocabulary, self.hidden, dtype=dtype)
        weight.normal_(std=2 / self.hidden**0.5, generator=generator)
        labels = torch.randint(self.vocabulary, (self.tokens,), generator=generator)
        return hidden.requires_grad_(), weight.requires_grad_(), labels

    @property
    def gradient_bytes(self) -> int:
        """Of what both hand back."""
        return (self.tokens + self.vocabulary) * self.hidden * getattr(torch, self.dtype).itemsize


def all_at_once(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """As get_response_log_probs does it without a mask."""
    result = log_probs_from_logits(linear(hidden, weight), labels, return_token_entropy=True)
    return result["log_probs"], result["token_entropy"]


def in_chunks(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return log_probs_and_entropy(hidden, weight, None, labels)


CONTESTANTS = {"all logits": all_at_once, "in chunks": in_chunks}


@dataclass(frozen=True)
class Measurement:
    """`extra_bytes` of RAM at the peak beyond the inputs; the gradients are in it."""

    seconds: float
    extra_bytes: int


def bench_logprobs(
    dtypes: Sequence[str] = tuple(LIMITS), tokens: int = TOKENS, rounds: int = ROUNDS, **sizes: int
) -> dict[str, Any]:
    """Measure, each time in a process of its own; returns the report.  `sizes`: `hidden` and `vocabulary`.

    Raises ValueError where the results of the first round differ.
    """
    found = conditions()
    return report(found, [_bench(Work(dtype, tokens, **sizes), rounds) for dtype in dtypes])


def _bench(work: Work, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rlhelpers-bench-") as folder:
        files = {name: Path(folder) / name for name in CONTESTANTS}
        first = in_turns({name: partial(_turn, name, work, file) for name, file in files.items()}, 1)
        differences = compare(*(torch.load(file, mmap=True, weights_only=True) for file in files.values()))
        refuse_unless_same(differences, work.dtype)
    more = in_turns({name: partial(_turn, name, work, None) for name in CONTESTANTS}, rounds - 1)
    return summary(work, differences, {name: first[name] + more[name] for name in CONTESTANTS})


def _turn(name: str, work: Work, file: Path | None, number: int) -> Measurement:
    return in_own_process(measure, name, work, file)


def measure(name: str, work: Work, file: Path | None) -> Measurement:
    """Forward and backward, once; in a process that has done nothing else.  The results go to the file."""
    hidden, weight, labels = work.inputs()
    slopes = torch.linspace(-1, 1, work.tokens)  # in the place of advantages
    with PeakMemory() as memory, Clock() as clock:
        log_probs, entropy = CONTESTANTS[name](hidden, weight, labels)
        (log_probs * slopes).sum().backward()
    if file is not None:
        results = {"log-probs": log_probs.detach(), "entropies": entropy}
        torch.save(results | {"hidden gradient": hidden.grad, "weight gradient": weight.grad}, file)
    return Measurement(clock.seconds, memory.extra)


def compare(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest difference in each result, divided by the largest number in it."""
    return {name: ((got[name] - x).abs().max() / x.abs().max()).item() for name, x in expected.items()}


def refuse_unless_same(differences: Mapping[str, float], dtype: str) -> None:
    """Raises ValueError naming the result in which the two differ by more than LIMITS."""
    for name, found in differences.items():
        if not found <= LIMITS[dtype]:
            raise ValueError(
                f"logprobs: no speeds, for in {dtype} the {name} differ by {found:.3g} of the largest; accepted is up "
                f"to {LIMITS[dtype]}"
            )


def summary(
    work: Work, differences: Mapping[str, float], measured: Mapping[str, Sequence[Measurement]]
) -> dict[str, Any]:
    """Of one dtype.  `memory_ratio`: extra memory of the first by that of the contestant, above 1 where it takes less,
    with the gradients, which all hand back; `beyond_ratio`: without them."""
    times = compare_seconds({name: [m.seconds for m in rows] for name, rows in measured.items()})
    extra = {name: Spread.of([m.extra_bytes for m in rows]) for name, rows in measured.items()}
    base, handed_back = next(iter(extra.values())).median, work.gradient_bytes
    contestants = {
        name: times[name]
        | {
            "extra_bytes": asdict(extra[name]),
            "memory_ratio": _ratio(base, extra[name].median),
            "beyond_ratio": _ratio(base - handed_back, extra[name].median - handed_back),
        }
        for name in measured
    }
    return asdict(work) | {
        "gradient_bytes": work.gradient_bytes,
        "differences": dict(differences),
        "contestants": contestants,
    }


def _ratio(base: float, extra: float) -> float:
    """At sizes of a few bytes the system hands out no new memory at all."""
    return base / max(extra, 1)


def report(found: Mapping[str, Any], works: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything that was measured, for a file."""
    return {"conditions": dict(found), "works": list(works)}
