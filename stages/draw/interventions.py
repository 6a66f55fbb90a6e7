"""Interchange accuracy by form and patch site, over the phases, and the ablation table as a heat map."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from stages.draw import style

EXPERIMENT_WORDS = {
    "mlp2_input": "MLP2 input\nat =",
    "mlp2_input_one_operand": "MLP2 input,\none operand",
    "layer1_at_equals": "layer 1\nat =",
    "layer1_at_equals_and_right": "layer 1 at =,\nright operand",
    "layer1_at_two_values": "layer 1 at\ntwo values",
    "layer1_at_one_value": "layer 1 at\none value",
}
GROUP_COLOURS = {
    "1var, variable left": style.VERMILLION,
    "1var, variable right": style.ORANGE,
    "2var": style.GREEN,
}
CROSS = {"color": "0.1", "linestyle": "", "marker": "x", "markersize": 4}
CIRCLE = CROSS | {"marker": "o", "markerfacecolor": "white"}
GROUP_MARKERS = dict(zip(GROUP_COLOURS, "<>o", strict=True))
ABLATED_WORDS = {
    "nothing": "nothing",
    "layer1_numbers": "layer 1 at numbers",
    "layer1_equals": "layer 1 at =",
    "layer1_elsewhere": "layer 1 elsewhere",
    "layer2_attention": "layer 2 attention",
    "mlp2": "MLP2",
}


def interchange(table: pd.DataFrame) -> Figure:
    """At the final checkpoint, a bar for each patch site and form; placebo and original answer as marks.

    Args:
        table: plots/interventions.csv.
    """
    final = by_group(table)
    fig, axis = style.figure(style.PAGE, 2.6)
    width = 0.8 / len(GROUP_COLOURS)
    for i, (group, colour) in enumerate(GROUP_COLOURS.items()):
        x = np.arange(len(EXPERIMENT_WORDS)) + (i - 1) * width

        def shares(variant: str, column: str, group: str = group) -> list[float]:
            return [final[column].get((name, group, variant, "final"), np.nan) for name in EXPERIMENT_WORDS]

        axis.bar(x, shares("interchange", "accuracy_counterfactual"), 0.9 * width, color=colour)
        axis.plot(x, shares("interchange", "accuracy_original"), **CROSS)
        axis.plot(x, shares("placebo", "unchanged"), **CIRCLE)
    axis.set_xticks(range(len(EXPERIMENT_WORDS)), EXPERIMENT_WORDS.values())
    axis.tick_params(axis="x", length=0)
    axis.set_ylim(-0.03, 1.05)
    axis.set_ylabel("share of sequences")
    groups = {group: Patch(color=colour) for group, colour in GROUP_COLOURS.items()}
    marks = {
        "bar: counterfactual answer after interchange": Patch(color="0.6"),
        "original answer after interchange": Line2D([], [], **CROSS),
        "prediction unchanged by placebo": Line2D([], [], **CIRCLE),
    }
    columns = [entry for column in zip(groups.items(), marks.items(), strict=True) for entry in column]
    words, handles = zip(*columns, strict=True)
    fig.legend(handles, words, loc="outside upper center", ncols=3, handlelength=1.2)
    return fig


def by_moment(table: pd.DataFrame) -> Figure:
    """Before and at each phase and at the end: the counterfactual answer after the patch, the original one without.

    Args:
        table: plots/interventions.csv.
    """
    steps = table.groupby("moment", sort=False)["step"].first()
    shares = by_group(table)
    fig, axes = style.figure(style.PAGE, 4.2, rows=2, columns=3, sharex=True, sharey=True)
    for axis, (name, words) in zip(axes.flat, EXPERIMENT_WORDS.items(), strict=True):
        for group, colour in GROUP_COLOURS.items():
            for variant, column, look in (
                ("unpatched", "accuracy_original", {"linestyle": ":"}),
                ("interchange", "accuracy_counterfactual", {"marker": GROUP_MARKERS[group], "markersize": 3.5}),
            ):
                y = [shares[column].get((name, group, variant, moment), np.nan) for moment in steps.index]
                axis.plot(y, color=colour, **look)
        axis.set_title(words.replace("\n", " "), loc="left")
        axis.set_ylim(-0.03, 1.03)
        ticks = [f"{moment}\n{step:,}" for moment, step in steps.items()]
        axis.set_xticks(range(len(steps)), ticks, rotation=90)
    for axis in axes[:, 0]:
        axis.set_ylabel("share of sequences")
    lines = [Line2D([], [], color=colour, marker=GROUP_MARKERS[group]) for group, colour in GROUP_COLOURS.items()]
    lines.append(Line2D([], [], color="0.2", linestyle=":"))
    words = [*(f"{group}: counterfactual" for group in GROUP_COLOURS), "unpatched: original answer"]
    fig.legend(lines, words, loc="outside upper center", ncols=2, columnspacing=3)
    return fig


def ablation(table: pd.DataFrame) -> Figure:
    """Accuracy in percent, what is ablated against form, at each moment.

    Args:
        table: plots/interventions_ablation.csv.
    """
    moments = table.groupby("moment", sort=False)["step"].first()
    forms = list(dict.fromkeys(table["form"]))
    accuracy = table.pivot(index="ablated", columns=["moment", "form"], values="accuracy")
    accuracy = 100 * accuracy.loc[list(ABLATED_WORDS), [(moment, form) for moment in moments.index for form in forms]]
    width = min(style.PAGE, 1.6 + 0.26 * accuracy.shape[1])
    fig, axis = style.figure(max(width, style.COLUMN), 2.5)
    image = axis.imshow(accuracy, vmin=0, vmax=100, cmap=style.SEQUENTIAL, aspect="auto")
    for (row, column), value in np.ndenumerate(accuracy.to_numpy()):
        colour = "white" if value < 50 else "black"
        axis.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=6, color=colour)
    for edge in range(1, len(moments)):
        axis.axvline(edge * len(forms) - 0.5, color="white", linewidth=3)
    for i, (moment, step) in enumerate(moments.items()):
        words = f"{moment.replace(' ', chr(10))}\n{step:,}"
        axis.text((i + 0.5) * len(forms) - 0.5, -0.65, words, ha="center", va="bottom", fontsize=7)
    axis.set_xticks(range(accuracy.shape[1]), forms * len(moments), rotation=90)
    axis.set_yticks(range(len(ABLATED_WORDS)), ABLATED_WORDS.values())
    axis.set_ylabel("replaced by its mean")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    fig.colorbar(image, ax=axis, label="accuracy (%)", pad=0.02)
    return fig


def by_group(table: pd.DataFrame) -> pd.DataFrame:
    """Shares by experiment, group (form, with 1var's side), variant and moment."""
    one_sided = table["form"] == "1var"
    group = table["form"].where(~one_sided, table["form"] + ", variable " + table["side"])
    keys = ["experiment", "group", "variant", "moment"]
    shares = ["accuracy_counterfactual", "accuracy_original", "unchanged"]
    weighted = table.assign(group=group, **{name: table[name] * table["n"] for name in shares})
    sums = weighted.groupby(keys)[[*shares, "n"]].sum()
    return sums[shares].div(sums["n"], axis=0)


def figures(root: Path) -> Iterator[tuple[str, Figure]]:
    """The figures of stage ``interventions`` below `root`: (file stem, figure)."""
    interchanges = pd.read_csv(root / "plots/interventions.csv")
    yield "interchange", interchange(interchanges)
    yield "interchange_by_moment", by_moment(interchanges)
    yield "ablation", ablation(pd.read_csv(root / "plots/interventions_ablation.csv"))
