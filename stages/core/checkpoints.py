"""A run's checkpoints as a sequence, and the named moments in it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from stages.core import params
from stages.core.params import InputError
from stages.core.task import Task
from stages.core.weights import Config, ModelConfig, Weights, check_config, load

CHECKPOINTS = Path("models/checkpoints")
MODEL = Path("models/model.safetensors")
MOMENTS = ("addition", "assignment", "refinement", "spike_before", "spike")


def find(folder: Path) -> dict[int, Path]:
    """Every checkpoint of a folder, by step, in order.

    Raises:
        InputError: there is none.
    """
    names = {file: re.fullmatch(r"step_(\d+)\.safetensors", file.name) for file in folder.glob("step_*.safetensors")}
    steps = {int(match[1]): file for file, match in names.items() if match}
    if not steps:
        raise InputError(
            f"{folder} holds no checkpoints: make them with `dvc repro train`, or get them with `dvc pull`"
        )
    return dict(sorted(steps.items()))


def load_all(folder: Path, params_file: Path = params.PARAMS) -> Iterator[tuple[int, Weights, Config]]:
    """The checkpoints in order, as (step, weights, config); see `load_checked`."""
    for step, file in find(folder).items():
        yield step, *load_checked(file, params_file)


def load_checked(file: Path, params_file: Path = params.PARAMS) -> tuple[Weights, Config]:
    """Load weights. Those that this pipeline made must be of the task and sizes that params.yaml says.

    Weights from elsewhere stand for themselves.

    Raises:
        InputError: the file is damaged, or this pipeline's and made with other parameters.
    """
    weights, config = load(file)
    if file == MODEL or file.parent == CHECKPOINTS:
        wanted = Config(params.read(params_file, "task", Task), params.read(params_file, "model", ModelConfig))
        check_config(config, wanted, str(file))
    return weights, config


def read_moments(file: Path) -> dict[str, int | None]:
    """The steps of the phases and of the spike from metrics/progress.json; None for what was not reached."""
    try:
        metrics = json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise InputError(f"{file} cannot be read ({error}): make it with `dvc repro progress`") from None
    return {name: metrics[name] for name in MOMENTS}
