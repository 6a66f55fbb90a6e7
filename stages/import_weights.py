"""A tool, not a stage: TransformerLens 2.x state dicts, such as the published ones, become this project's weights.

One state dict becomes one safetensors file; a folder of ``checkpoint_step_*.pth`` becomes a folder of checkpoints that
every stage takes as ``--checkpoints``. Code inside a pickle is never run.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from stages.core import params, weights
from stages.core.bridge import from_state_dict
from stages.core.params import InputError
from stages.core.weights import Config


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Read what `torch.save` wrote, tensors alone.

    Raises:
        InputError: the file is missing, damaged, or a pickle that wants code.
    """
    if not file.is_file():
        raise InputError(f"{file} does not exist")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # unpickling damaged bytes raises whatever the bytes lead to
        raise InputError(f"{file} is damaged, or holds more than tensors (code in a pickle is never run)") from None


def find_state_dicts(folder: Path) -> dict[int, Path]:
    """The published run's checkpoints of a folder, by step, in order.

    Raises:
        InputError: there is none.
    """
    names = {file: re.fullmatch(r"checkpoint_step_(\d+)\.pth", file.name) for file in folder.iterdir()}
    steps = {int(match[1]): file for file, match in names.items() if match}
    if not steps:
        raise InputError(f"{folder} holds no checkpoint_step_*.pth")
    return dict(sorted(steps.items()))


def import_file(source: Path, out: Path, left_only: int, right_only: int) -> None:
    """Turn one state dict into one weights file, or nothing."""
    w, config = from_state_dict(read_state_dict(source), left_only, right_only, str(source))
    if out.is_dir():
        raise InputError(f"{out} is a folder: name the file that {source} should become")
    out.parent.mkdir(parents=True, exist_ok=True)
    weights.save(out, w, config)


def import_folder(source: Path, out: Path, left_only: int, right_only: int) -> int:
    """Turn a folder of state dicts into a folder of checkpoints, or nothing.

    Returns:
        how many there are.

    Raises:
        InputError: one of them cannot be imported or is of other sizes than the first, or `out` holds something.
    """
    files = find_state_dicts(source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} holds something already: name a folder that is empty or does not exist")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    first: Config | None = None
    try:
        for step, file in files.items():
            w, config = from_state_dict(read_state_dict(file), left_only, right_only, str(file))
            first = first or config
            if config != first:
                raise InputError(f"{file} is of other sizes than {next(iter(files.values()))}")
            weights.save(partial / weights.checkpoint_name(step), w, config)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return len(files)


def main(
    source: Annotated[Path, typer.Argument(help="A state dict (.pth), or a folder of checkpoint_step_*.pth.")],
    out: Annotated[Path, typer.Option(help="File to write; for a folder of state dicts, the folder to make.")],
    left_only: Annotated[int, typer.Option(min=0, help="How many first variables never stood right of +.")] = 2,
    right_only: Annotated[int, typer.Option(min=0, help="How many last variables never stood left of +.")] = 2,
) -> None:
    """Import TransformerLens 2.x state dicts."""
    if source.is_dir():
        count = import_folder(source, out, left_only, right_only)
        print(f"imported {count} checkpoints into {out}")
    else:
        import_file(source, out, left_only, right_only)
        print(f"imported {source} as {out}")


if __name__ == "__main__":
    params.run(main)
