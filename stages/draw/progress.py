"""Accuracy and progress measures against training step, phases and spike marked (paper, section 4)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stages.draw import evaluate, style

Moments = Mapping[str, int | None]

MARKED = ("addition", "spike", "assignment", "refinement")
LABEL = 0.2  # how wide a label is, in widths of a panel
DASHED = (0, (2, 1))

# Column of progress.csv: words and colour.
WEIGHT_MEASURES = {
    "ov2_mlp2_accuracy": ("OV2 and MLP2 alone add", style.BLUE),
    "qk1_num_to_prev_var": ("QK1: one position back", style.ORANGE),
    "qk2_ov1_var_identity": ("QK2: same variable", style.GREEN),
}
SEQUENCE_MEASURES = {
    "attn1_equals_to_operands": ("layer 1: = to operands", style.VERMILLION),
    "attn1_num_to_prev": ("layer 1: number to variable", style.SKY),
    "attn2_equals_to_values": ("layer 2: = to values", style.PINK),
    "probe1_var_from_num": ("probe: variable at number", style.BLACK),
}
MARGIN = "qk2_ov1_diagonal_margin"


def accuracy(table: pd.DataFrame, moments: Moments) -> Figure:
    """Accuracy of every split, one panel a form, phases and spike marked.

    Args:
        table: step, then one column a split.
        moments: step of each phase and of both sides of the spike, None for what was not reached.
    """
    fig = evaluate.accuracy(table)
    fig.set_size_inches(style.PAGE, 5.6)
    mark(fig.axes, moments)
    return fig


def progress(table: pd.DataFrame, moments: Moments) -> Figure:
    """The progress measures, in panels: of the weights alone, of attention and residual stream, the identity's margin.

    Args:
        table: step, then one column a measure.
        moments: step of each phase and of both sides of the spike, None for what was not reached.
    """
    fig, axes = style.figure(style.PAGE, 5.0, rows=3, sharex=True, height_ratios=(1, 1.3, 0.8))
    for axis, measures in zip(axes, (WEIGHT_MEASURES, SEQUENCE_MEASURES), strict=False):
        for name, (words, colour) in measures.items():
            axis.plot(table.step, table[name], color=colour, label=words)
            if f"{name}_2var" in table:
                axis.plot(table.step, table[f"{name}_2var"], color=colour, linestyle=DASHED)
        axis.set_ylim(-0.03, 1.03)
    axes[1].plot([], [], color="0.2", linestyle=DASHED, label="dashed: two variables")
    axes[2].plot(table.step, table[MARGIN], color=style.GREEN)
    axes[2].axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes[2].set_xlabel("training step")
    titles = (
        "weights alone",
        "attention and residual stream on sequences",
        "QK2: margin of the same variable over the others",
    )
    for axis, title, label in zip(axes, titles, ("share", "share", "score"), strict=True):
        axis.set_title(title, loc="left")
        axis.set_ylabel(label)
        axis.margins(x=0)
    for axis in axes[:2]:
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2.2)
    mark(axes, moments)
    return fig


def mark(axes: Sequence[Axes], moments: Moments) -> None:
    """Mark phases and spike in panels that share their axis of steps, and name them above the first panel."""
    start, stop = axes[0].get_xlim()
    width = LABEL * (stop - start)
    row, end = 0, -float("inf")
    for name, step in sorted(((n, moments[n]) for n in MARKED if moments[n] is not None), key=lambda item: item[1]):
        side, left = ("left", step) if step + width < stop else ("right", step - width)
        row = row + 1 if left < end else 0  # a label that would run into the one before it goes above it
        end = left + width
        for axis in axes:
            if name == "spike":
                axis.axvspan(moments["spike_before"], step, color=style.YELLOW, linewidth=0, zorder=0)
            else:
                axis.axvline(step, color="0.45", linewidth=0.8, zorder=0)
        axes[0].annotate(
            f"{name} {step:,}",
            (step, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 14 + 9 * row),  # above the panel's title
            textcoords="offset points",
            ha=side,
            fontsize=7,
        )


def figures(root: Path) -> Iterator[tuple[str, Figure]]:
    """The figures of stage ``progress`` below `root`: (file stem, figure)."""
    moments = json.loads((root / "metrics/progress.json").read_text())
    yield "accuracy_phases", accuracy(pd.read_csv(root / "plots/accuracy.csv"), moments)
    yield "progress", progress(pd.read_csv(root / "plots/progress.csv"), moments)
