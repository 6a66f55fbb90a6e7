"""What reaches the adder: whether it is the same in every form of a problem, and the sum that OV2 makes of two values.

The adder is layer 2's MLP at ``=``; its input is the residual stream after layer 2's attention.

Shapes: B sequences of T positions; N numbers; P = N² pairs; d = d_model.
"""

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from stages.core.circuit_form import Circuits, forward
from stages.core.layouts import Problems, lay_out, value_positions, values
from stages.core.task import Operands, Task
from stages.parts.decomposition import attn2_out, batches


def write_out(task: Task, tokens: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Replace operands of the core by their values; the prefix stays.

    Args:
        task: the task.
        tokens: [B, T].
        which: [B, 2] bool, left and right.
    """
    written = tokens.copy()
    written[:, -3:-1] = np.where(which, values(task, tokens), tokens[:, -3:-1])
    return written


def other_pairs(pairs: int, rng: np.random.Generator) -> np.ndarray:
    """A random permutation that leaves nothing where it is: [pairs]."""
    order, moved = rng.permutation(pairs), np.empty(pairs, dtype=int)
    moved[order] = np.roll(order, 1)
    return moved


def one_adder(circuits: Circuits, task: Task, rng: np.random.Generator) -> pd.DataFrame:
    """Cosine similarity of the adder's input, the residual at ``=`` after layer 2's attention, between forms.

    Every pair gets a prefix that assigns its numbers to two variables among distractors, and is asked for with both
    variables (2var), with one of them on either side (1var) and with none; the prefix is the same. The control holds
    the layout and the distractors fixed as well, but the run without variables is that of another pair.

    Returns:
        n1, n2, cosine_1var, mismatched_1var, cosine_2var, mismatched_2var; one row a pair.
    """
    pairs = task.N**2
    n1, n2 = np.divmod(np.arange(pairs), task.N)
    operands = Operands.of(task)
    tokens = lay_out(task, Problems(n1, n2, operands[rng.choice(np.flatnonzero(operands.form == 2), pairs)]), rng)
    other = tokens.copy()
    moved = other_pairs(pairs, rng)
    np.put_along_axis(other, value_positions(task, tokens), np.stack([n1[moved], n2[moved]], axis=1), axis=1)

    both = np.ones((pairs, 2), dtype=bool)
    one = rng.integers(2, size=(pairs, 1)) == np.arange(2)  # [P, 2], one side of each
    direct = resid_mid(circuits, write_out(task, tokens, both))
    direct_other = resid_mid(circuits, write_out(task, other, both))
    table = {"n1": n1, "n2": n2}
    for form, asked in (("1var", write_out(task, tokens, one)), ("2var", tokens)):
        through_variables = resid_mid(circuits, asked)
        table[f"cosine_{form}"] = cosine_similarity(through_variables, direct).numpy()
        table[f"mismatched_{form}"] = cosine_similarity(through_variables, direct_other).numpy()
    return pd.DataFrame(table)


def resid_mid(circuits: Circuits, tokens: np.ndarray) -> Tensor:
    """The input of layer 2's MLP at the last position: [B, d]."""
    return torch.cat([forward(circuits, some).resid_mid for some in batches(tokens)])


def additivity(circuits: Circuits, task: Task, rng: np.random.Generator) -> tuple[pd.DataFrame, float]:
    """E_n1 OV2 + E_n2 OV2 against layer 2's attention output at ``=``, for every pair in a 0var sequence.

    Returns:
        n1, n2, cosine, shuffled (n1 kept, n2 from another pair), and R² of the best scale and constant vector.
    """
    pairs = task.N**2
    n1, n2 = np.divmod(np.arange(pairs), task.N)
    constants = Operands.of(task)[np.zeros(pairs, dtype=int)]  # the first couple has no variable
    tokens = lay_out(task, Problems(n1, n2, constants), rng)
    found = torch.cat([attn2_out(circuits, some) for some in batches(tokens)])  # [P, d]
    EOV2 = circuits.X[: task.N] @ circuits.OV2.sum(0)  # [N, d] @ [d, d]
    predicted, shuffled = EOV2[n1] + EOV2[n2], EOV2[n1] + EOV2[n2[other_pairs(pairs, rng)]]
    cosines = {
        "cosine": cosine_similarity(predicted, found).numpy(),
        "shuffled": cosine_similarity(shuffled, found).numpy(),
    }
    return pd.DataFrame({"n1": n1, "n2": n2, **cosines}), scale_r2(predicted.double(), found.double())


def scale_r2(x: Tensor, y: Tensor) -> float:
    """Share of the variance of y [B, d] that s·x + constant vector explains, with the best s, one for all."""
    x, y = x - x.mean(0), y - y.mean(0)
    return float((x * y).sum() ** 2 / ((x * x).sum() * (y * y).sum()))
