"""Pictures of many runs: every seed thin, the mean thick, its 95 % interval as a band from three seeds on, and the
number of seeds told."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlhelpers.evidence.figures import COLOURS, METRICS, house_style, not_measured, step_axis
from rlhelpers.evidence.results import read_curves
from rlhelpers.evidence.statistics import final_scores, has_collapsed, seed_count, t_interval

LINES = ("-", "--", "-.", ":")  # more than COLOURS' methods: the same colours with other dashes


def compare_curves(runs: pd.DataFrame, metrics: Sequence[str], by: str, title: str, columns: int = 3) -> Figure:
    """A panel for each metric (keys of METRICS); in it, the runs of each value of `by` in a colour of their own."""
    rows = -(-len(metrics) // columns)
    with house_style():
        figure, panels = plt.subplots(
            rows, columns, figsize=(3.7 * columns, 2.9 * rows + 0.6), sharex=True, squeeze=False
        )
        for axes, metric in zip(panels.flat, metrics, strict=False):
            curves = read_curves(runs, metric, by)
            axes.set(title=METRICS[metric][0], ylabel=METRICS[metric][1])
            if curves.empty:
                not_measured(axes)
                continue
            styles = [(COLOURS[i % len(COLOURS)], LINES[i // len(COLOURS) % len(LINES)]) for i in range(len(runs))]
            methods = list(zip(runs[by].unique(), styles, strict=False))
            for name, (colour, line) in methods:
                _seeds(axes, curves[name], str(name), colour, line)
            limits = axes.get_ylim()  # of the seeds; the intervals of few of them reach far beyond
            for name, (colour, _) in methods:
                _band(axes, curves[name], colour)
            axes.set_ylim(limits)
            step_axis(axes)
        for axes in list(panels.flat)[len(metrics) :]:
            axes.set_visible(False)
        for axes in panels[-1]:
            axes.set_xlabel("rollout step")
        named: dict[str, Artist] = {}
        for axes in panels.flat:  # a method may lack the metric of one panel
            lines, labels = axes.get_legend_handles_labels()
            named |= dict(zip(labels, lines, strict=True))
        figure.legend(named.values(), named, loc="outside lower center", ncols=3, fontsize="small")
        figure.suptitle(title)
    return figure


def _seeds(axes: Axes, curves: pd.DataFrame, name: str, colour: str, line: str) -> None:
    """One method: `curves` has a column for each seed."""
    curves = curves.dropna(how="all")
    axes.plot(curves, color=colour, linewidth=0.7, alpha=0.5, linestyle=line)
    label = f"{name}, {seed_count(curves.shape[1])}"
    axes.plot(curves.mean(axis=1), color=colour, linewidth=2, linestyle=line, label=label)


def _band(axes: Axes, curves: pd.DataFrame, colour: str) -> None:
    """The interval at each step, from three seeds on: that of two says next to nothing."""
    curves = curves.dropna(how="all")
    if curves.shape[1] > 2:
        intervals = [t_interval(row.dropna()) for _, row in curves.iterrows()]
        low, high = [i.low for i in intervals], [i.high for i in intervals]
        axes.fill_between(curves.index, low, high, color=colour, alpha=0.12, lw=0)


def compare_finals(curves: pd.DataFrame, label: str, title: str) -> Figure:
    """Each method's final scores: a dot for each seed, a cross where the run had collapsed, mean and interval beside.

    curves: as evidence.results.read_curves gives them.
    """
    finals = final_scores(curves)
    methods = list(finals)
    with house_style():
        figure, axes = plt.subplots(figsize=(max(5, 1.3 * len(methods)), 3.6))
        for x, method in enumerate(methods):
            scores = finals[method].dropna()
            collapsed = [has_collapsed(curves[method, seed]) for seed in scores.index]
            for lost, marker in ((False, "o"), (True, "x")):
                shown = scores[[is_lost == lost for is_lost in collapsed]]
                axes.plot([x - 0.12] * len(shown), shown, marker, color=COLOURS[0], alpha=0.8)
            interval = t_interval(scores)
            error = [[interval.mean - interval.low], [interval.high - interval.mean]] if interval.n > 1 else None
            axes.errorbar(x + 0.12, interval.mean, error, fmt="s", color=COLOURS[1], capsize=4)
        axes.plot([], [], "o", color=COLOURS[0], label="a seed")
        axes.plot([], [], "x", color=COLOURS[0], label="a seed that collapsed")
        axes.plot([], [], "s", color=COLOURS[1], label="mean, 95 % t-interval")
        axes.set_xticks(range(len(methods)), [f"{m}\n{seed_count(finals[m].count())}" for m in methods])
        axes.set(xlabel=label, ylabel="final validation reward", ylim=(-0.02, 1.02), title=title)
        figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return figure
