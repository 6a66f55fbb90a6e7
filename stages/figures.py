"""Every picture, drawn from what the other stages wrote; no model is read.

The drawing itself stands in stages/draw, one module for each stage whose results it shows.
"""

from pathlib import Path
from typing import Annotated

import typer

from stages.core import params
from stages.draw import circuits, evaluate, fourier, gradient, interventions, probe, progress, style

DRAWN = (evaluate, progress, circuits, fourier, probe, gradient, interventions)


def main(
    out: Annotated[Path, typer.Option(help="Folder below which results are and plots/figures/ goes.")] = Path("."),
) -> None:
    """Draw every figure."""
    for module in DRAWN:
        for stem, figure in module.figures(out):
            style.save(figure, out / "plots/figures" / f"{stem}.png")


if __name__ == "__main__":
    params.run(main)
