"""Every picture, drawn from what the other stages wrote; no model is read.

The drawing itself stands in stages/draw, one module for each stage whose results it shows.
"""

from pathlib import Path
from typing import Annotated

import typer

from stages.core import params
from stages.core.params import InputError
from stages.draw import circuits, evaluate, fourier, gradient, interventions, probe, progress, style

DRAWN = (evaluate, progress, circuits, fourier, probe, gradient, interventions)


def main(
    out: Annotated[Path, typer.Option(help="Folder below which results are and plots/figures/ goes.")] = Path("."),
) -> None:
    """Draw every figure."""
    drawn = {}
    for module in DRAWN:
        try:
            drawn |= dict(module.figures(out))
        except FileNotFoundError as error:
            raise InputError(f"{error.filename} does not exist: make it with `dvc repro`") from None
    folder = out / "plots/figures"
    for old in folder.glob("*.png"):  # a picture of a phase that is no longer reached would stay
        old.unlink()
    for stem, figure in drawn.items():
        style.save(figure, folder / f"{stem}.png")


if __name__ == "__main__":
    params.run(main)
