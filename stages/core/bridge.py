"""A model's weights as a TransformerLens bridge, and TransformerLens 2.x state dicts as this project's weights.

The bridge is the reference for `stages.core.circuit_form`, and the tool for hooks and caches. TransformerLens wants
biases everywhere and an MLP in every layer; this project's model has no biases and no MLP in layer 1 (paper,
section 3). So zeros stand there in a bridge, and nothing else may stand there in a foreign state dict.
"""

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages.core.params import InputError
from stages.core.task import Task
from stages.core.weights import Config, ModelConfig, Weights, check_shapes

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

LAYERS = 2
FIRST_MLP = ("blocks.0.mlp.W_in", "blocks.0.mlp.W_out")


def to_bridge(weights: Weights, config: Config, dtype: torch.dtype = torch.float32) -> "TransformerBridge":
    """Build a TransformerLens model that computes what the weights compute; no tokenizer, no download.

    Args:
        weights: the trained weights, which are copied.
        config: their task and sizes.
        dtype: what the bridge computes in.

    Returns:
        a bridge on the CPU: tokens [B, T] → logits [B, T, N]. The zeros in it need no gradient, so that training it
        leaves it this project's model.
    """
    # Importing TransformerLens takes seconds; who only reads foreign state dicts need not wait for it.
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.utilities.tl_checkpoint_conversion import convert_tl_checkpoint

    task = config.task
    cfg = TransformerBridgeConfig(
        n_layers=LAYERS,
        n_ctx=task.context,
        d_vocab=task.vocabulary,
        d_vocab_out=task.N,
        act_fn="relu",
        normalization_type=None,
        init_weights=False,
        **config.model.model_dump(),
    )
    bridge = TransformerBridge.boot_native(cfg, dtype=dtype, model_name="assign-and-add")
    untrained = convert_tl_checkpoint(zeros(config), cfg)
    bridge.load_state_dict(convert_tl_checkpoint(weights, cfg) | untrained)
    parameters = bridge.state_dict(keep_vars=True)
    for name in untrained:
        parameters[name].requires_grad_(False)
    return bridge


def zeros(config: Config) -> Weights:
    """What TransformerLens wants beside the trained weights, by its names: every bias, and layer 1's MLP."""
    m = config.model
    shapes = dict(zip(FIRST_MLP, ((m.d_model, m.d_mlp), (m.d_mlp, m.d_model)), strict=True))
    for layer in range(LAYERS):
        shapes |= {f"blocks.{layer}.attn.b_{name}": (m.n_heads, m.d_head) for name in "QKV"}
        shapes |= {f"blocks.{layer}.attn.b_O": (m.d_model,)}
        shapes |= {f"blocks.{layer}.mlp.b_in": (m.d_mlp,), f"blocks.{layer}.mlp.b_out": (m.d_model,)}
    shapes["unembed.b_U"] = (config.task.N,)
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def from_state_dict(
    state_dict: dict[str, Tensor], left_only: int, right_only: int, where: str = "the state dict"
) -> tuple[Weights, Config]:
    """Take the weights out of the state dict of a TransformerLens 2.x `HookedTransformer`.

    All sizes follow from the shapes. The first MLP counts as absent if one of its matrices is zero throughout, as both
    are in the published weights: without biases it then adds nothing. A state dict does not tell the activation
    function, the scale of attention scores, or normalisation without weights; these are taken to be this project's.

    Args:
        state_dict: TransformerLens's names and tensors.
        left_only, right_only: how many variables have held-out sides, which a state dict does not tell either.
        where: what messages call the state dict.

    Returns:
        float32 weights and the config that they fit.

    Raises:
        InputError: it is no such state dict, or of a model that this project cannot represent.
    """
    if not isinstance(state_dict, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state_dict.items()
    ):
        raise InputError(f"{where} is no state dict: it must map names to tensors")
    config = _config_of(state_dict, left_only, right_only, where)
    for name, tensor in state_dict.items():
        if reason := _refuse(name, tensor, config):
            raise InputError(f"{where}: {reason}")
    if all(name in state_dict and state_dict[name].any() for name in FIRST_MLP):
        raise InputError(f"{where}: {FIRST_MLP[0]} and {FIRST_MLP[1]} are not zero; this project's layer 1 has no MLP")
    weights = {name: state_dict[name].to(torch.float32) for name in config.shapes() if name in state_dict}
    check_shapes({name: tuple(w.shape) for name, w in weights.items()}, config, where)
    return weights, config


def _config_of(state_dict: dict[str, Tensor], left_only: int, right_only: int, where: str) -> Config:
    """Read all sizes off the shapes; whether the other shapes agree with them is for `check_shapes`."""
    try:
        vocabulary, d_model = state_dict["embed.W_E"].shape
        context, _ = state_dict["pos_embed.W_pos"].shape
        n_heads, _, d_head = state_dict["blocks.0.attn.W_Q"].shape
        _, d_mlp = state_dict["blocks.1.mlp.W_in"].shape
        _, N = state_dict["unembed.W_U"].shape
    except KeyError as error:
        raise InputError(f"{where} has no {error.args[0]}: it is no two-layer TransformerLens model") from None
    except ValueError:
        raise InputError(f"{where}: its matrices do not have the dimensions of a TransformerLens model's") from None
    task = {"N": N, "variables": vocabulary - N - 3, "context": context}  # beside numbers and variables: + = padding
    held_out = {"left_only": left_only, "right_only": right_only}
    sizes = {"d_model": d_model, "d_head": d_head, "n_heads": n_heads, "d_mlp": d_mlp}
    return Config(Task.parse(task | held_out, f"{where}: task"), ModelConfig.parse(sizes, f"{where}: model"))


def _refuse(name: str, tensor: Tensor, config: Config) -> str | None:
    """Why a tensor cannot be part of this project's model; None if it can, or is no weight."""
    if name in config.shapes() or name in FIRST_MLP or name.endswith(".attn.IGNORE"):
        return None
    if name.endswith(".attn.mask"):
        causal = torch.ones(config.task.context, config.task.context).tril().bool()
        return None if torch.equal(tensor.bool(), causal) else f"{name} is not causal, as this project's attention is"
    if name in zeros(config):
        return f"{name} is not zero; this project's model has no biases" if tensor.any() else None
    if (layer := re.match(r"blocks\.(\d+)\.", name)) and int(layer[1]) >= LAYERS:
        return f"there is {name}; this project's model has {LAYERS} layers"
    if re.search(r"\bln", name):
        return f"there is {name}; this project's model has no normalisation"
    return f"there is {name}, for which this project's model has no place"
