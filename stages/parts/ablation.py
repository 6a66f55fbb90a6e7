"""Ablation: an activation is replaced by its mean, and the answers are judged.

The mean is over the batch: at each position, over those sequences of all three forms in which the position belongs to
the site, so that neither the sequence nor its form can be read from it. The sites in layer 1 are the numbers of the
prefix, ``=``, and all other positions. Every sequence has a distractor, an assigned variable that is not asked for:
without one, the numbers to add are all that there are, and no variable has to be told from another. (With m assigned,
adding any two of their numbers is still right for one pair in m(m - 1)/2.)

Shapes: B sequences of T tokens (b in a batch), d = d_model.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stages.core.task import FORMS, Task
from stages.parts.hooked_runs import Hooks, activations, batches, predict
from stages.parts.interchange import LAYER1, answers, draw_distracted

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

LAYER2 = "blocks.1.hook_attn_out"
MLP2_OUTPUT = "blocks.1.hook_mlp_out"
ABLATION_COLUMNS = ("ablated", "form", "accuracy", "n")


def ablation_sites(task: Task, tokens: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
    """By name, the hook of what is ablated and the positions, bool [b, T], where it is."""
    position = np.arange(task.context)
    numbers = (tokens < task.N) & (position < task.prefix)
    equals = np.tile(position == task.context - 1, (len(tokens), 1))
    return {
        "layer1_numbers": (LAYER1, numbers),
        "layer1_equals": (LAYER1, equals),
        "layer1_elsewhere": (LAYER1, ~(numbers | equals)),
        "layer2_attention": (LAYER2, equals),
        "mlp2": (MLP2_OUTPUT, equals),
    }


def site_means(bridge: "TransformerBridge", task: Task, tokens: np.ndarray) -> dict[str, Tensor]:
    """For each ablation, the mean activation at each position, over the sequences where it is part of the site.

    Returns:
        by name [T, d], or [1, d] for what is only computed at the last position.
    """
    sums, counts = defaultdict(int), defaultdict(int)
    for rows in batches(len(tokens)):
        cache = activations(bridge, tokens[rows], LAYER1, LAYER2, MLP2_OUTPUT)
        for name, (hook, site) in ablation_sites(task, tokens[rows]).items():
            here = torch.from_numpy(site)[:, -cache[hook].shape[1] :].to(cache[hook].dtype)  # [b, T] or [b, 1]
            sums[name] += torch.einsum("bt,btd->td", here, cache[hook])
            counts[name] += here.sum(0)[:, None]
    return {name: sums[name] / counts[name].clamp(min=1) for name in sums}


def ablation(task: Task, tokens: np.ndarray, name: str, mean: Tensor, rows: slice) -> Hooks:
    """What sets one site to its mean in a batch."""
    hook_name, site = ablation_sites(task, tokens[rows])[name]

    def put(activation: Tensor, hook: Any) -> Tensor:
        return torch.where(torch.from_numpy(site)[:, -activation.shape[1] :, None], mean, activation)

    return [(hook_name, put)]


def ablate(bridge: "TransformerBridge", task: Task, size: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Accuracy with nothing and with each site ablated, on `size` sequences with a distractor of each form.

    Yields:
        `ABLATION_COLUMNS`, for the forms that have such sequences.
    """
    by_form = [draw_distracted(task, form, size, rng) for form in range(len(FORMS))]
    tokens, ends = np.concatenate(by_form), np.cumsum([len(some) for some in by_form])
    right = answers(task, tokens)
    predictions = {"nothing": predict(bridge, tokens)}
    for name, mean in site_means(bridge, task, tokens).items():
        predictions[name] = predict(bridge, tokens, partial(ablation, task, tokens, name, mean))
    for name, predicted in predictions.items():
        for form, hits in zip(FORMS, np.split(predicted == right, ends[:-1]), strict=True):
            if len(hits):
                yield {"ablated": name, "form": form, "accuracy": hits.mean(), "n": len(hits)}
