"""One look for every figure: sizes for a printed column, colours that colour-blind readers can tell apart."""

from pathlib import Path

import matplotlib
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

COLUMN = 3.4  # inches, the width of one column of a two-column page
PAGE = 7.0  # inches, both columns

# Okabe and Ito's palette, which keeps its contrasts under the common forms of colour blindness.
BLUE, ORANGE, GREEN, PINK, SKY, VERMILLION, YELLOW, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#000000",
)
FORM_COLOURS = {"0var": BLUE, "1var": VERMILLION, "2var": GREEN}

# By what is held out: the end of a split's name after its form.
KIND_STYLES = {
    "train": "-",
    "add_restricted": (0, (5, 1.5)),
    "var_restricted": (0, (1, 1)),
    "var_restricted_1": (0, (1, 1)),
    "var_restricted_2": (0, (1, 2.5)),
    "both_restricted": (0, (4, 1.2, 1, 1.2)),
    "both_restricted_1": (0, (4, 1.2, 1, 1.2)),
    "both_restricted_2": (0, (4, 1.2, 1, 1.2, 1, 1.2)),
}
KIND_WORDS = {
    "train": "trained pair and positions",
    "add_restricted": "held-out pair",
    "var_restricted": "one held-out position",
    "var_restricted_1": "one held-out position",
    "var_restricted_2": "two held-out positions",
    "both_restricted": "held-out pair, one held-out position",
    "both_restricted_1": "held-out pair, one held-out position",
    "both_restricted_2": "held-out pair, two held-out positions",
}
LIGHTER = ("var_restricted_2", "both_restricted_2")  # on thin lines, dashes alone do not tell one from two positions
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"

SETTINGS = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 200,
}


def kind_colour(colour: str, kind: str) -> str:
    """A form's colour for one kind of split, half as strong with two held-out positions."""
    return to_hex([(1 + part) / 2 for part in to_rgb(colour)]) if kind in LIGHTER else colour


def figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: object) -> tuple[Figure, object]:
    """A figure in the common style, and its axes; width and height in inches, options as for `Figure.subplots`."""
    matplotlib.rcParams.update(SETTINGS)
    fig = Figure(figsize=(width, height), layout="constrained")
    return fig, fig.subplots(rows, columns, **options)


def save(fig: Figure, path: Path) -> None:
    """Write a PNG whose bytes depend on the picture alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, metadata={"Software": None})
