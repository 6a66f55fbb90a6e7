"""The residual stream and layer 2's scores as exact sums of what wrote them (Elhage et al. 2021).

Without normalisation, the input of layer 2 at any position is token embedding + position + layer 1's output, and a
score, which is bilinear in the query's and the key's input, is a sum of 3 × 3 terms.

Shapes: B sequences of T positions; V tokens; d = d_model; H heads of layer 1.
"""

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from stages.core.circuit_form import Circuits, forward
from stages.core.layouts import Problems, lay_out, value_positions
from stages.core.task import CONSTANT, Operands, Task

BATCH = 2048  # sequences at a time
PARTS = ("embedding", "position", "layer 1")
KINDS = ("constant", "trained", "held out")  # of an operand: no variable, or a variable in such a position
BEST_WRONG = "best wrong"


def batches(tokens: np.ndarray) -> tuple[Tensor, ...]:
    """Tokens [B, T] as tensors small enough to bound a pass's memory."""
    return torch.from_numpy(tokens.astype(np.int64)).split(BATCH)


def resid_parts(circuits: Circuits, tokens: Tensor) -> Tensor:
    """The three summands of layer 2's input at every position, in the order of `PARTS`: [3, B, T, d]."""
    V = len(circuits.X) - tokens.shape[1]
    embedding = circuits.X[tokens]  # [B, T, d]
    position = circuits.X[V:].expand_as(embedding)
    pattern1 = forward(circuits, tokens).pattern1
    moved = circuits.XOV1[:, tokens] + circuits.XOV1[:, None, V:]  # [H, B, T, d]
    layer1 = (pattern1 @ moved).sum(0)  # [H, B, T, T] @ [H, B, T, d]
    return torch.stack([embedding, position, layer1])


def attn2_out(circuits: Circuits, tokens: Tensor) -> Tensor:
    """What layer 2's attention adds at the last position: [B, d]."""
    return forward(circuits, tokens).resid_mid - resid_parts(circuits, tokens)[:, :, -1].sum(0)


def score2_parts(circuits: Circuits, tokens: Tensor) -> Tensor:
    """Layer 2's score from the last position to each, by the query's and the key's part, summed over heads.

    Returns:
        [3, 3, B, T], scaled by 1/sqrt(d_head); summed over the first two it is the score.
    """
    parts = resid_parts(circuits, tokens)
    query = parts[:, :, -1] @ circuits.QK2.sum(0)  # [3, B, d] @ [d, d]
    return torch.einsum("qbd,kbtd->qkbt", query, parts)  # query part, key part, sequence, key


def score_decomposition(circuits: Circuits, task: Task, sequences: int, rng: np.random.Generator) -> pd.DataFrame:
    """Layer 2's score from ``=`` to the values and to the best wrong position, by what query and key are made of.

    Args:
        circuits: the model.
        task: its task.
        sequences: how many for each form and number of held-out positions; all pairs and couples are equally likely.
        rng: draws them.

    Returns:
        form, held_out (how many positions), position (the kind of operand whose value the key is, or the position of no
        value with the highest score), query_part, key_part, score (mean), keys (how many the mean is over).
    """
    operands = Operands.of(task)
    rows = []
    for form, held_out in sorted({*zip(operands.form.tolist(), operands.held_out.tolist(), strict=True)}):
        couple = rng.choice(np.flatnonzero((operands.form == form) & (operands.held_out == held_out)), sequences)
        n1, n2 = rng.integers(task.N, size=(2, sequences))
        tokens = lay_out(task, Problems(n1, n2, operands[couple]), rng)
        parts = torch.cat([score2_parts(circuits, some) for some in batches(tokens)], dim=2)  # [3, 3, B, T]
        positions = torch.from_numpy(value_positions(task, tokens))  # [B, 2]
        wrong = parts.sum((0, 1)).scatter(1, positions, -torch.inf).argmax(1)  # [B]
        keys = {BEST_WRONG: (torch.arange(sequences), wrong)}
        kinds = operand_kinds(task, operands[couple])
        for i, kind in enumerate(KINDS):
            sequence, side = np.nonzero(kinds == i)
            keys[kind] = torch.from_numpy(sequence), positions[sequence, side]
        for position, (sequence, key) in keys.items():
            if len(sequence):
                mean = parts[:, :, sequence, key].mean(-1).tolist()  # [3, 3]
                rows += [
                    (f"{form}var", held_out, position, PARTS[q], PARTS[k], mean[q][k], len(sequence))
                    for q in range(len(PARTS))
                    for k in range(len(PARTS))
                ]
    columns = ["form", "held_out", "position", "query_part", "key_part", "score", "keys"]
    return pd.DataFrame(rows, columns=columns)


def operand_kinds(task: Task, operands: Operands) -> np.ndarray:
    """What stands left and right of ``+`` in each couple, as an index into `KINDS`: [B, 2]."""
    couples = np.stack([operands.left, operands.right], axis=1)
    held_out = held_out_sides(task)[[0, 1], couples]  # of no meaning where a constant stands
    return np.where(couples == CONSTANT, 0, 1 + held_out)


def held_out_sides(task: Task) -> np.ndarray:
    """Whether training never shows a variable on a side: bool [2, variables], left of ``+`` first."""
    v = np.arange(task.variables)
    return np.stack([v >= task.variables - task.right_only, v < task.left_only])
