"""Runs of a model through TransformerLens with hooks at work: its answers, and its activations.

Shapes: B sequences of T tokens (b in a batch), d = d_model.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stages.parts.interchange import LAYER1

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

BATCH = 1024  # sequences at a time

Hooks = list[tuple[str, Callable[..., Tensor]]]


def _last(activation: Tensor, hook: Any) -> Tensor:
    """[b, T, d] → [b, 1, d]."""
    return activation[:, -1:]


# Only the last position's logits are read, so that only this position is computed where no other part reads the rest.
# The result is added to the residual stream at every position: right at the last one, and everywhere for layer 1's MLP,
# which is zero.
ONLY_LAST: Hooks = [(f"blocks.{part}.hook_in", _last) for part in ("0.mlp.in", "1.attn.o", "1.mlp.in")]


def to_tensor(tokens: np.ndarray) -> Tensor:
    """Token ids as torch indexes with them."""
    return torch.from_numpy(tokens.astype(np.int64))


def batches(size: int) -> Iterator[slice]:
    """0..size in parts of `BATCH`."""
    return (slice(start, start + BATCH) for start in range(0, size, BATCH))


@torch.no_grad()
def predict(
    bridge: "TransformerBridge", tokens: np.ndarray, hooks: Callable[[slice], Hooks] | None = None
) -> np.ndarray:
    """The model's answers [B] to tokens [B, T]; `hooks` gives what is at work while a batch of them runs."""
    predicted = []
    for rows in batches(len(tokens)):
        at_work = hooks(rows) if hooks else []
        logits = bridge.run_with_hooks(to_tensor(tokens[rows]), fwd_hooks=[*at_work, *ONLY_LAST])  # [b, T, N]
        predicted.append(logits[:, -1].argmax(-1))
    return torch.cat(predicted).numpy()


@torch.no_grad()
def activations(bridge: "TransformerBridge", tokens: np.ndarray, *names: str) -> Mapping[str, Tensor]:
    """Activations by hook name, each [b, T, d], or [b, 1, d] for what is only computed at the last position."""
    stop = 1 if names == (LAYER1,) else None
    with bridge.hooks(fwd_hooks=ONLY_LAST):
        return bridge.run_with_cache(to_tensor(tokens), names_filter=list(names), stop_at_layer=stop)[1]
