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
    files = find(folder)
    wanted = wanted_config(min(files.values()), params_file)
    for step, file in files.items():
        yield step, *_load(file, wanted)


def load_checked(file: Path, params_file: Path = params.PARAMS) -> tuple[Weights, Config]:
    """Load weights. Those that this pipeline made must be of the task and sizes that params.yaml says.

    Weights from elsewhere stand for themselves.

    Raises:
        InputError: the file is damaged, or this pipeline's and made with other parameters.
    """
    return _load(file, wanted_config(file, params_file))


def wanted_config(file: Path, params_file: Path) -> Config | None:
    """The task and sizes that a file of this pipeline must have; None for one from elsewhere."""
    if file.resolve() != MODEL.resolve() and file.resolve().parent != CHECKPOINTS.resolve():
        return None
    return Config(params.read(params_file, "task", Task), params.read(params_file, "model", ModelConfig))


def final_model(model: Path | None, folder: Path) -> Path:
    """The final weights that go with a folder of checkpoints: those named, this pipeline's, or the last checkpoint."""
    if model is not None:
        return model
    return MODEL if folder.resolve() == CHECKPOINTS.resolve() else list(find(folder).values())[-1]


def _load(file: Path, wanted: Config | None) -> tuple[Weights, Config]:
    weights, config = load(file)
    if wanted is not None:
        check_config(config, wanted, str(file))
    return weights, config


def read_moments(file: Path) -> dict[str, int | None]:
    """The steps of the phases and of the spike from metrics/progress.json; None for what was not reached."""
    try:
        metrics = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}): make it with `dvc repro progress`") from None
    moments = {name: metrics.get(name, "missing") if isinstance(metrics, dict) else "missing" for name in MOMENTS}
    if not all(step is None or type(step) is int for step in moments.values()):
        raise InputError(f"{file} is not what stage progress writes: make it with `dvc repro progress`")
    return moments
