"""Where each layer looks, as a table with the tokens in words.

Layer 2's attention matters at ``=`` alone, because the answer is read there; its other queries are left out.
"""

import numpy as np
import pandas as pd
import torch

from stages.core.circuit_form import Circuits, forward
from stages.core.layouts import value_positions
from stages.core.task import Task

PADDING = "·"


def token_words(task: Task) -> np.ndarray:
    """What each token id is written as: [V]."""
    return np.array([*map(str, range(task.N)), "+", "=", PADDING, *task.names])


@torch.no_grad()
def attention_table(circuits: Circuits, task: Task, tokens: np.ndarray) -> pd.DataFrame:
    """Attention weights of both layers, summed over heads.

    Args:
        circuits: the model.
        task: its task.
        tokens: [B, T], every variable of the core assigned.

    Returns:
        sequence, layer (1 or 2), query, key (positions), query_token, key_token (words), weight, and `matters`: the
        routing that solves the task. In layer 1 a prefix's number looks at its variable and ``=`` at the operands; in
        layer 2 ``=`` looks at the values.
    """
    T = task.context
    result = forward(circuits, torch.from_numpy(tokens.astype(np.int64)))
    weights = {1: result.pattern1.sum(0).numpy(), 2: result.pattern2.sum(0).unsqueeze(1).numpy()}
    matters = {1: np.zeros((len(tokens), T, T), bool), 2: np.zeros((len(tokens), 1, T), bool)}
    sequence, number = np.nonzero(tokens[:, : task.prefix] < task.N)
    matters[1][sequence, number, number - 1] = True
    matters[1][:, -1, [T - 3, T - 2]] = True
    np.put_along_axis(matters[2][:, 0], value_positions(task, tokens), True, axis=1)

    spelled = token_words(task)[tokens]  # [B, T]
    tables = []
    for layer, first in ((1, 0), (2, T - 1)):
        sequence, query, key = np.indices(weights[layer].shape).reshape(3, -1)
        query = query + first
        causal = key <= query
        table = pd.DataFrame({"sequence": sequence, "layer": layer, "query": query, "key": key})
        table["query_token"], table["key_token"] = spelled[sequence, query], spelled[sequence, key]
        table["weight"], table["matters"] = weights[layer].ravel(), matters[layer].ravel()
        tables.append(table[causal])
    return pd.concat(tables, ignore_index=True)
