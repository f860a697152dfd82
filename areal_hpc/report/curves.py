"""The run's three curves as one figure: reward, staleness, and the gap between training and generation.

Drawn without a display and without pyplot's global state. The same summary gives the same SVG, byte for byte, and its
labels are text. Colours are Okabe and Ito's, which people with any colour vision can tell apart; lines also differ in
width and dash.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_hpc.report.progress import WINDOW
from areal_hpc.report.summary import Series, Summary, moving_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#767676"
SIZE_INCHES = (7.2, 8.4)
DPI = 200
MARKED_STEPS = 40
"""Up to so many steps each one gets a dot, so that a run of one step shows something."""
LABELLED_EVALUATIONS = 8
"""Up to so many evaluations each one has its value written; of more, the first, the best and the last."""
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "areal-hpc",
}


def draw(summary: Summary, staleness_bound: int | None) -> dict[str, bytes]:
    """The figure as file contents, by suffix: ``png`` and ``svg``."""
    import matplotlib

    with matplotlib.rc_context(STYLE):  # read when the figure is made and again when it is saved
        figure = _figure(summary, staleness_bound)
        return {
            "png": _saved(figure, "png", {"Software": None}),
            "svg": _saved(figure, "svg", {"Date": None, "Creator": None}),
        }


def _saved(figure: Figure, suffix: str, metadata: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, dpi=DPI, metadata=metadata)
    return buffer.getvalue()


def _figure(summary: Summary, staleness_bound: int | None) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    if summary.is_offline:
        figure.set_size_inches(SIZE_INCHES[0], SIZE_INCHES[1] / 2)
        loss = figure.subplots()
        _draw_loss(loss, summary)
        _mark_attempts(loss, summary, label="attempt begins")
        _finish(loss)
        _label_steps(loss, summary)
        return figure
    reward, staleness, gap = figure.subplots(3, 1, sharex=True, height_ratios=(1.35, 1, 1))
    _draw_reward(reward, summary)
    _draw_staleness(staleness, summary, staleness_bound)
    _draw_gap(gap, summary)
    for axes in (reward, staleness, gap):
        _mark_attempts(axes, summary, label="attempt begins" if axes is reward else "")
        _finish(axes)
    staleness.yaxis.set_major_locator(MaxNLocator(integer=True))
    _label_steps(gap, summary)
    return figure


def _label_steps(axes: Axes, summary: Summary) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(*_step_range(summary))


def _step_range(summary: Summary) -> tuple[float, float]:
    """From the first to the last step that anything is known of, with a margin."""
    steps = [*summary.steps[:1], *summary.steps[-1:], *(e.step for e in summary.evaluations)] or [0]
    margin = max(1.0, 0.03 * (max(steps) - min(steps)))
    return float(min(steps) - margin), float(max(steps) + margin)


def _draw_reward(axes: Axes, summary: Summary) -> None:
    axes.set_title("Reward")
    axes.set_ylabel("mean reward per answer")
    _draw_smoothed(axes, summary, "reward_mean", "each step")
    _draw_evaluations(axes, summary)


def _draw_loss(axes: Axes, summary: Summary) -> None:
    axes.set_title("Loss")
    axes.set_ylabel("mean loss")
    _draw_smoothed(axes, summary, "loss", "each step")
    _draw_evaluations(axes, summary)


def _draw_staleness(axes: Axes, summary: Summary, bound: int | None) -> None:
    axes.set_title("Staleness")
    axes.set_ylabel("age of trained tokens\n(optimizer steps)")
    oldest = summary.columns["staleness_max"]
    _line(axes, summary, oldest, color=VERMILION, linestyle="", marker="o", alpha=0.8, label="oldest token")
    _draw_smoothed(axes, summary, "staleness_mean", "step's mean")
    if bound is not None:
        axes.axhline(bound, color="black", linestyle=(0, (5, 3)), linewidth=1.0, label=f"bound ({bound})", zorder=1.9)
    highest = max([bound or 0, *oldest[np.isfinite(oldest)], 1.0])
    axes.set_ylim(-0.06 * highest, 1.12 * highest)


def _draw_gap(axes: Axes, summary: Summary) -> None:
    axes.set_title("Training versus generation")
    axes.set_ylabel("mean |log-prob gap|\n(nats per token)")
    _draw_smoothed(axes, summary, "logprob_gap", "each step")
    axes.set_ylim(bottom=0)


def _draw_smoothed(axes: Axes, summary: Summary, key: str, label: str) -> None:
    values = summary.columns[key]
    marker = "o" if summary.steps.size <= MARKED_STEPS else ""
    _line(axes, summary, values, color=BLUE, linewidth=0.8, alpha=0.4, marker=marker, label=label)
    _line(axes, summary, moving_mean(values), color=BLUE, linewidth=1.9, marker=marker, label=f"mean of {WINDOW} steps")


def _line(axes: Axes, summary: Summary, values: Series, **style: Any) -> None:
    """One curve over the steps; nothing, and no entry in the legend, where no value is known."""
    if np.isfinite(values).any():
        axes.plot(summary.steps, values, markersize=3, markeredgewidth=0, solid_joinstyle="round", **style)


def _draw_evaluations(axes: Axes, summary: Summary) -> None:
    found = summary.evaluations
    if not found:
        return
    steps, values = [e.step for e in found], [e.value for e in found]
    axes.plot(steps, values, color=VERMILION, linestyle="", marker="D", markersize=5.5, markeredgecolor="white",
              markeredgewidth=0.8, label="evaluation", zorder=4)  # fmt: skip
    few = len(found) <= LABELLED_EVALUATIONS
    paper = {"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none", "alpha": 0.7}
    for place in range(len(found)) if few else sorted({0, int(np.argmax([e.merit for e in found])), len(found) - 1}):
        axes.annotate(f"{values[place]:.3g}", (steps[place], values[place]), xytext=(0, -8), ha="center", va="top",
                      textcoords="offset points", color=VERMILION, fontsize=8, bbox=paper, zorder=5)  # fmt: skip


def _mark_attempts(axes: Axes, summary: Summary, label: str) -> None:
    for place, start in enumerate(summary.attempt_starts):
        axes.axvline(start, color=GREY, linestyle=":", linewidth=0.9, label=label if place == 0 else "", zorder=1)


def _finish(axes: Axes) -> None:
    """Put the legend above the panel, where it hides nothing; say so where there is nothing to see."""
    handles, labels = axes.get_legend_handles_labels()
    if not {"each step", "oldest token", "evaluation"} & set(labels):
        axes.text(0.5, 0.5, "nothing recorded yet", transform=axes.transAxes, ha="center", va="center", color=GREY)
    if handles:
        axes.legend(handles, labels, loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=len(handles),
                    borderaxespad=0.2, columnspacing=1.4, handlelength=1.8)  # fmt: skip
