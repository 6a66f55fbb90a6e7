"""Which variable is read on which side of ``+``, and how strongly layer 1 looks at it, as training goes on.

The published account of refinement follows variable b on the right; here every variable is followed on both sides.
"""

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from stages.core.circuit_form import Circuits, forward
from stages.core.layouts import Problems, lay_out
from stages.core.task import Operands, Task
from stages.parts.decomposition import batches, held_out_sides

SIDES = ("left", "right")


def window(steps: list[int], assignment: int | None, refinement: int | None) -> list[int]:
    """The steps from `assignment` to `refinement`, or to the end; none where assignment was not learned."""
    if assignment is None:
        return []
    last = steps[-1] if refinement is None else refinement
    return [step for step in steps if assignment <= step <= last]


def problems_by_side(task: Task, sequences: int, rng: np.random.Generator) -> tuple[np.ndarray, Tensor]:
    """1var problems over all pairs: `sequences` of them for each side and variable, in this order.

    Returns:
        tokens [2 · variables · sequences, T] and answers.
    """
    operands = Operands.of(task)
    couple = np.flatnonzero(operands.form == 1).repeat(sequences)  # variables on the left, then on the right
    n1, n2 = rng.integers(task.N, size=(2, len(couple)))
    tokens = lay_out(task, Problems(n1, n2, operands[couple]), rng)
    return tokens, torch.from_numpy((n1 + n2) % task.N)


def accuracy_by_side(circuits: Circuits, task: Task, tokens: np.ndarray, answers: Tensor) -> np.ndarray:
    """Share of right answers for each side and variable, on `problems_by_side`: [2, variables]."""
    given = torch.cat([forward(circuits, some).logits.argmax(-1) for some in batches(tokens)])
    return (given == answers).reshape(2, task.variables, -1).double().mean(-1).numpy()


def scores_from_equals(circuits: Circuits, task: Task) -> np.ndarray:
    """Layer 1's score from ``=`` to each variable as a token, then to the two operand positions: [variables + 2].

    The score of a variable that stands at an operand position is the sum of its two entries.
    """
    scores = circuits.scores1.sum(0)
    row = scores[task.equals] + scores[-1]  # [V+T]: the query is E_= + P of the last position
    return torch.cat([row[task.first_variable : task.vocabulary], row[-3:-1]]).numpy()


def accuracy_table(task: Task, steps: list[int], accuracy: list[np.ndarray]) -> pd.DataFrame:
    """Accuracies [2, variables] at each step as step, side, variable, held_out (training never shows it), accuracy."""
    accuracy = np.array(accuracy).reshape(len(steps), 2, task.variables)
    step, side, variable = np.indices(accuracy.shape).reshape(3, -1)
    return pd.DataFrame(
        {
            "step": np.array(steps, dtype=int)[step],
            "side": np.array(SIDES)[side],
            "variable": np.array([*task.names])[variable],
            "held_out": held_out_sides(task)[side, variable],
            "accuracy": accuracy.ravel(),
        }
    )


def score_table(task: Task, steps: list[int], scores: list[np.ndarray]) -> pd.DataFrame:
    """Scores [variables + 2] at each step as step, key (a variable, ``left`` or ``right`` position), score."""
    keys = np.array([*task.names, *SIDES])
    scores = np.array(scores).reshape(len(steps), len(keys))
    step, key = np.indices(scores.shape).reshape(2, -1)
    return pd.DataFrame({"step": np.array(steps, dtype=int)[step], "key": keys[key], "score": scores.ravel()})
