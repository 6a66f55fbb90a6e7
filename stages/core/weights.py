"""The model's weights: sizes, initialisation, and safetensors files that carry the task and the sizes.

Weights are a dictionary from TransformerLens's property names to tensors. Only what is trained is in it: no biases, no
normalisation, no MLP in the first layer (paper, section 3; appendix on training).
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from stages.core.params import InputError, Section
from stages.core.task import Task

Weights = dict[str, Tensor]


class ModelConfig(Section):
    """Section ``model``: the sizes of the two-layer transformer."""

    d_model: int = Field(ge=1)
    d_head: int = Field(ge=1)
    n_heads: int = Field(ge=1)
    d_mlp: int = Field(ge=1)


@dataclass(frozen=True)
class Config:
    """What a weights file says about itself: the task that the model was trained on, and its sizes."""

    task: Task
    model: ModelConfig

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every trained weight by its TransformerLens name, in the order of initialisation."""
        return {name: shape for name, shape in _drawn(self).items() if not name.startswith("blocks.0.mlp.")}


def _drawn(config: Config) -> dict[str, tuple[int, ...]]:
    """Every matrix that initialisation draws, in its order; layer 1's MLP is drawn and thrown away."""
    m, task = config.model, config.task
    shapes = {"embed.W_E": (task.vocabulary, m.d_model), "pos_embed.W_pos": (task.context, m.d_model)}
    for layer in (0, 1):
        shapes |= {
            f"blocks.{layer}.attn.W_Q": (m.n_heads, m.d_model, m.d_head),
            f"blocks.{layer}.attn.W_O": (m.n_heads, m.d_head, m.d_model),
            f"blocks.{layer}.attn.W_K": (m.n_heads, m.d_model, m.d_head),
            f"blocks.{layer}.attn.W_V": (m.n_heads, m.d_model, m.d_head),
            f"blocks.{layer}.mlp.W_in": (m.d_model, m.d_mlp),
            f"blocks.{layer}.mlp.W_out": (m.d_mlp, m.d_model),
        }
    return shapes | {"unembed.W_U": (m.d_model, task.N)}


def initialise(config: Config, seed: int) -> Weights:
    """Draw every matrix from normal(0, 0.8/sqrt(d_model)) in the order that the published run drew them.

    Returns:
        float32 weights on the CPU; the same bits for the same sizes and seed.
    """
    generator = torch.Generator().manual_seed(seed)
    std = 0.8 / config.model.d_model**0.5
    drawn = {name: torch.empty(shape).normal_(0, std, generator=generator) for name, shape in _drawn(config).items()}
    return {name: drawn[name] for name in config.shapes()}


def save(path: Path, weights: Weights, config: Config) -> None:
    """Write a safetensors file whose metadata holds the config, complete or not at all."""
    metadata = {"config": json.dumps({"task": config.task.model_dump(), "model": config.model.model_dump()})}
    partial = path.with_name(path.name + ".partial")
    tensors = {name: w.detach().to("cpu", torch.float32).contiguous() for name, w in weights.items()}
    partial.write_bytes(serialise(tensors, metadata))  # unlike save_file, readable for whom the umask allows it
    os.replace(partial, path)


def checkpoint_name(step: int) -> str:
    """File name of the weights after `step` updates; names sort like steps."""
    return f"step_{step:08d}.safetensors"


def load(path: Path) -> tuple[Weights, Config]:
    """Read a weights file and check every shape against the config in it.

    Raises:
        InputError: the file is missing, damaged, not this project's, or holds weights of other sizes than it says.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iteration on the file)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: make it with `dvc repro`, or get it with `dvc pull`") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged or no safetensors file ({' '.join(str(error).split())})") from None
    if "config" not in metadata:
        raise InputError(f"{path} does not say which task and sizes it is for: it was not written by this project")
    try:
        said = json.loads(metadata["config"])
        config = Config(Task.parse(said["task"], "task"), ModelConfig.parse(said["model"], "model"))
    except (KeyError, TypeError, json.JSONDecodeError, InputError) as error:
        raise InputError(f"{path} has a config that cannot be read ({error})") from None
    check_shapes({name: tuple(w.shape) for name, w in weights.items()}, config, str(path))
    return {name: weights[name] for name in config.shapes()}, config


def check_shapes(found: dict[str, tuple[int, ...]], config: Config, where: str) -> None:
    """Compare shapes with what a config needs.

    Raises:
        InputError: a weight is missing, unknown, or of another size.
    """
    needed = config.shapes()
    if odd := found.keys() ^ needed.keys():
        name = min(odd)
        raise InputError(f"{where}: weight {name} is {'missing' if name in needed else 'unknown to this model'}")
    for name, shape in needed.items():
        if found[name] != shape:
            raise InputError(f"{where}: {name} has the shape {found[name]}, the parameters say {shape}")


def check_config(found: Config, wanted: Config, where: str) -> None:
    """Refuse weights made with another task or other sizes than params.yaml says.

    Raises:
        InputError: names the first parameter that differs, with both values.
    """
    for name in ("task", "model"):
        for key, value in getattr(wanted, name).model_dump().items():
            other = getattr(getattr(found, name), key)
            if other != value:
                raise InputError(
                    f"{where} was made with {name}.{key} = {other}, but params.yaml says {name}.{key} = {value}: "
                    "run `dvc repro`, or set the parameter back"
                )
