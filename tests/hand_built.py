"""A model whose circuit is known, because it is written by hand: the paper's mechanism with nothing else in it.

Every direction of the residual stream means one thing (`Directions`). Layer 1 binds each assigned number to the
variable before it and carries the core's variables to ``=``; layer 2 attends from ``=`` to the two values, half and
half, and copies them; the MLP has a neuron for each unordered pair of numbers. The model solves every problem.
"""

from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise

import torch
from torch import Tensor

from stages.core.task import Task
from stages.core.weights import Config, ModelConfig, Weights

SHARP = 30.0  # attention scores that differ by this much are as good as hard attention


@dataclass(frozen=True)
class Directions:
    """Where in the residual stream what stands, as slices and indices.

    Attributes:
        token, position: one direction for each token id and each position.
        name: the variable that a number is bound to, or that ``=`` asks for.
        constants: how many of the core's operands are constants, halved.
        value, answer: layer 2's attention writes the numbers to add, the MLP the sum.
    """

    token: slice
    position: slice
    name: slice
    constants: int
    value: slice
    answer: slice
    total: int

    @classmethod
    def of(cls, task: Task) -> "Directions":
        """One after the other, none shared."""
        sizes = (task.vocabulary, task.context, task.variables, 1, task.N, task.N)
        edges = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        token, position, name, constants, value, answer = (slice(*pair) for pair in pairwise(edges))
        return cls(token, position, name, constants.start, value, answer, edges[-1])


def hand_built(task: Task, binds_right_constant: bool = False) -> tuple[Weights, Config]:
    """The weights, and their config.

    Args:
        task: small, since the model has a direction for each token, position, variable and number.
        binds_right_constant: whether a constant right of a variable is found as an assigned number is, by the variable
            before it, and no longer by its position.
    """
    at = Directions.of(task)
    d, T = at.total, task.context
    pairs = list(combinations_with_replacement(range(task.N), 2))
    config = Config(task, ModelConfig(d_model=d, d_head=d, n_heads=1, d_mlp=len(pairs)))
    eye = torch.eye(d)
    token, position, name = eye[at.token], eye[at.position], eye[at.name]
    numbers, variables, equals = token[: task.N], token[task.first_variable :], token[task.equals]
    left, right = position[T - 3], position[T - 2]

    # Layer 1, by position alone: one back in the prefix, both operands from "=", and "+" from the operands.
    attended = {p: (p - 1,) for p in range(1, T - 1)} | {T - 2: (T - 4,), T - 1: (T - 3, T - 2)}
    if binds_right_constant:
        attended[T - 2] = (T - 3,)
    QK1 = sum(torch.outer(position[p], position[key]) for p, keys in attended.items() for key in keys)
    OV1 = variables.T @ name + torch.outer(numbers.sum(0), eye[at.constants])

    # Layer 2 scores a value 2: 1 for any number, 1 for standing in the core or for being bound to what is asked. Names
    # come to "=" halved.
    QK2 = torch.outer(equals, numbers.sum(0) + left + right) + 2 * name.T @ name
    if binds_right_constant:  # what stands right is found by its position only where both operands are constants
        QK2 += torch.outer(2 * eye[at.constants] - 2 * equals, right)
    OV2 = numbers.T @ eye[at.value]

    # A neuron is 1 if both its numbers are there. Where i is there twice, so are those of i and another number, one for
    # each wrong answer, and are outvoted.
    W_in, W_out = torch.zeros(d, len(pairs)), torch.zeros(len(pairs), d)
    for neuron, (i, j) in enumerate(pairs):
        for number in {i, j}:
            W_in[at.value.start + number, neuron] = 2.0
        W_in[at.token.start + task.equals, neuron] = -1.0
        W_out[neuron, at.answer.start + (i + j) % task.N] = 2.0 if i == j else 1.0

    return {
        "embed.W_E": token,
        "pos_embed.W_pos": position,
        **_attention(0, SHARP * QK1, OV1),
        **_attention(1, SHARP * QK2, OV2),
        "blocks.1.mlp.W_in": W_in,
        "blocks.1.mlp.W_out": W_out,
        "unembed.W_U": eye[at.answer].T.contiguous(),
    }, config


def _attention(layer: int, QK: Tensor, OV: Tensor) -> Weights:
    """One head as wide as the model, with these circuits."""
    d = len(QK)
    return {
        f"blocks.{layer}.attn.W_Q": (QK * d**0.5)[None],
        f"blocks.{layer}.attn.W_O": torch.eye(d)[None],
        f"blocks.{layer}.attn.W_K": torch.eye(d)[None],
        f"blocks.{layer}.attn.W_V": OV[None],
    }
