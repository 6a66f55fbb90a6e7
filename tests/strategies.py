"""Hypothesis strategies for tasks and problems, and a plain reader of sequences to compare the vectorised code with."""

import numpy as np
from hypothesis import strategies as st

from stages.core.layouts import Problems
from stages.core.task import CONSTANT, Operands, Task


@st.composite
def tasks(draw: st.DrawFn, most_numbers: int = 1000, longest: int = 40) -> Task:
    """Any task: N from 2, contexts from 8, 2 to 26 variables, every restriction that leaves both sides a variable."""
    variables = draw(st.integers(2, 26))
    left_only = draw(st.integers(0, variables - 1))
    return Task(
        N=draw(st.integers(2, most_numbers)),
        variables=variables,
        context=draw(st.integers(8, longest)),
        left_only=left_only,
        right_only=draw(st.integers(0, min(variables - 1, variables - left_only))),
    )


def random_problems(task: Task, size: int, rng: np.random.Generator) -> Problems:
    """Problems of all forms alike: any pair, any couple of operands."""
    operands = Operands.of(task)
    share = 1 / np.bincount(operands.form)[operands.form]
    couple = rng.choice(len(operands), size, p=share / share.sum())
    return Problems(rng.integers(task.N, size=size), rng.integers(task.N, size=size), operands[couple])


def assignments(task: Task, sequence: np.ndarray) -> list[tuple[int, int, int]]:
    """The assignments of one sequence as (position, variable index, number), checked token by token."""
    found, position = [], 0
    while position < task.context - 4:
        token = int(sequence[position])
        if token == task.N + 2:
            position += 1
            continue
        assert task.N + 3 <= token < task.N + 3 + task.variables, f"position {position} holds no variable: {sequence}"
        number = int(sequence[position + 1])
        assert position + 1 < task.context - 4 and 0 <= number < task.N, f"no number follows {position}: {sequence}"
        found.append((position, token - task.N - 3, number))
        position += 2
    return found


def problem_of(task: Task, sequence: np.ndarray) -> tuple[int, int, int, int]:
    """What one sequence asks: (n1, n2, left, right), the operands as variable indices or `CONSTANT`."""
    value = {variable: number for _, variable, number in assignments(task, sequence)}
    operands = [int(token) - task.N - 3 if token >= task.N + 3 else CONSTANT for token in sequence[-3:-1]]
    n1, n2 = (int(token) if v == CONSTANT else value[v] for v, token in zip(operands, sequence[-3:-1], strict=True))
    return n1, n2, *operands
