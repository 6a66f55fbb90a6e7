"""Attention patterns, position and identity circuits, shared adder, refinement and score decomposition."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from stages.core.task import read_table
from stages.draw import style
from stages.parts.decomposition import BEST_WRONG, PARTS
from stages.parts.refinement import SIDES

MOMENT_WORDS = {
    "spike_before": "before the spike",
    "spike": "after the spike",
    "assignment": "at assignment",
    "final": "at the end",
}
TABLES = (
    "attention",
    "position",
    "identity",
    "scores",
    "one_adder",
    "additivity",
    "accuracy_by_side",
    "scores_from_equals",
)
HELD_OUT = style.VERMILLION
OUTLINE = {"fill": False, "edgecolor": style.VERMILLION, "linewidth": 1.2}
OUTLINED = """where attention that solves the task goes: in layer 1 from a number to its variable
and from = to both operands, in layer 2 from = to both values"""


def attention(table: pd.DataFrame, when: str) -> Figure:
    """Layer 1's attention on each example, and below it layer 2's from ``=``; outlined where it should look.

    Args:
        table: of `attention_table`, at one moment.
        when: the moment in words.
    """
    examples = table.sequence.unique()
    rows, columns = -(-len(examples) // 2), 2
    context = table["query"].max() + 1
    fig, axes = style.figure(
        style.PAGE,
        4.15 * rows + 0.6,
        2 * rows,
        columns,
        squeeze=False,
        gridspec_kw={"height_ratios": [context, 1] * rows},
    )
    top = max(1.0, table.weight.max())
    for i, example in enumerate(examples):
        row, column = divmod(i, columns)
        for layer in (1, 2):
            axis = axes[2 * row + layer - 1, column]
            part = table[(table.sequence == example) & (table.layer == layer)]
            image = _pattern(axis, part, top)
            axis.set_ylabel(f"layer {layer}" + (", query" if layer == 1 else ""))
            if layer == 1:
                left, right = part[part["query"] == context - 1].key_token.iloc[[-3, -2]]
                axis.set_title(f"the sum {left} + {right}")
                axis.set_xticks([])
            else:
                axis.set_xlabel("key")
    fig.colorbar(image, ax=axes, label="attention weight", shrink=0.4, aspect=30)
    fig.suptitle(f"attention {when}", fontsize=9)
    fig.legend([Rectangle((0, 0), 1, 1, **OUTLINE)], [OUTLINED], loc="outside lower center", handlelength=1.4)
    return fig


def _pattern(axis: Axes, part: pd.DataFrame, top: float) -> object:
    """Weights of one layer on one sequence as an image with its tokens; the outline marks those that matter."""
    weights = part.pivot(index="query", columns="key", values="weight")
    image = axis.imshow(weights, cmap=style.SEQUENTIAL, vmin=0, vmax=top, aspect="auto")
    words = part.drop_duplicates("key").sort_values("key").key_token
    axis.set_xticks(range(len(words)), words)
    axis.set_yticks(range(len(weights)), part.drop_duplicates("query").sort_values("query").query_token)
    axis.tick_params(length=0)
    first = part["query"].min()
    for query, key in part.loc[part.matters, ["query", "key"]].to_numpy():
        outline = Rectangle((key - 0.5, query - first - 0.5), 1, 1, **OUTLINE)
        outline.set_clip_on(False)
        axis.add_patch(outline)
    return image


def circuits(position: pd.DataFrame, identity: pd.DataFrame, when: dict[str, str]) -> Figure:
    """Position circuit beside variable identity, one row a moment; one colour scale for each circuit.

    From each row its mean is taken: attention depends on differences within a row alone.

    Args:
        position: moment, query, key (positions), score.
        identity: moment, query, key (variables), score.
        when: the moments to show, in words.
    """
    fig, axes = style.figure(style.PAGE, 3.1 * len(when), len(when), 2, squeeze=False)
    shown = (
        (position, "position circuit", "$P\\,QK_1P^\\top$", "position"),
        (identity, "variable identity", "$V\\,QK_2V^\\top$", "variable"),
    )
    for column, (table, title, formula, unit) in enumerate(shown):
        table = table[table.moment.isin(when)]
        table = table.assign(score=table.score - table.groupby(["moment", "query"]).score.transform("mean"))
        limit = table.score.abs().max()
        for axis, (moment, words) in zip(axes[:, column], when.items(), strict=True):
            scores = table[table.moment == moment].pivot(index="query", columns="key", values="score")
            image = axis.imshow(scores, cmap=style.DIVERGING, vmin=-limit, vmax=limit)
            axis.set_xticks(range(len(scores)), scores.columns)
            axis.set_yticks(range(len(scores)), scores.index)
            axis.tick_params(length=0)
            axis.set_title(f"{title}\n{words}")
            axis.set_xlabel(f"key {unit}")
            axis.set_ylabel(f"query {unit}")
            fig.colorbar(image, ax=axis, label=f"{formula} less its row's mean")
    return fig


def cosines(one_adder: pd.DataFrame, additivity: pd.DataFrame) -> Figure:
    """Histograms of the cosines: the adder's input between forms, and OV2's sum against attention, with controls."""
    fig, (above, below) = style.figure(style.COLUMN, 4.2, rows=2)
    bins = np.linspace(-1, 1, 81)
    for form in ("1var", "2var"):
        colour = style.FORM_COLOURS[form]
        _histogram(above, bins, one_adder[f"cosine_{form}"], colour, f"{form}, same pair", filled=True)
        _histogram(above, bins, one_adder[f"mismatched_{form}"], colour, f"{form}, another pair", filled=False)
    above.set_title("adder's input, in this form and in 0var", loc="left")
    colour = style.FORM_COLOURS["0var"]
    _histogram(below, bins, additivity.cosine, colour, "same pair", filled=True)
    _histogram(below, bins, additivity.shuffled, colour, "$n_2$ of another pair", filled=False)
    below.set_title("$E_{n_1}OV_2 + E_{n_2}OV_2$ and attention output", loc="left")
    for axis in (above, below):
        axis.set_xlabel("cosine similarity")
        axis.set_ylabel("share of pairs")
        axis.set_xlim(-1, 1)
        axis.legend(loc="upper left")
    return fig


def _histogram(axis: Axes, bins: np.ndarray, values: pd.Series, colour: str, words: str, filled: bool) -> None:
    """Shares of values by bin; controls are not filled."""
    look = {"histtype": "stepfilled", "alpha": 0.6} if filled else {"histtype": "step", "linewidth": 1.2}
    shares = np.full(len(values), 1 / len(values))
    axis.hist(values, bins, weights=shares, color=colour, label=f"{words} (mean {values.mean():.2f})", **look)


def accuracy_by_side(table: pd.DataFrame) -> Figure:
    """Accuracy of each variable on each side against step, as a heat map; held-out positions coloured.

    Args:
        table: step, side, variable, held_out, accuracy.
    """
    fig, axes = style.figure(style.COLUMN, 4.6, rows=2, sharex=True)
    for axis, side in zip(axes, SIDES, strict=True):
        part = table[table.side == side]
        accuracy = part.pivot(index="variable", columns="step", values="accuracy")
        image = axis.imshow(accuracy, cmap=style.SEQUENTIAL, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axis.set_yticks(range(len(accuracy)), accuracy.index)
        held_out = set(part[part.held_out].variable)
        for label in axis.get_yticklabels():
            if label.get_text() in held_out:
                label.set(color=HELD_OUT, fontweight="bold")
        axis.set_ylabel(f"variable on the {side}")
        axis.tick_params(axis="y", length=0)
    ticks = np.unique(np.linspace(0, accuracy.shape[1] - 1, 4).round().astype(int))
    axes[-1].set_xticks(ticks, accuracy.columns[ticks])
    axes[-1].set_xlabel("training step")
    if table.held_out.any():
        axes[0].set_title("coloured letter: never shown there in training", loc="left", color=HELD_OUT, fontsize=7)
    fig.colorbar(image, ax=axes, label="accuracy", aspect=40)
    return fig


def scores_from_equals(table: pd.DataFrame, accuracy: pd.DataFrame) -> Figure:
    """Layer 1's scores from ``=`` to each variable and to the operand positions, against step.

    Args:
        table: step, key, score.
        accuracy: says which variables have a held-out side.
    """
    fig, axis = style.figure(style.COLUMN, 3.0)
    held_out = accuracy.loc[accuracy.held_out, ["variable", "side"]].drop_duplicates()
    sides = held_out.groupby("variable").side.agg(" or ".join)
    colours = itertools.cycle((style.SKY, style.BLUE, style.ORANGE, style.VERMILLION, style.GREEN, style.PINK))
    for key, part in table.groupby("key", sort=False):
        if key in SIDES:
            look = {"color": style.BLACK, "linestyle": "-" if key == SIDES[0] else ":", "label": f"{key} position"}
        elif key in sides:
            look = {"color": next(colours), "label": f"{key} (never {sides[key]} in training)"}
        else:
            look = {"color": "0.75", "linewidth": 0.8, "zorder": 0, "label": "other variables"}
        axis.plot(part.step, part.score, **look)
    lines, words = axis.get_legend_handles_labels()
    axis.set_xlabel("training step")
    axis.set_ylabel("layer 1's score from =")
    axis.margins(x=0.03)
    named = dict(zip(words, lines, strict=True))  # one entry for all the grey lines
    fig.legend(named.values(), named.keys(), loc="outside lower center", ncols=2)
    return fig


def score_decomposition(table: pd.DataFrame, when: dict[str, str]) -> Figure:
    """Layer 2's scores from ``=`` in 1var sequences as 3 × 3 terms, one row a moment.

    Args:
        table: of `score_decomposition`, with moment.
        when: the moments to show, in words.
    """
    table = table[(table.form == "1var") & table.moment.isin(when)]
    cases = [
        (held_out, position)
        for held_out, kind in ((0, "trained"), (1, "held out"))
        for position in (kind, "constant", BEST_WRONG)
        if (table.held_out == held_out).any()
    ]
    titles = {"trained": "variable's value", "held out": "variable's value", "constant": "constant"}
    fig, axes = style.figure(style.PAGE, 1.3 * len(when) + 0.7, len(when), len(cases), squeeze=False)
    limit = table.score.abs().max()
    for row, (moment, words) in zip(axes, when.items(), strict=True):
        for axis, (held_out, position) in zip(row, cases, strict=True):
            part = table[(table.moment == moment) & (table.held_out == held_out) & (table.position == position)]
            scores = part.pivot(index="query_part", columns="key_part", values="score").loc[[*PARTS], [*PARTS]]
            image = axis.imshow(scores, cmap=style.DIVERGING, vmin=-limit, vmax=limit)
            for (q, k), score in np.ndenumerate(scores.to_numpy()):
                colour = "white" if abs(score) > 0.6 * limit else "black"
                axis.text(k, q, _tenths(score), ha="center", va="center", fontsize=6, color=colour)
            axis.set_title(f"{titles.get(position, position)}\nsum {_tenths(scores.to_numpy().sum())}", fontsize=7)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.tick_params(length=0)
        row[0].set_yticks(range(len(PARTS)), PARTS)
        row[0].set_ylabel(f"{words}\nquery's part", fontsize=7)
    for axis, (held_out, position) in zip(axes[-1], cases, strict=True):
        axis.set_xticks(range(len(PARTS)), PARTS, rotation=45, ha="right", rotation_mode="anchor")
        if position == "constant":  # the middle of its three
            axis.set_xlabel("key's part\n" + (f"variable in a {'held-out' if held_out else 'trained'} position"))
    fig.colorbar(image, ax=axes, label="layer 2's score from =", aspect=30)
    return fig


def _tenths(score: float) -> str:
    """A number with one decimal, and no minus before a zero."""
    return f"{round(score, 1) + 0.0:.1f}"


def figures(root: Path) -> Iterator[tuple[str, Figure]]:
    """Every figure of data/circuits below `root` by file stem; those of moments that were not reached are left out."""
    tables = {name: read_table(root / f"data/circuits/{name}.parquet")[0].to_pandas() for name in TABLES}
    by_moment = tables["attention"].groupby("moment", sort=False)
    steps = json.loads((root / "metrics/progress.json").read_text())
    steps["final"] = int(pd.read_csv(root / "plots/accuracy.csv").step.iloc[-1])
    when = {moment: f"{MOMENT_WORDS[moment]}, step {steps[moment]:,}" for moment in by_moment.groups}
    for moment in ("spike_before", "spike", "final"):
        if moment in when:
            yield f"circuits_attention_{moment}", attention(by_moment.get_group(moment), when[moment])
    final = {"final": when["final"]}
    yield "circuits_position_identity", circuits(tables["position"], tables["identity"], final)
    if {"spike_before", "spike"} <= when.keys():
        sides = {moment: when[moment] for moment in ("spike_before", "spike")}
        yield "circuits_position_identity_spike", circuits(tables["position"], tables["identity"], sides)
    yield "circuits_cosines", cosines(tables["one_adder"], tables["additivity"])
    if len(tables["accuracy_by_side"]):
        yield "circuits_accuracy_by_side", accuracy_by_side(tables["accuracy_by_side"])
        scores = scores_from_equals(tables["scores_from_equals"], tables["accuracy_by_side"])
        yield "circuits_scores_from_equals", scores
    learned = {moment: when[moment] for moment in ("assignment", "final") if moment in when}
    yield "circuits_score_decomposition", score_decomposition(tables["scores"], learned)
