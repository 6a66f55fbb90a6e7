"""Accuracy and loss of every split against training step (paper, figure on training dynamics)."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stages.draw import style

FORM_WORDS = {"0var": "constants", "1var": "one variable", "2var": "two variables"}


def accuracy(table: pd.DataFrame) -> Figure:
    """Accuracy against step, one panel a form. `table`: step, then one column a split."""
    fig, axes = _panels(table)
    for axis in axes:
        axis.set_ylim(-0.02, 1.02)
        axis.set_ylabel("accuracy")
    return fig


def loss(table: pd.DataFrame) -> Figure:
    """Cross-entropy in nats against step, on a logarithmic axis, one panel a form."""
    fig, axes = _panels(table)
    for axis in axes:
        axis.set_yscale("log")
        axis.set_ylabel("loss (nats)")
    return fig


def _panels(table: pd.DataFrame) -> tuple[Figure, list[Axes]]:
    """One panel a form, the form's colour, a line style and strength for what is held out, one legend below."""
    fig, axes = style.figure(style.COLUMN, 5.6, rows=len(FORM_WORDS), sharex=True, sharey=True)
    shown = {}
    for axis, (form, words) in zip(axes, FORM_WORDS.items(), strict=True):
        for name in table.columns:
            kind = name.removeprefix(f"{form}_")
            if kind in style.KIND_STYLES:
                colour, line = style.kind_colour(style.FORM_COLOURS[form], kind), style.KIND_STYLES[kind]
                axis.plot(table.step, table[name], color=colour, linestyle=line)
                shown[style.KIND_WORDS[kind]] = {"color": style.kind_colour("0.2", kind), "linestyle": line}
        axis.set_title(words, loc="left", color=style.FORM_COLOURS[form])
        axis.margins(x=0)
    axes[-1].set_xlabel("training step")
    words = [words for words in dict.fromkeys(style.KIND_WORDS.values()) if words in shown]
    lines = [Line2D([], [], **shown[kind]) for kind in words]
    fig.legend(lines, words, loc="outside lower center", handlelength=3.5)
    return fig, list(axes)


def figures(root: Path) -> Iterator[tuple[str, Figure]]:
    """The figures of stage ``evaluate`` below `root`: (file stem, figure)."""
    yield "accuracy", accuracy(pd.read_csv(root / "plots/accuracy.csv"))
    yield "loss", loss(pd.read_csv(root / "plots/loss.csv"))
