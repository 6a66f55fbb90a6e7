"""The gradient on layer 2's query-key matrix, over variables, beside what training makes of it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stages.core.task import read_table
from stages.draw import style

WORDS = {
    "initialisation": "initialisation",
    "addition": "addition",
    "spike_before": "before the spike",
    "spike": "after the spike",
    "final": "end",
}
GIVEN = {
    ("own", "own"): "as it is",
    ("own", "orthonormal"): "$V$ orthonormal",
    ("routed", "own"): "layer 1 routed",
    ("routed", "orthonormal"): "layer 1 routed,\n$V$ orthonormal",
}  # which of the theory's assumptions are put in by hand: layer 1, V
IDEAL = ("routed", "orthonormal", "ideal")


def blocks_beside_identity(blocks: pd.DataFrame, identity: pd.DataFrame, measures: pd.DataFrame) -> Figure:
    """The gradient's block at each moment, one row for each of `GIVEN`; last, what was learned and what theory says.

    Args:
        blocks: (step, moment, layer1, V, form, query, key, value); the form ``both`` is drawn.
        identity: (query, key, value) of the final V QK2 Vᵀ.
        measures: the table of plots/gradient.csv.
    """
    keys = ["form", "layer1", "V", "moment"]
    blocks, cosines = dict(list(blocks.groupby(keys))), measures.set_index(keys).cosine_identity
    moments = [moment for moment in WORDS if ("both", "own", "own", moment) in blocks]
    fig, axes = style.figure(style.PAGE, 6.4, len(GIVEN), len(moments) + 1, squeeze=False)
    for row, (given, words) in enumerate(GIVEN.items()):
        for ax, moment in zip(axes[row], moments, strict=False):
            block = blocks["both", *given, moment]
            largest = draw_block(ax, block)
            cosine = round(cosines["both", *given, moment], 2) + 0.0  # adding 0 makes -0 plain
            ax.set_xlabel(f"cosine {cosine:.2f}\nlargest {scientific(largest)}".replace("-", "\N{MINUS SIGN}"))
            if row == 0:
                ax.set_title(f"{WORDS[moment]}\nstep {int(block.step.iloc[0]):,}")
        axes[row, 0].set_ylabel(words)
        axes[row, -1].set_axis_off()
    for row, block in {0: identity, -1: blocks["both", *IDEAL]}.items():
        axes[row, -1].set_axis_on()
        words = "idealised model\n" if row else ""
        axes[row, -1].set_xlabel(f"{words}largest {scientific(draw_block(axes[row, -1], block))}")
    axes[0, -1].set_title("learned:\n$V\\,QK_2V^\\top$")
    for ax in axes[:-1, :].flat:
        ax.tick_params(labelbottom=False)
    fig.supxlabel(
        "row: variable seen by =, column: variable seen by a number; red above 0, blue below;\n"
        "cosine: with the identity; full colour: each block's own largest entry in size",
        size=8,
    )
    return fig


def scientific(number: float) -> str:
    """A number with one digit and a power of ten."""
    digit, power = f"{number:.0e}".split("e")
    return f"${digit}\\cdot10^{{{int(power)}}}$"


def draw_block(ax: Axes, block: pd.DataFrame) -> float:
    """One block, white at zero, its largest entry in size in full colour; returns that size."""
    values = block.pivot(index="query", columns="key", values="value")
    limit = np.abs(values.to_numpy()).max()
    ax.imshow(values, cmap=style.DIVERGING, vmin=-limit, vmax=limit)
    ticks = [0, len(values) - 1]
    ax.set_xticks(ticks, values.columns[ticks])
    ax.set_yticks(ticks, values.index[ticks])
    ax.spines[["top", "right"]].set_visible(True)
    return limit


def figures(root: Path) -> Iterator[tuple[str, Figure]]:
    """What this stage's results below `root` are drawn as."""
    blocks, identity = (
        read_table(root / f"data/gradient/{name}.parquet")[0].to_pandas() for name in ("blocks", "identity")
    )
    measures = pd.read_csv(root / "plots/gradient.csv")
    yield "gradient_blocks", blocks_beside_identity(blocks, identity, measures)
