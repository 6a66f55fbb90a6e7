"""Problems → token sequences, vectorised and stateless (paper, section 2).

Every function takes a `numpy.random.Generator`; nothing is remembered between calls. Shapes: B sequences of T tokens
(the context), of which the first T - 4 are the prefix; M is the largest number of assignments.
"""

from dataclasses import dataclass

import numpy as np

from stages.core.task import CONSTANT, CORE, Operands, Task

TOKEN = np.int16  # holds every id: the largest vocabulary is 1000 + 3 + 26


@dataclass(frozen=True)
class Problems:
    """B problems: n1 and n2 [B] are the values left and right of ``+``, `operands` says how they are written."""

    n1: np.ndarray
    n2: np.ndarray
    operands: Operands

    def __len__(self) -> int:
        return len(self.n1)


def lay_out(task: Task, problems: Problems, rng: np.random.Generator, training: bool = False) -> np.ndarray:
    """Write each problem as a sequence with freshly drawn assignments, distractors, order and padding.

    The number of assignments is uniform on max(1, k)..M, k being the number of variables in the core; in training it
    is max(k, uniform on 1..M).

    Returns:
        tokens [B, T] of type `TOKEN`.
    """
    B, M = len(problems), task.most_assignments
    left, right, k = problems.operands.left, problems.operands.right, problems.operands.form
    rows = np.arange(B)

    fewest = np.ones(B, dtype=int) if training else np.maximum(1, k)
    m = np.maximum(k, rng.integers(fewest, M + 1))  # [B]

    # Which variables: the core's first, then the others in random order; the first m are assigned.
    keys = rng.random((B, task.variables))
    for side, first in ((left, -2.0), (right, -1.0)):
        used = side != CONSTANT
        keys[rows[used], side[used]] = first
    assigned = np.argsort(keys, axis=1)[:, :M]  # [B, M]
    numbers = rng.integers(task.N, size=(B, M))
    numbers = np.where(assigned == left[:, None], problems.n1[:, None], numbers)
    numbers = np.where(assigned == right[:, None], problems.n2[:, None], numbers)

    # In which order: uniform over the m that are assigned.
    keys = rng.random((B, M))
    keys[np.arange(M) >= m[:, None]] = np.inf
    order = np.argsort(keys, axis=1)
    assigned, numbers = np.take_along_axis(assigned, order, 1), np.take_along_axis(numbers, order, 1)

    # Where: each padding token falls into one of m + 1 gaps; assignment i starts after the padding of gaps 0..i.
    paddings = task.prefix - 2 * m
    gaps = (rng.random((B, task.prefix - 2)) * (m + 1)[:, None]).astype(int)
    gaps[np.arange(task.prefix - 2) >= paddings[:, None]] = M + 1  # those that this sequence does not have
    in_gap = np.bincount((gaps + rows[:, None] * (M + 2)).ravel(), minlength=B * (M + 2)).reshape(B, M + 2)
    start = 2 * np.arange(M) + np.cumsum(in_gap[:, :M], axis=1)  # [B, M]

    tokens = np.full((B, task.context), task.padding, dtype=TOKEN)
    row, i = np.nonzero(np.arange(M) < m[:, None])
    tokens[row, start[row, i]] = task.first_variable + assigned[row, i]
    tokens[row, start[row, i] + 1] = numbers[row, i]
    tokens[:, -CORE] = task.plus
    tokens[:, -3] = np.where(left == CONSTANT, problems.n1, task.first_variable + left)
    tokens[:, -2] = np.where(right == CONSTANT, problems.n2, task.first_variable + right)
    tokens[:, -1] = task.equals
    return tokens


def value_positions(task: Task, tokens: np.ndarray) -> np.ndarray:
    """Where the two values of each sequence stand: a constant's own position, a variable's assigned number.

    Args:
        tokens: [B, T], every variable of the core assigned.

    Returns:
        positions [B, 2], left operand first.
    """
    positions = np.tile([task.context - 3, task.context - 2], (len(tokens), 1))
    for side in (0, 1):
        operand = tokens[:, task.prefix + 1 + side]
        is_variable = operand >= task.first_variable
        found = np.argmax(tokens[:, : task.prefix] == operand[:, None], axis=1) + 1
        positions[is_variable, side] = found[is_variable]
    return positions


def values(task: Task, tokens: np.ndarray) -> np.ndarray:
    """The two values [B, 2] that each sequence adds; the answer is their sum modulo N."""
    return np.take_along_axis(tokens, value_positions(task, tokens), axis=1).astype(np.int64)


@dataclass(frozen=True)
class TrainingDraw:
    """What training examples are drawn from, as cumulative weights.

    Attributes:
        operands: the trained couples.
        couple_edges: [couples] cumulative probability over the couples.
        pairs: [P, 2] the trained pairs.
        pair_edges_2var: [P] cumulative probability of the pairs among 2var examples.
    """

    operands: Operands
    couple_edges: np.ndarray
    pairs: np.ndarray
    pair_edges_2var: np.ndarray


def training_draw(
    task: Task,
    operands: Operands,
    pairs: np.ndarray,
    form_weights: tuple[float, float, float],
    copies_kept: np.ndarray | None = None,
) -> TrainingDraw:
    """Weights of the operand couples: w0·n : w1·(n - right_only) : w1·(n - left_only) : r·(n - right_only).

    Each 1var couple weighs w1, and a form's weight is shared equally by its trained couples.

    Args:
        operands: the trained couples.
        pairs: [P, 2] the trained pairs.
        form_weights: (w0, w1, r).
        copies_kept: [P] for the ``subset`` mode, how many of the n - right_only copies of each pair 2var examples keep
            (`kept_copies`); a pair then weighs that among 2var examples, and they all together the mean over pairs.
    """
    w0, w1, r = form_weights
    sides = task.variables - task.right_only
    weight_2var = r * sides if copies_kept is None else copies_kept.mean()
    per_couple = np.array([w0 * task.variables, w1, weight_2var / max(1, (operands.form == 2).sum())])
    couple_weights = per_couple[operands.form]
    pair_weights = np.ones(len(pairs)) if copies_kept is None or not copies_kept.any() else copies_kept
    return TrainingDraw(operands, _edges(couple_weights), pairs, _edges(pair_weights))


def kept_copies(task: Task, pairs: int, r: float, rng: np.random.Generator) -> np.ndarray:
    """How many of its n - right_only copies each of `pairs` pairs keeps when each stays with probability r: [pairs]."""
    return rng.binomial(task.variables - task.right_only, r, size=pairs)


def training_examples(
    task: Task, draw: TrainingDraw, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw fresh training examples: a couple, a trained pair, a layout.

    Returns:
        tokens [size, T] and answers [size].
    """
    operands = draw.operands[np.searchsorted(draw.couple_edges, rng.random(size), side="right")]
    pair = rng.random(size)
    uniform = (pair * len(draw.pairs)).astype(int)
    weighted = np.searchsorted(draw.pair_edges_2var, pair, side="right")
    n1, n2 = draw.pairs[np.where(operands.form == 2, weighted, uniform)].T
    return lay_out(task, Problems(n1, n2, operands), rng, training=True), (n1 + n2) % task.N


def _edges(weights: np.ndarray) -> np.ndarray:
    """Cumulative probabilities, the last exactly 1, such that searchsorted(edges, u in [0, 1), "right") draws them."""
    edges = np.cumsum(weights, dtype=float)
    return edges / edges[-1]
