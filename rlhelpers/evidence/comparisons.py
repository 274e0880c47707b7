"""Pictures of many runs: each seed a thin line, the mean a thick one, its 95 % interval a band from three seeds on.

The legend counts the seeds, and those that collapsed or diverged.  Mean and band stand at the steps that every seed
has: nothing is interpolated.  Where these steps end early, or there are none, the picture says so.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import cycle, product

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlhelpers.checks import check_one_of, check_same_length, check_texts, check_whole
from rlhelpers.evidence.figures import COLOURS, METRICS, house_style, not_measured, step_axis
from rlhelpers.evidence.runs import read_curves
from rlhelpers.evidence.statistics import FAILURES, Signs, counted, final_scores, read_all_signs, t_interval

STYLES = tuple((colour, line) for line, colour in product(("-", "--", "-.", ":"), COLOURS))  # more methods than colours
MARKERS = {"collapsed": "x", "diverged": "*"}


def compare_curves(runs: pd.DataFrame, metrics: Sequence[str], by: str, title: str, columns: int = 3) -> Figure:
    """A panel for each metric (keys of METRICS), and in it a colour for each value of `by`.

    The curve of a run that collapsed or diverged ends in a mark.
    """
    check_same_length(metrics=metrics)
    check_texts(metrics=metrics)
    check_one_of(METRICS, **{f"metrics, number {i}": metric for i, metric in enumerate(metrics)})
    check_whole(1, columns=columns)
    rows = -(-len(metrics) // columns)
    signs = read_all_signs(runs, by)
    legend = {}
    with house_style():
        size = (3.7 * columns, 2.9 * rows + 0.6)
        figure, panels = plt.subplots(rows, columns, figsize=size, sharex=True, squeeze=False)
        for axes, metric in zip(panels.flat, metrics, strict=False):
            axes.set(title=METRICS[metric][0], ylabel=METRICS[metric][1])
            curves = read_curves(runs, metric, by)
            if curves.empty:
                not_measured(axes)
                continue
            _panel(axes, curves, dict(zip(runs[by].unique(), cycle(STYLES), strict=False)), signs)
            lines, labels = axes.get_legend_handles_labels()
            legend |= dict(zip(labels, lines, strict=True))  # a method may lack the metric of one panel
        for axes in panels.flat[len(metrics) :]:
            axes.set_visible(False)
        for axes in panels[-1]:
            axes.set_xlabel("rollout step")
        figure.legend(legend.values(), legend, loc="outside lower center", ncols=3, fontsize="small")
        figure.suptitle(title)
    return figure


def _panel(axes: Axes, curves: pd.DataFrame, styles: Mapping[object, tuple], signs: Mapping[tuple, Signs]) -> None:
    for name, (colour, line) in styles.items():
        of_method = {seed: found for (method, seed), found in signs.items() if method == name}
        _seeds(axes, curves[name], _label(name, of_method.values()), colour, line)
        for seed, found in of_method.items():
            end = curves[name, seed].dropna().tail(1)
            for what in found.failures:
                axes.plot(end, MARKERS[what], color=colour, markersize=7)
    limits = axes.get_ylim()  # set by the seeds; the intervals of few seeds reach far beyond
    for name, (colour, _) in styles.items():
        _band(axes, curves[name], colour)
    axes.set_ylim(limits)
    step_axis(axes)


def _label(name: object, signs: Collection[Signs]) -> str:
    """ "grpo, 4 seeds, 1 collapsed"."""
    failed = {what: sum(what in found.failures for found in signs) for what in FAILURES}
    return ", ".join([str(name), counted(len(signs)), *(f"{n} {what}" for what, n in failed.items() if n)])


def _seeds(axes: Axes, curves: pd.DataFrame, label: str, colour: str, line: str) -> None:
    """Draw one method: `curves` has a column for each seed."""
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


def _band(axes: Axes, curves: pd.DataFrame, colour: str) -> None:
    """Draw the interval at each step, from three seeds on: that of two says next to nothing."""
    curves = _of_all(curves)
    if curves.shape[1] > 2:
        intervals = [t_interval(row) for _, row in curves.iterrows()]
        low, high = [i.low for i in intervals], [i.high for i in intervals]
        axes.fill_between(curves.index, low, high, color=colour, alpha=0.12, lw=0)


def compare_finals(runs: pd.DataFrame, by: str, title: str, label: str | None = None) -> Figure:
    """The final scores of each value of `by`: a dot for each seed, mean and interval beside.

    A seed that collapsed or diverged has another mark.  `label` names the axis; without it, `by` does.
    """
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
