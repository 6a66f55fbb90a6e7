"""Figures of the linear probes: accuracy by target and residual point, with the controls beside it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from stages.draw import style

POINT_WORDS = {"embed": "embedding", "layer1": "layer 1", "attn2": "layer 2\nattention", "mlp2": "layer 2\nMLP"}
TARGET_WORDS = {
    "variable_at_number": "number: its variable",
    "value_at_operand": "operand: its value",
    "distractor_at_operand": "operand: a distractor's value",
    "left_variable_at_equals": "=: left variable",
    "right_variable_at_equals": "=: right variable",
    "left_value_at_equals": "=: left value",
    "right_value_at_equals": "=: right value",
    "answer_at_equals": "=: answer",
}


def figures(root: Path) -> Iterator[tuple[str, Figure]]:
    """The stage's figures, by file stem, from plots/ below `root`."""
    yield "probe", accuracy(pd.read_csv(root / "plots/probe.csv"))


def accuracy(table: pd.DataFrame) -> Figure:
    """Test accuracy of every probe, target by residual point, and of its control.

    Args:
        table: columns target, point, accuracy, control_accuracy, chance.
    """
    fig, (left, right) = style.figure(style.PAGE, 3.1, columns=2, sharey=True)
    image = _heat_map(left, table, "accuracy", "probe")
    _heat_map(right, table, "control_accuracy", "control (random label per token or pair)")
    chance = table.groupby("target", sort=False).chance.first()
    words = [f"{TARGET_WORDS[target]} ({by_chance:.2g})" for target, by_chance in chance.items()]
    left.set_yticks(range(len(words)), words)
    left.set_ylabel("read at: what (chance)")
    fig.supxlabel("residual stream after", fontsize=8)
    fig.colorbar(image, ax=[left, right], label="test accuracy", shrink=0.9)
    return fig


def _heat_map(ax: Axes, table: pd.DataFrame, column: str, title: str) -> AxesImage:
    """One panel: a cell for each target (row) and point (column), with its value written in it."""
    grid = table.pivot(index="target", columns="point", values=column)
    grid = grid.loc[table.target.unique(), table.point.unique()]
    image = ax.imshow(grid, vmin=0, vmax=1, cmap=style.SEQUENTIAL, aspect="auto")
    for (row, point), value in np.ndenumerate(grid.to_numpy()):
        ax.text(point, row, f"{value:.2f}", ha="center", va="center", color="white" if value < 0.6 else "black")
    ax.set_xticks(range(grid.shape[1]), [POINT_WORDS[point] for point in grid.columns])
    ax.set_title(title)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return image
