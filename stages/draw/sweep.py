"""Sweeps: accuracy against one parameter, and the phases of training over seeds (paper, figure on thresholds).

A table has one row an experiment: its name and commit, its parameters (the columns with a dot in their name), its final
accuracies, and the steps of its phases, empty where a phase was not reached.
"""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stages.draw import style

DELAY = "grokking_delay"
# Parameter: where the published sweep begins to generalise, and in which accuracy.
PUBLISHED = {"train.r": (0.2, "2var_exact"), "generate.f": (0.25, "0var_exact")}
WORDS = {
    "train.r": "r, relative frequency of 2var examples",
    "generate.f": "f, fraction of the pairs seen in training",
    "0var_exact": "held-out pairs (0var_exact)",
    "2var_exact": "held-out 2var problems (2var_exact)",
    DELAY: "grokking delay (×: none)",
}
PHASES = {
    "addition": (style.BLUE, "o"),
    "assignment": (style.VERMILLION, "s"),
    "refinement": (style.GREEN, "D"),
}
SERIES = ((style.BLACK, "o", "-"), (style.ORANGE, "s", "--"), (style.SKY, "D", ":"), (style.PINK, "^", "-."))
WIDE = 30  # largest over smallest value from which on an axis is logarithmic


def parameters(table: pd.DataFrame) -> list[str]:
    """The parameters that vary in a table."""
    return [name for name in table.columns if "." in name and table[name].nunique() > 1]


def swept(table: pd.DataFrame) -> str:
    """The parameter that accuracies are drawn against: the number with the most values."""
    numbers = [name for name in table.columns if "." in name and pd.api.types.is_numeric_dtype(table[name])]
    return max(numbers, key=lambda name: (table[name].nunique(), name in PUBLISHED))


def panel(axis: Axes, table: pd.DataFrame, measure: str) -> None:
    """One measure against the swept parameter, a line for each combination of the others; ×: not reached."""
    x = swept(table)
    others = [name for name in parameters(table) if name != x]
    groups = table.groupby(others) if others else [((), table)]
    for (colour, marker, line), (values, rows) in zip(SERIES * len(table), groups, strict=False):
        rows = rows.sort_values(x)
        label = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in zip(others, values, strict=True))
        axis.plot(rows[x], rows[measure], color=colour, marker=marker, markersize=3.5, linestyle=line, label=label)
        if measure == DELAY:
            never = rows[x][rows[measure].isna()]
            height = [0.97] * len(never)  # of the panel, whatever the values
            axis.plot(never, height, "x", color=colour, markersize=5, transform=axis.get_xaxis_transform())
    if table[x].min() > 0 and table[x].max() / table[x].min() >= WIDE:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    if measure == DELAY:
        longest = table[measure].max() if table[measure].any() else table["train.steps"].max()
        axis.set_ylim(-0.05 * longest, 1.15 * longest)
    else:
        axis.set_ylim(-0.03, 1.03)
    threshold, judged = PUBLISHED.get(x, (None, ""))
    if judged == measure:
        axis.axvline(threshold, color="0.6", linewidth=0.8, zorder=0)
        place = {"xycoords": ("data", "axes fraction"), "xytext": (3, 3), "textcoords": "offset points"}
        axis.annotate(f"published: {threshold}", (threshold, 0), fontsize=7, color="0.4", **place)
    axis.set_ylabel("steps" if measure == DELAY else "accuracy")
    axis.set_title(WORDS[measure], loc="left")


def accuracies(table: pd.DataFrame) -> Figure:
    """Both accuracies and the grokking delay against the swept parameter."""
    fig, axes = style.figure(style.PAGE, 2.5, columns=3)
    for axis, measure in zip(axes, ("0var_exact", "2var_exact", DELAY), strict=True):
        panel(axis, table, measure)
    axes[1].set_xlabel(WORDS.get(swept(table), swept(table)))
    legend(fig, axes[0])
    return fig


def thresholds(r: pd.DataFrame, f: pd.DataFrame) -> Figure:
    """The two published sweeps side by side."""
    fig, axes = style.figure(style.PAGE, 2.7, columns=2)
    for axis, table, measure in zip(axes, (r, f), ("2var_exact", "0var_exact"), strict=True):
        panel(axis, table, measure)
        axis.set_xlabel(WORDS[swept(table)])
    legend(fig, axes[0])
    return fig


def legend(fig: Figure, axis: Axes) -> None:
    """The names of the lines of one panel, below all panels; nothing for a single line."""
    lines, words = axis.get_legend_handles_labels()
    if len(lines) > 1:
        fig.legend(lines, words, loc="outside lower center", ncols=len(lines), handlelength=3)


def phases(table: pd.DataFrame) -> Figure:
    """The step of each phase, a row an experiment; hollow and to the right where the run ended before it."""
    fig, axis = style.figure(style.PAGE, 0.9 + 0.2 * len(table))
    end = table["train.steps"].max()
    for shift, (name, (colour, marker)) in zip((-0.2, 0.0, 0.2), PHASES.items(), strict=True):
        rows = range(len(table))
        reached = table[name].notna()
        axis.plot(table[name], rows, marker, color=colour, markersize=5, label=name)
        never = [row for row, there in zip(rows, reached, strict=True) if not there]
        axis.plot([end * (1.08 + shift / 8)] * len(never), never, marker, color=colour, markersize=5, fillstyle="none")
    axis.axvspan(end, end * 1.16, color="0.93", linewidth=0, zorder=0)
    axis.annotate(
        "not within the run",
        (end * 1.08, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=7,
    )
    keys = [name for name in table.columns if "." in name and name != "train.steps"]
    labels = [", ".join(f"{key.rpartition('.')[2]} {row[key]}" for key in keys) for _, row in table.iterrows()]
    axis.set_yticks(range(len(table)), labels)
    axis.invert_yaxis()
    axis.set_xlim(0, end * 1.16)
    axis.set_xlabel("training step")
    axis.grid(axis="y", color="0.9", linewidth=0.6)
    axis.set_axisbelow(True)
    fig.legend(loc="outside lower center", ncols=len(PHASES))
    return fig


def figures(root: Path) -> Iterator[tuple[str, Figure]]:
    """The figures of the sweeps that are collected below `root`: (file stem, figure)."""
    tables = {file.stem: pd.read_csv(file) for file in sorted((root / "plots").glob("sweep_*.csv"))}
    for stem, table in tables.items():
        yield stem, phases(table) if swept(table).endswith("seed") else accuracies(table)
    if {"sweep_r", "sweep_f"} <= tables.keys():
        yield "sweep_thresholds", thresholds(tables["sweep_r"], tables["sweep_f"])
