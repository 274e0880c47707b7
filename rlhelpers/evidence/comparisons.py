"""Pictures of many runs: every seed thin, the mean thick, its 95 % interval as a band from three seeds on, and the
number of seeds told, and of those that collapsed or diverged.

Curves are joined by step, and nothing is made up between: mean and band stand at the steps that every seed has, and
where those end before the longest curve does, or there are none, the picture says so.
"""

from collections.abc import Collection, Mapping, Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlhelpers.checks import check_one_of, check_same_length, check_texts, check_whole
from rlhelpers.evidence.failures import FAILURES, Signs, read_all_signs
from rlhelpers.evidence.figures import COLOURS, METRICS, house_style, not_measured, step_axis
from rlhelpers.evidence.runs import read_curves
from rlhelpers.evidence.statistics import counted, final_scores, t_interval

LINES = ("-", "--", "-.", ":")  # more than COLOURS' methods: the same colours with other dashes
MARKERS = {"collapsed": "x", "diverged": "*"}


def compare_curves(runs: pd.DataFrame, metrics: Sequence[str], by: str, title: str, columns: int = 3) -> Figure:
    """A panel for each metric (keys of METRICS); in it, the runs of each value of `by` in a colour of their own.  The
    curve of a run that collapsed or diverged ends in a mark."""
    check_same_length(metrics=metrics)
    check_texts(metrics=metrics)
    check_one_of(METRICS, **{f"metrics, number {i}": metric for i, metric in enumerate(metrics)})
    check_whole(1, columns=columns)
    rows = -(-len(metrics) // columns)
    signs = read_all_signs(runs, by)
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
                of_method = {seed: found for (method, seed), found in signs.items() if method == name}
                _seeds(axes, curves[name], label_of(name, of_method.values()), colour, line)
                _marks(axes, curves[name], of_method, colour)
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


def label_of(name: object, signs: Collection[Signs]) -> str:
    """The method and its seeds, and how many of them failed: "grpo, 4 seeds, 1 collapsed"."""
    failed = {what: sum(what in found.failures for found in signs) for what in FAILURES}
    return ", ".join([str(name), counted(len(signs)), *(f"{n} {what}" for what, n in failed.items() if n)])


def _seeds(axes: Axes, curves: pd.DataFrame, label: str, colour: str, line: str) -> None:
    """One method: `curves` has a column for each seed."""
    for _, curve in curves.items():
        axes.plot(curve.dropna(), color=colour, linewidth=0.7, alpha=0.5, linestyle=line)
    mean = _of_all(curves).mean(axis=1)
    axes.plot(mean, color=colour, linewidth=2, linestyle=line, label=label)
    measured = curves.dropna(how="all")
    if len(measured) and (mean.empty or mean.index[-1] < measured.index[-1]):
        seeds = counted(int(curves.notna().any().sum()))
        text = f"{seeds}, no step in common" if mean.empty else f"all {seeds} to here"
        place = measured.mean(axis=1) if mean.empty else mean
        axes.annotate(text, (place.index[-1], place.iloc[-1]), color=colour, fontsize="small", ha="right", va="bottom")


def _of_all(curves: pd.DataFrame) -> pd.DataFrame:
    """The steps at which every seed that has the metric has a value."""
    return curves.dropna(axis=1, how="all").dropna()


def _marks(axes: Axes, curves: pd.DataFrame, signs: Mapping[int, Signs], colour: str) -> None:
    """At the end of a curve, what became of its run."""
    for seed, found in signs.items():
        end = curves[seed].dropna().tail(1)
        for what in found.failures:
            axes.plot(end, MARKERS[what], color=colour, markersize=7)


def _band(axes: Axes, curves: pd.DataFrame, colour: str) -> None:
    """The interval at each step, from three seeds on: that of two says next to nothing."""
    curves = _of_all(curves)
    if curves.shape[1] > 2:
        intervals = [t_interval(row) for _, row in curves.iterrows()]
        low, high = [i.low for i in intervals], [i.high for i in intervals]
        axes.fill_between(curves.index, low, high, color=colour, alpha=0.12, lw=0)


def compare_finals(runs: pd.DataFrame, by: str, title: str, label: str | None = None) -> Figure:
    """The final scores of each value of `by`: a dot for each seed, another mark where the run collapsed or diverged,
    mean and interval beside.  `label`: of the axis, where it is not `by`."""
    finals = final_scores(read_curves(runs, "val_reward", by))
    signs = read_all_signs(runs, by)
    methods = list(finals)
    with house_style():
        figure, axes = plt.subplots(figsize=(max(5, 1.3 * len(methods)), 3.6))
        for x, method in enumerate(methods):
            scores = finals[method].dropna()
            for seed, score in scores.items():
                for marker in [MARKERS[what] for what in signs[method, seed].failures] or ["o"]:
                    axes.plot(x - 0.12, score, marker, color=COLOURS[0], alpha=0.8)
            interval = t_interval(scores)
            error = [[interval.half_width]] * 2 if interval.n > 1 else None
            axes.errorbar(x + 0.12, interval.mean, error, fmt="s", color=COLOURS[1], capsize=4)
        axes.plot([], [], "o", color=COLOURS[0], label="a seed")
        for what in [what for what in FAILURES if any(what in found.failures for found in signs.values())]:
            axes.plot([], [], MARKERS[what], color=COLOURS[0], label=f"a seed that {what}")
        axes.plot([], [], "s", color=COLOURS[1], label="mean, 95 % t-interval")
        axes.set_xticks(range(len(methods)), [f"{m}\n{counted(finals[m].count())}" for m in methods])
        axes.set(xlabel=label or by, ylabel="final validation reward", ylim=(-0.02, 1.02), title=title)
        figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return figure
