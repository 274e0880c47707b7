"""The reports as pictures."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from rlhelpers.evidence.figures import COLOURS, house_style

GROWS = {"responses": "responses", "tokens": "tokens per response", "group_size": "responses per prompt"}
FIXED = {
    "responses": "responses of {tokens} tokens, in groups of {group_size}",
    "tokens": "{responses} responses, in groups of {group_size}",
    "group_size": "{responses} responses of {tokens} tokens",
}


def growth(report: Mapping[str, Any]) -> Figure:
    """What `bench_growth` reports: seconds against each number that grows, and memory, all axes logarithmic."""
    with house_style():
        figure, panels = plt.subplots(2, 2, figsize=(10, 7))
        *over_time, last = panels.flat
        for axes, (name, sweep) in zip(over_time, report["times"].items(), strict=True):
            _times(axes, sweep)
            axes.set(title=FIXED[name].format(**report["size"]), ylabel="seconds", xlabel=GROWS[name])
        _memory(last, report["memory"])
        fixed = FIXED["responses"].format(**report["size"])
        last.set(title=f"{fixed}, {report['microbatch_size']} rows at a time", xlabel=GROWS["responses"])
        figure.suptitle("What a step takes: the tiny model, measured, with the power law that fits best")
    return figure


def _times(axes: Axes, sweep: Mapping[str, Any]) -> None:
    named = {"training": "training step", "sampling": "sampling of the batch"}
    for (what, label), colour in zip(named.items(), COLOURS, strict=False):
        curve = sweep[what]
        medians, low, high = (np.array([s[key] for s in curve["seconds"]]) for key in ("median", "low", "high"))
        _power_law(axes, sweep["values"], curve["exponent"], label, colour)
        axes.errorbar(sweep["values"], medians, (medians - low, high - medians), fmt="o", color=colour, capsize=3)
    _logarithmic(axes, sweep["values"])


def _memory(axes: Axes, memory: Mapping[str, Any]) -> None:
    extra, fit = np.array(memory["extra_bytes"]) / 2**20, memory["exponent"]
    _power_law(axes, memory["values"], fit | {"scale": fit["scale"] / 2**20}, "training step", COLOURS[0])
    axes.plot(memory["values"], extra, "o", color=COLOURS[0])
    axes.set(ylabel="MiB above what was held before", ylim=(extra.min() / 3, extra.max() * 3))
    _logarithmic(axes, memory["values"])


def _power_law(axes: Axes, values: Sequence[int], fit: Mapping[str, float], label: str, colour: str) -> None:
    ends = np.array([min(values), max(values)], dtype=float)
    label = f"{label}: exponent {fit['exponent']:.2f} ({fit['low']:.2f} to {fit['high']:.2f})"
    axes.plot(ends, fit["scale"] * ends ** fit["exponent"], color=colour, alpha=0.5, label=label)


def _logarithmic(axes: Axes, values: Sequence[int]) -> None:
    """Both axes, with ticks at what was measured, and numbers that are no powers."""
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.25)  # room for the legend
    axes.legend(fontsize="small", loc="upper left")
