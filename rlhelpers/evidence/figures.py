"""Pictures of one run, and the house style: axes with units, colours that colour-blind readers tell apart."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from rlhelpers import paths
from rlhelpers.checks import check_kind, check_text, check_whole, refused
from rlhelpers.evidence.runs import check_table
from rlhelpers.files import whole_file
from rlhelpers.tasks.grading import REASONS, RIGHT

# Okabe and Ito's palette (jfly.uni-koeln.de/color), for the common forms of colour blindness.
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
    "figure.dpi": 72,  # large enough to read, small enough for a repository page
}


@contextmanager
def house_style() -> Iterator[None]:
    """Use STYLE within a `with` block."""
    with plt.style.context(STYLE):
        yield
        interactive = plt.isinteractive()
    plt.interactive(interactive)  # the first figure turns a notebook's display on; the style's end would turn it off


def learning_curves(metrics: pd.DataFrame, title: str) -> Figure:
    """Reward and format reward, on training batches and on validation, against the step."""
    check_table(metrics=metrics)
    with house_style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
        for axes, name, what in ((left, "reward", "reward"), (right, "format_reward", "format reward")):
            _line(axes, metrics, name, "training batch", alpha=0.6)
            _line(axes, metrics, f"val_{name}", "validation", marker="o", linewidth=2)
            axes.set(xlabel="rollout step", ylabel=f"mean {what} per response", title=what, ylim=(-0.02, 1.02))
        left.legend()
        figure.suptitle(title)
    return figure


# metric -> (title, label of the axis): what the handout asks for.
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
    """A small panel for each of DIAGNOSTICS."""
    check_table(metrics=metrics)
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


OTHERS = "any other reason"


def outcomes(metrics: pd.DataFrame, title: str, most: int = 7) -> Figure:
    """Each step's shares of the reasons for a grade, on training batches and on validation.

    From below, in the order of REASONS: right (green), the right form with a wrong answer (ambers), without the form
    (blues).  So the blues begin at the format reward; except that a box of question_only that is never closed has no
    form and is amber.  The `most` frequent reasons have a shade each, all others are grey.
    """
    check_table(metrics=metrics)
    check_whole(0, most=most)
    parts = [_shares(metrics, prefix) for prefix in ("reason/", "val_reason/")]
    colours = _colours_of_reasons(pd.concat(parts).fillna(0.0), most)
    with house_style():
        figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
        for axes, shares, what in zip(panels, parts, ("training batch", "validation"), strict=True):
            axes.set(xlabel="rollout step", title=what, ylim=(0, 1))
            axes.grid(visible=False)
            if shares.empty:
                not_measured(axes)
            else:
                _stacked_bars(axes, shares, colours)
        panels[0].set_ylabel("share of responses")
        if colours:
            handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
            figure.legend(handles=handles[::-1], loc="outside right center", fontsize="small")
        figure.suptitle(title)
    return figure


def _shares(metrics: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """The share of each reason, for the steps that counted reasons."""
    counts = metrics.filter(regex=f"^{prefix}").dropna(how="all").fillna(0.0)
    return counts.rename(columns=lambda name: name.removeprefix(prefix)).div(counts.sum(axis=1), axis=0)


def _colours_of_reasons(shares: pd.DataFrame, most: int) -> dict[str, Any]:
    """Colour by reason, from the bottom to the top."""
    order = list(REASONS)
    without_form = order.index("empty response")
    frequent = shares.filter(items=order).drop(columns=RIGHT, errors="ignore").mean().nlargest(most)
    colours = {RIGHT: COLOURS[2]} if RIGHT in shares else {}
    # Shades differ in lightness, also from the green: some readers see no other difference.
    for family, *shades in ((order[:without_form], "YlOrBr", 0.5, 0.15), (order[without_form:], "Blues", 0.9, 0.2)):
        names = [name for name in family if name in frequent]
        colours |= zip(names, plt.colormaps[shades[0]](np.linspace(*shades[1:], len(names))), strict=True)
    return colours | {OTHERS: "grey"} if len(colours) < shares.shape[1] else colours


def _stacked_bars(axes: Axes, shares: pd.DataFrame, colours: Mapping[str, Any]) -> None:
    """Draw a bar for each step, as wide as the smallest distance between two."""
    others = shares.drop(columns=list(colours), errors="ignore").sum(axis=1)
    shown = shares.assign(**{OTHERS: others}).reindex(columns=list(colours), fill_value=0.0)
    width = np.diff(shares.index).min() if len(shares) > 1 else 1
    for name, bottom in (shown.cumsum(axis=1) - shown).items():
        axes.bar(shown.index, shown[name], width, bottom, color=colours[name])
    axes.margins(x=0.02)
    step_axis(axes)


def save_figure(figure: Figure, run_folder: Path, name: str) -> list[Path]:
    """Write the figure into the run's folder and to the same place under `figures/`; return both paths."""
    _check_figure(figure, name)
    check_kind((str, Path), "a folder below data/runs", run_folder=run_folder)
    run_folder = Path(run_folder).resolve()
    if not run_folder.is_relative_to(paths.RUNS.resolve()):
        raise ValueError(f"run_folder: got {str(run_folder)!r}; accepted is a folder below {paths.RUNS}")
    below_figures = paths.FIGURES / run_folder.relative_to(paths.RUNS.resolve())
    files = [folder / f"{name}.png" for folder in (run_folder, below_figures)]
    for file in files:
        _write(figure, file)
    return files


def save_for_writeup(figure: Figure, name: str) -> Path:
    """Write a figure of many runs to `figures/`, where it is committed; return its path."""
    _check_figure(figure, name)
    file = paths.FIGURES / f"{name}.png"
    _write(figure, file)
    return file


def _write(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as new:
        figure.savefig(new, format="png", dpi=120)


def _check_figure(figure: Figure, name: str) -> None:
    check_kind(Figure, "a figure of matplotlib", figure=figure)
    check_text(name=name)
    if name in ("", "..") or Path(name).name != name:
        raise refused("name", name, "the name of a file, without a folder")


def _line(axes: Axes, metrics: pd.DataFrame, name: str, label: str, **style) -> None:
    """Draw one metric against the step, at the steps that have it; say so where none has."""
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
