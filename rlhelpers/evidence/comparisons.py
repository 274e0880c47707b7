"""Pictures of many runs: every seed thin, the mean thick, its 95 % interval as a band, the number of seeds told."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlhelpers.evidence.figures import COLOURS, house_style, not_measured
from rlhelpers.evidence.results import read_curves
from rlhelpers.evidence.statistics import has_collapsed, t_interval

# metric -> (title, label of the axis): what the handout asks to be logged.
METRICS = {
    "val_reward": ("validation reward", "mean reward per response"),
    "val_format_reward": ("validation format reward", "mean format reward"),
    "val_response_length": ("validation response length", "tokens"),
    "reward": ("training reward", "mean reward per response"),
    "format_reward": ("training format reward", "mean format reward"),
    "loss": ("loss: no measure of progress", "loss"),
    "grad_norm": ("gradient norm before clipping", "norm"),
    "token_entropy": ("entropy of the next token", "nats"),
    "clip_fraction": ("clipped tokens", "fraction of tokens"),
    "signal_fraction": ("groups with a signal", "fraction of groups"),
}
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
            for i, name in enumerate(_in_order(runs[by])):
                _seeds(axes, curves[name], str(name), COLOURS[i % len(COLOURS)], LINES[i // len(COLOURS)])
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        for axes in list(panels.flat)[len(metrics) :]:
            axes.set_visible(False)
        for axes in panels[-1]:
            axes.set_xlabel("rollout step")
        handles, labels = panels.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3), fontsize="small")
        figure.suptitle(title)
    return figure


def _seeds(axes: Axes, curves: pd.DataFrame, name: str, colour: str, line: str) -> None:
    """One method: `curves` has a column for each seed."""
    curves = curves.dropna(how="all")
    axes.plot(curves, color=colour, linewidth=0.7, alpha=0.5, linestyle=line)
    n = curves.shape[1]
    axes.plot(curves.mean(axis=1), color=colour, linewidth=2, linestyle=line, label=f"{name}, {_seed_count(n)}")
    if n > 1:
        intervals = [t_interval(row.dropna()) for _, row in curves.iterrows()]
        axes.fill_between(
            curves.index, [i.low for i in intervals], [i.high for i in intervals], color=colour, alpha=0.12, lw=0
        )


def compare_finals(finals: pd.DataFrame, curves: pd.DataFrame, label: str, title: str) -> Figure:
    """Each method's final scores: a dot for each seed, a cross where the run had collapsed, mean and interval beside.

    finals: as statistics.final_scores gives them.  curves: those that they were computed from.
    """
    methods = _in_order(curves.columns.get_level_values(0))
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
        axes.set_xticks(range(len(methods)), [f"{m}\n{_seed_count(finals[m].count())}" for m in methods])
        axes.set(xlabel=label, ylabel="final validation reward", ylim=(-0.02, 1.02), title=title)
        axes.legend(fontsize="small", loc="lower left")
    return figure


def table_of_finals(finals: pd.DataFrame, label: str) -> pd.DataFrame:
    """Mean, interval, lowest and highest seed of each method's final scores, rounded, best first."""
    rows: dict[object, Mapping[str, object]] = {}
    for method in finals:
        scores = finals[method].dropna()
        interval = t_interval(scores)
        rows[method] = {
            "mean": round(interval.mean, 3),
            "95 % interval": f"{interval.low:.3f} to {interval.high:.3f}" if interval.n > 1 else "one seed has none",
            "lowest": round(scores.min(), 3),
            "highest": round(scores.max(), 3),
            "seeds": interval.n,
        }
    return pd.DataFrame(rows).T.rename_axis(label).sort_values("mean", ascending=False)


def _seed_count(n: int) -> str:
    return f"{n} seed" if n == 1 else f"{n} seeds"


def _in_order(values) -> list:
    return list(dict.fromkeys(values))
