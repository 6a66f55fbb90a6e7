"""What is probed: problems of all forms, the facts about a sequence and where each is read, and labels of controls.

See `stages.probe` for what a control is. Shapes: B sequences of T positions; n places that a target reads, each a
sequence and a position in it.
"""

from dataclasses import dataclass

import numpy as np

from stages.core.layouts import Problems
from stages.core.task import FORMS, Operands, Task


@dataclass(frozen=True)
class Target:
    """One fact, and where it is probed.

    Attributes:
        row, position: [n] the sequence and the position in it.
        label: [n] in 0..classes-1, each equally likely.
        type: [n] what the control's label hangs on: the token, or at ``=`` the pair (n1, n2).
        other: [n] for an operand's value, that of the other operand.
    """

    row: np.ndarray
    position: np.ndarray
    label: np.ndarray
    type: np.ndarray
    classes: int
    other: np.ndarray | None = None


def draw_problems(task: Task, size: int, rng: np.random.Generator) -> Problems:
    """Problems of the three forms in turn: couples uniform within a form, pairs uniform over all N²."""
    operands = Operands.of(task)
    form = np.arange(size) % len(FORMS)
    couples = [rng.choice(np.flatnonzero(operands.form == f), size) for f in range(len(FORMS))]
    n1, n2 = rng.integers(task.N, size=(2, size))
    return Problems(n1, n2, operands[np.choose(form, couples)])


def find_targets(task: Task, problems: Problems, tokens: np.ndarray, rng: np.random.Generator) -> dict[str, Target]:
    """Every target, by name.

    ``value_at_operand`` is the value of a variable operand, read where that operand stands in the core. Attention
    spread over the prefix brings a little of every number there, so that above chance does not yet mean fetched:
    ``distractor_at_operand``, the number of an assigned variable that is not asked for (one drawn at random), is what
    to compare it with. Both are read at the same places, in the sequences that have a distractor.

    Args:
        tokens: [B, T] the problems as sequences.
    """
    prefix, core = tokens[:, : task.prefix], tokens[:, task.prefix + 1 : task.prefix + 3]  # [B, prefix], [B, 2]
    values = np.stack([problems.n1, problems.n2], axis=1)  # [B, 2]
    pair = problems.n1 * task.N + problems.n2
    is_number = prefix < task.N
    assigned = np.roll(prefix, 1, axis=1)  # [B, prefix] at a number, the variable that it is assigned to
    is_distractor = is_number & (assigned[:, :, None] != core[:, None, :]).all(axis=2)
    a_distractor = np.where(is_distractor, rng.random(prefix.shape), -1).argmax(axis=1)  # [B] position of a random one
    is_variable = core >= task.first_variable

    row, at = np.nonzero(is_number)
    variable = assigned[row, at] - task.first_variable
    targets = {"variable_at_number": Target(row, at, variable, prefix[row, at], task.variables)}

    row, side = np.nonzero(is_variable & is_distractor.any(axis=1, keepdims=True))
    at = task.prefix + 1 + side
    targets["value_at_operand"] = Target(row, at, values[row, side], core[row, side], task.N)
    targets["distractor_at_operand"] = Target(row, at, prefix[row, a_distractor[row]], core[row, side], task.N)

    for side, name in enumerate(("left", "right")):
        row = np.flatnonzero(is_variable[:, side])
        at = np.full(len(row), task.context - 1)
        variable = core[row, side] - task.first_variable
        targets[f"{name}_variable_at_equals"] = Target(row, at, variable, pair[row], task.variables)

    row = np.arange(len(tokens))
    at = np.full(len(row), task.context - 1)
    for side, name in enumerate(("left", "right")):
        targets[f"{name}_value_at_equals"] = Target(row, at, values[:, side], pair, task.N, values[:, 1 - side])
    targets["answer_at_equals"] = Target(row, at, values.sum(axis=1) % task.N, pair, task.N)
    return targets


def control_labels(types: np.ndarray, classes: int, rng: np.random.Generator) -> np.ndarray:
    """A random but fixed label for each type, every label for as nearly equally many types as there can be: [n]."""
    _, index = np.unique(types, return_inverse=True)
    return (rng.permutation(index.max() + 1) % classes)[index]
