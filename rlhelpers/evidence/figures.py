"""Pictures of runs, in one style: readable axes with units, colours that colour-blind readers tell apart."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlhelpers import paths

# Okabe and Ito's palette (jfly.uni-koeln.de/color), which survives the common forms of colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLE = {
    "axes.prop_cycle": plt.cycler(color=COLOURS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.titlesize": "medium",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "figure.dpi": 80,  # large enough to read, small enough for a repository page
}


@contextmanager
def house_style() -> Iterator[None]:
    """STYLE for a while.  The first figure turns a notebook's display of figures on; a plain style context would turn
    it off again at its end."""
    with plt.style.context(STYLE):
        yield
        interactive = plt.isinteractive()
    plt.interactive(interactive)


def learning_curves(metrics: pd.DataFrame, title: str) -> Figure:
    """What was learned: reward and format reward on training batches and on validation, against the step."""
    with house_style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
        for axes, name, what in ((left, "reward", "reward"), (right, "format_reward", "format reward")):
            _line(axes, metrics, name, "training batch", alpha=0.6)
            _line(axes, metrics, f"val_{name}", "validation", marker="o", linewidth=2)
            axes.set(xlabel="rollout step", ylabel=f"mean {what} per response", title=what, ylim=(-0.02, 1.02))
        left.legend()
        figure.suptitle(title)
    return figure


# metric -> (title, label of the axis): what the handout asks to be logged.
METRICS = {
    "val_reward": ("validation reward", "mean reward per response"),
    "val_format_reward": ("validation format reward", "mean format reward"),
    "val_response_length": ("validation response length", "tokens"),
    "reward": ("training reward", "mean reward per response"),
    "format_reward": ("training format reward", "mean format reward"),
    "response_length": ("response length", "tokens"),
    "loss": ("loss: no measure of progress", "loss"),
    "grad_norm": ("gradient norm before clipping", "norm"),
    "token_entropy": ("entropy of the next token", "nats"),
    "clip_fraction": ("clipped tokens", "fraction of tokens"),
    "signal_fraction": ("groups with a signal", "fraction of groups"),
}
DIAGNOSTICS = ("loss", "grad_norm", "token_entropy", "response_length", "signal_fraction", "clip_fraction")


def diagnostics(metrics: pd.DataFrame, title: str) -> Figure:
    """How the training went: one small picture for each diagnostic."""
    with house_style():
        figure, panels = plt.subplots(2, 3, figsize=(10, 5), sharex=True)
        for axes, name in zip(panels.flat, DIAGNOSTICS, strict=True):
            _line(axes, metrics, name, "measured")
            axes.set(title=METRICS[name][0], ylabel=METRICS[name][1])
            if name == "signal_fraction":
                _line(axes, metrics, "predicted_signal_fraction", r"$1-p^G-(1-p)^G$", linestyle="--")
                axes.legend(fontsize="small")
            if name in ("signal_fraction", "clip_fraction"):
                axes.set_ylim(-0.02, 1.02)
        for axes in panels[-1]:
            axes.set_xlabel("rollout step")
        figure.suptitle(title)
    return figure


def outcomes(metrics: pd.DataFrame, title: str, most: int = 7) -> Figure:
    """What became of the responses: the share of each reason for a grade, on training batches and on validation.

    The `most` reasons that are most frequent over the whole run have an area each, the others one together.
    """
    with house_style():
        figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
        shares = [_shares(metrics, prefix) for prefix in ("reason/", "val_reason/")]
        frequent = pd.concat(shares).drop(columns="right", errors="ignore").mean().nlargest(most).index
        for axes, table, what in zip(panels, shares, ("training batch", "validation"), strict=True):
            axes.set(xlabel="rollout step", title=what, ylim=(0, 1))
            if table.empty:
                not_measured(axes)
                continue
            shown = table.reindex(columns=["right", *frequent], fill_value=0.0)
            shown["any other reason"] = 1 - shown.sum(axis=1)
            colours = [COLOURS[2], *plt.colormaps["cividis_r"].resampled(most + 1)(range(most + 1))]
            axes.stackplot(shown.index, shown.to_numpy().T, labels=shown.columns, colors=colours, edgecolor="white")
            step_axis(axes)
        panels[0].set_ylabel("share of responses")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize="small")
        figure.suptitle(title)
    return figure


def _shares(metrics: pd.DataFrame, prefix: str) -> pd.DataFrame:
    counts = metrics[[name for name in metrics if name.startswith(prefix)]].dropna(how="all").fillna(0.0)
    return counts.rename(columns=lambda name: name.removeprefix(prefix)).div(counts.sum(axis=1), axis=0)


def save_figure(figure: Figure, run_folder: Path, name: str) -> list[Path]:
    """Write the figure into the run's folder and to the same place under `figures/`; returns both paths."""
    run_folder = Path(run_folder).resolve()
    below_figures = paths.FIGURES / run_folder.relative_to(paths.RUNS.resolve())
    files = [folder / f"{name}.png" for folder in (run_folder, below_figures)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120)
    return files


def save_for_writeup(figure: Figure, name: str) -> Path:
    """Write a figure of many runs to `figures/`, where it is committed; returns its path."""
    paths.FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(paths.FIGURES / f"{name}.png", dpi=120)
    return paths.FIGURES / f"{name}.png"


def _line(axes: Axes, metrics: pd.DataFrame, name: str, label: str, **style) -> None:
    """One metric against the step; steps that do not have it are left out, as is a metric that no step has."""
    if name in metrics and metrics[name].notna().any():
        axes.plot(metrics[name].dropna(), label=label, **style)
        step_axis(axes)
    else:
        not_measured(axes)


def step_axis(axes: Axes) -> None:
    """Ticks at round whole steps."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def not_measured(axes: Axes) -> None:
    """What an empty panel says."""
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="grey")
