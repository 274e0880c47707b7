"""How time and memory grow with the work: a training step and the sampling of a batch, by the tiny model."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from scipy import stats
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhelpers.bench.agreement import refuse_unless_done
from rlhelpers.bench.case import Rows, make_up_rows, package_step
from rlhelpers.bench.measure import MIB, Clock, PeakMemory, Spread, in_own_process, in_turns
from rlhelpers.bench.report import Report, conditions, show
from rlhelpers.evidence.figures import COLOURS, house_style
from rlhelpers.models import can_share, load_policy, make_optimizer
from rlhelpers.rollouts import Sampling, TorchEngine
from rlhelpers.tasks import get_prompt, load_task
from rlhelpers.training.config import make_config

ROUNDS = 3
PROMPT_TOKENS = 128  # those of the tiny task have about as many
MICROBATCH = 32  # rows, as in the default run


@dataclass(frozen=True)
class Size:
    """Of a batch; the defaults are the default run's.  All responses have `tokens` tokens."""

    responses: int = 128
    tokens: int = 64
    group_size: int = 8


SIZE = Size()
SWEEPS = {"responses": (16, 32, 64, 128, 256), "tokens": (8, 16, 32, 64, 128), "group_size": (2, 4, 8, 16, 32)}
BATCHES = (64, 128, 256, 512, 1024)  # responses, two microbatches and more: over these memory is measured
TRAINING, SAMPLING, MEMORY = ("training, s", "sampling, s", "training, MiB")
GROWS = {"responses": "responses", "tokens": "tokens per response", "group_size": "responses per prompt"}
FIXED = {
    "responses": "responses of {tokens} tokens, in groups of {group_size}",
    "tokens": "{responses} responses, in groups of {group_size}",
    "group_size": "{responses} responses of {tokens} tokens",
}
NOTES = [
    "What does not grow stands above.  s: medians of rounds in turns, after a warm-up.  MiB: peak RAM above what the "
    "process held before, each in a process of its own.",
    "exponent: k of c x^k, fitted to all sizes in logarithms; low, high: its 95% interval, which takes the scatter "
    "about the straight line for chance; scale: c.",
]


def bench_growth() -> Report:
    """Measure each number of SIZE at the values in SWEEPS, while the others stay.  Raise ValueError where less was done
    than was asked for."""
    found = conditions()
    policy, tokenizer = load_policy("tiny", "cpu")
    sizes = {replace(SIZE, **{name: value}): None for name, values in SWEEPS.items() for value in values}
    for size in sizes:  # the warm-up too
        check(size, policy, tokenizer)
    measured = in_turns({size: partial(_measure, size, policy, tokenizer) for size in sizes}, ROUNDS)
    extra = {batch: in_own_process(extra_bytes, replace(SIZE, responses=batch)) for batch in BATCHES}
    return report(found, measured, extra)


def check(size: Size, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError unless all tokens are sampled, and every row is trained on."""
    prompts, sampling = _requests(size, 0)
    refuse_unless_done(TorchEngine(policy, tokenizer).generate(prompts, sampling), prompts, sampling, "torch")
    _, metadata = _train(_rows(size, policy), policy)
    if metadata["pruned_rows"] or metadata["skipped_update"] or not metadata["grad_norm"] > 0:
        raise ValueError(f"growth: no times, for {size} was not trained on: {metadata}")


def _measure(size: Size, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, number: int) -> tuple:
    """Seconds of training and of sampling."""
    rows, requests = _rows(size, policy), _requests(size, number)
    with Clock() as training:
        _train(rows, policy)
    with Clock() as sampling:
        TorchEngine(policy, tokenizer).generate(*requests)
    return training.seconds, sampling.seconds


def extra_bytes(size: Size) -> int:
    """Return what a training step takes beside weights and batch, in a process that has done nothing else."""
    policy, _ = load_policy("tiny", "cpu")
    rows = _rows(size, policy)
    can_share(policy)  # found out once for a model, and so once in a run
    with PeakMemory() as memory:
        _train(rows, policy)
    return memory.extra


def _rows(size: Size, policy: PreTrainedModel) -> Rows:
    groups, prompt = size.responses // size.group_size, (PROMPT_TOKENS, PROMPT_TOKENS)
    return make_up_rows(policy.config.vocab_size, groups, size.group_size, prompt, (size.tokens, size.tokens))


def _train(rows: Rows, policy: PreTrainedModel) -> tuple:
    """With a learning rate that moves nothing, so that every step is the same."""
    optimizer = make_optimizer(policy, make_config(learning_rate=1e-30))
    return package_step(policy, 0, optimizer, rows, min(MICROBATCH, len(rows.rewards)), None)


def _requests(size: Size, seed: int) -> tuple[list[str], Sampling]:
    config = make_config()
    problems = load_task(config.task, config.n_train_examples, 1).train[: size.responses // size.group_size]
    prompts = [get_prompt(config.prompt)(problem.question) for problem in problems]
    return prompts, Sampling(n=size.group_size, max_tokens=size.tokens, min_tokens=size.tokens, seed=seed)


def report(found: Mapping, measured: Mapping[Size, Sequence[tuple[float, float]]], extra: Mapping[int, int]) -> Report:
    """Make a row for each curve.  `measured`: seconds of training and sampling, by round; `extra`: bytes, by
    responses."""
    rows = []
    for name, values in SWEEPS.items():
        seconds = [zip(*measured[replace(SIZE, **{name: value})], strict=True) for value in values]
        for what, results in zip((TRAINING, SAMPLING), zip(*seconds, strict=True), strict=True):
            rows.append(_curve(name, what, values, [Spread.of(turns) for turns in results]))
    rows.append(_curve("responses", MEMORY, list(extra), [Spread.of([count / MIB]) for count in extra.values()]))
    rounds = len(next(iter(measured.values())))
    fixed = {"prompt_tokens": PROMPT_TOKENS, "microbatch_size": MICROBATCH, "rounds": rounds}
    return Report("growth", found, asdict(SIZE) | fixed, rows, NOTES)


def _curve(grows: str, measured: str, values: Sequence[int], results: Sequence[Spread]) -> dict[str, Any]:
    row = {"grows": grows, "from": values[0], "to": values[-1], "measured": measured}
    row |= {"at_first": results[0].median, "at_last": results[-1].median}
    row |= exponent(values, [result.median for result in results])
    return row | {"values": list(values), "results": results}


def exponent(values: Sequence[float], measured: Sequence[float]) -> dict[str, float]:
    """Return k of the power law c x^k that fits best in logarithms, its interval of 95%, and c as `scale`."""
    fit = stats.linregress(np.log(values), np.log(measured))
    # Where all are equal there is no scatter, and scipy divides 0 by 0.
    half = stats.t.ppf(0.975, len(values) - 2) * np.nan_to_num(fit.stderr)
    numbers = {"exponent": fit.slope, "low": fit.slope - half, "high": fit.slope + half, "scale": np.exp(fit.intercept)}
    return {name: float(number) for name, number in numbers.items()}


def draw(report: Report) -> Figure:
    """Draw seconds against each number that grows, and memory; all axes logarithmic."""
    panels = [(name, [r for r in report.rows if r["grows"] == name and r["measured"] != MEMORY]) for name in GROWS]
    panels.append(("responses", [row for row in report.rows if row["measured"] == MEMORY]))
    with house_style():
        figure, all_axes = plt.subplots(2, 2, figsize=(10, 7))
        for axes, (name, rows) in zip(all_axes.flat, panels, strict=True):
            for row, colour in zip(rows, COLOURS, strict=False):
                _draw_curve(axes, row, colour)
            axes.set(title=FIXED[name].format(**report.settings), xlabel=GROWS[name], ylabel="seconds")
            _logarithmic(axes, rows[0]["values"])
        last = all_axes.flat[-1]
        last.set(title=f"{last.get_title()}, {report.settings['microbatch_size']} rows at a time")
        last.set(ylabel="MiB above what was held before")
        figure.suptitle("What a step takes: the tiny model, measured, with the power law that fits best")
    return figure


def _draw_curve(axes: Axes, row: Mapping[str, Any], colour: str) -> None:
    values, label = np.array(row["values"], dtype=float), f"{row['measured'].partition(',')[0]}: exponent "
    medians, low, high = np.array([(r.median, r.low, r.high) for r in row["results"]]).T
    label += show(Spread(row["exponent"], row["low"], row["high"]))
    axes.plot(values, row["scale"] * values ** row["exponent"], color=colour, alpha=0.5, label=label)
    axes.errorbar(values, medians, (medians - low, high - medians), fmt="o", color=colour, capsize=3)


def _logarithmic(axes: Axes, values: Sequence[int]) -> None:
    """Both axes, with ticks at what was measured, and numbers that are no powers."""
    axes.set(xscale="log", yscale="log", xticks=values)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.5, high * 2.5)  # room for the legend, and a curve that hardly grows stays flat
    axes.legend(fontsize="small", loc="upper left")
