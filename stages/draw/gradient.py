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


def blocks_beside_identity(blocks: pd.DataFrame, identity: pd.DataFrame, measures: pd.DataFrame) -> Figure:
    """The gradient's block at each moment, with layer 1 as it is (top) and routed by hand (bottom); then the final block.

    Args:
        blocks: (step, moment, layer1, form, query, key, value); the form ``both`` is drawn.
        identity: (query, key, value) of the final V QK2 Vᵀ.
        measures: the table of plots/gradient.csv.
    """
    blocks, measures = (table[table.form == "both"] for table in (blocks, measures))
    moments = [moment for moment in WORDS if moment in set(blocks.moment)]
    fig, axes = style.figure(style.PAGE, 3.1, 2, len(moments) + 1, squeeze=False)
    for row, layer1 in enumerate(("own", "routed")):
        for ax, moment in zip(axes[row], moments, strict=False):
            here = {"moment": moment, "layer1": layer1}
            block, measured = (table[(table[list(here)] == pd.Series(here)).all(axis=1)] for table in (blocks, measures))
            draw_block(ax, block)
            ax.set_xlabel(f"cosine {measured.cosine_identity.item():+.2f}")
            if row == 0:
                ax.set_title(f"{WORDS[moment]}\nstep {block.step.iloc[0]:,}")
        axes[row, 0].set_ylabel({"own": "layer 1 as it is", "routed": "layer 1 routed\nby hand"}[layer1])
    draw_block(axes[0, -1], identity)
    axes[0, -1].set_title("learned\n$V\\,QK_2V^\\top$")
    draw_block(axes[1, -1], blocks[blocks.moment == "ideal"])
    axes[1, -1].set_title("idealised model")
    return fig


def draw_block(ax: Axes, block: pd.DataFrame) -> None:
    """One block, white at zero, its largest entry in full colour."""
    values = block.pivot(index="query", columns="key", values="value")
    limit = np.abs(values.to_numpy()).max()
    ax.imshow(values, cmap=style.DIVERGING, vmin=-limit, vmax=limit)
    ticks = [0, len(values) - 1]
    ax.set_xticks(ticks, values.columns[ticks])
    ax.set_yticks(ticks, values.index[ticks])
    ax.spines[["top", "right"]].set_visible(True)


def figures(root: Path) -> Iterator[tuple[str, Figure]]:
    """What this stage's results below `root` are drawn as."""
    blocks, identity = (
        read_table(root / f"data/gradient/{name}.parquet")[0].to_pandas() for name in ("blocks", "identity")
    )
    measures = pd.read_csv(root / "plots/gradient.csv")
    yield "gradient_blocks", blocks_beside_identity(blocks, identity, measures)
