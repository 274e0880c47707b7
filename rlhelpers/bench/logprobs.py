"""Log-probs over a large vocabulary, forward and backward: logits in chunks of words, against all at once."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from rlhelpers.bench.measure import MIB, Clock, PeakMemory, Spread, compare_seconds, in_own_process, in_turns
from rlhelpers.bench.report import Report, conditions
from rlhelpers.kernels.fused_logprobs import log_probs_and_entropy
from rlhelpers.kernels.logprobs import log_probs_from_logits

ROUNDS = 2
# Of the largest number, in each of log-probs, entropies and gradients.  Two bfloat16 next to each other differ by 2^-7,
# so that two results that are both right may do so too.
LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}
NOTES = [
    "Forward and backward, each time in a process of its own; the inputs were there before.",
    "beyond gradients: without those of hidden states and weight, which both hand back.",
    "differences: the largest in each result, divided by the largest number in it.",
]


@dataclass(frozen=True)
class Work:
    """Random hidden states, weights and labels."""

    dtype: str
    tokens: int = 8 * 512
    hidden: int = 2048
    vocabulary: int = 100_352

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states (tokens, hidden) and weight (vocabulary, hidden), for which gradients are wanted, and labels
        (tokens,)."""
        generator, dtype = torch.Generator().manual_seed(0), getattr(torch, self.dtype)
        hidden = torch.empty(self.tokens, self.hidden, dtype=dtype).normal_(generator=generator)
        weight = torch.empty(self.vocabulary, self.hidden, dtype=dtype)
        # Logits of standard deviation 2 make probabilities of all sizes; at 4, torch's own log_softmax of so many words
        # is wrong by up to 2e-5 in float32 on a CPU.
        weight.normal_(std=2 / self.hidden**0.5, generator=generator)
        labels = torch.randint(self.vocabulary, (self.tokens,), generator=generator)
        return hidden.requires_grad_(), weight.requires_grad_(), labels

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients that both hand back."""
        return (self.tokens + self.vocabulary) * self.hidden * getattr(torch, self.dtype).itemsize


def all_at_once(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """As get_response_log_probs does it without a mask."""
    result = log_probs_from_logits(linear(hidden, weight), labels, return_token_entropy=True)
    return result["log_probs"], result["token_entropy"]


def in_chunks(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return log_probs_and_entropy(hidden, weight, None, labels)


CONTESTANTS = {"all logits": all_at_once, "in chunks": in_chunks}
WORKS = [Work(dtype) for dtype in LIMITS]
Measurement = tuple[float, int]
"""Seconds, and bytes of RAM at the peak beyond the inputs; the gradients are in it."""


def bench_logprobs(rounds: int = ROUNDS) -> Report:
    """Measure each dtype, each time in a process of its own.  Raise ValueError where the first results differ."""
    found = conditions()
    return report(found, [(work, *_bench(work, rounds)) for work in WORKS])


def _bench(work: Work, rounds: int) -> tuple[dict[str, float], dict[str, list[Measurement]]]:
    """Differences of the first round's results, and measurements."""
    with tempfile.TemporaryDirectory(prefix="rlhelpers-bench-") as folder:
        files = {name: Path(folder) / name for name in CONTESTANTS}
        first = in_turns({name: partial(in_own_process, measure, name, work, file) for name, file in files.items()}, 1)
        differences = compare(*(torch.load(file, mmap=True, weights_only=True) for file in files.values()))
        refuse_unless_same(differences, work.dtype)
    more = in_turns({name: partial(in_own_process, measure, name, work, None) for name in CONTESTANTS}, rounds - 1)
    return differences, {name: first[name] + more[name] for name in CONTESTANTS}


def measure(name: str, work: Work, file: Path | None, number: int = 1) -> Measurement:
    """Go forward and backward once, in a process that has done nothing else.  The results go to the file."""
    hidden, weight, labels = work.inputs()
    slopes = torch.linspace(-1, 1, work.tokens)  # in the place of advantages
    with PeakMemory() as memory, Clock() as clock:
        log_probs, entropy = CONTESTANTS[name](hidden, weight, labels)
        (log_probs * slopes).sum().backward()
    if file is not None:
        results = {"log-probs": log_probs.detach(), "entropies": entropy}
        torch.save(results | {"hidden gradient": hidden.grad, "weight gradient": weight.grad}, file)
    return clock.seconds, memory.extra


def compare(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest difference in each result, divided by the largest number in it."""
    return {name: ((got[name] - x).abs().max() / x.abs().max()).item() for name, x in expected.items()}


def refuse_unless_same(differences: Mapping[str, float], dtype: str) -> None:
    """Raise ValueError naming the result in which the two differ by more than LIMITS."""
    for name, found in differences.items():
        if not found <= LIMITS[dtype]:
            raise ValueError(
                f"logprobs: no speeds, for in {dtype} the {name} differ by {found:.3g} of the largest; accepted is up "
                f"to {LIMITS[dtype]}"
            )


def report(found: Mapping, works: Sequence[tuple[Work, dict[str, float], Mapping[str, list[Measurement]]]]) -> Report:
    """Make a row for each dtype and contestant.  `works`: with their differences and measurements."""
    settings, rows = {}, []
    for work, differences, measured in works:
        gradients = work.gradient_bytes / MIB
        settings[work.dtype] = asdict(work) | {"gradient_MiB": gradients, "differences": differences}
        times = compare_seconds({name: [seconds for seconds, _ in turns] for name, turns in measured.items()})
        extra = {name: Spread.of([extra / MIB for _, extra in turns]) for name, turns in measured.items()}
        base, *_ = (spread.median for spread in extra.values())
        for name, spread in extra.items():
            beyond = spread.median - gradients
            row = {"dtype": work.dtype, "log-probs": name, **times[name], "extra_MiB": spread}
            row |= {"times_less": _ratio(base, spread.median), "beyond_gradients_MiB": beyond}
            rows.append(row | {"times_less_beyond": _ratio(base - gradients, beyond)})
    return Report("logprobs", found, settings | {"rounds": len(next(iter(measured.values())))}, rows, NOTES)


def _ratio(base: float, extra: float) -> float:
    """At sizes of a few bytes the system hands out no new memory at all."""
    return base / max(extra, 1 / MIB)
