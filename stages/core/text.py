"""Text ↔ tokens: ``c=17, b=42, b+19``.

A problem as text is its assignments in order and the sum that it asks for, separated by commas. Padding has no text, so
that `to_tokens` puts all of it in front.
"""

import re

import numpy as np

from stages.core.layouts import TOKEN
from stages.core.params import InputError
from stages.core.task import Task

EXAMPLE = "c=17, b=42, b+19"


def to_text(task: Task, tokens: np.ndarray) -> str:
    """One sequence [T] as text, without its padding.

    Raises:
        InputError: the tokens are no sequence of this task.
    """
    if tokens.shape != (task.context,):
        raise InputError(f"a sequence of this task is {task.context} tokens, not an array of shape {tokens.shape}")
    ids, padding = tokens.tolist(), task.padding
    words = [t for t in ids[: task.prefix] if t != padding]
    plus, left, right, equals = ids[task.prefix :]
    variables, numbers = words[::2], words[1::2]
    if (
        (plus, equals) != (task.plus, task.equals)
        or len(variables) != len(numbers)
        or not all(task.first_variable <= v < task.vocabulary for v in variables)
        or not all(0 <= n < task.N for n in numbers)
        or not all(0 <= o < task.N or task.first_variable <= o < task.vocabulary for o in (left, right))
    ):
        raise InputError(f"the tokens {ids} are no sequence of this task")

    def word(token: int) -> str:
        return str(token) if token < task.N else task.names[token - task.first_variable]

    assignments = [f"{word(v)}={word(n)}" for v, n in zip(variables, numbers, strict=True)]
    return ", ".join([*assignments, f"{word(left)}+{word(right)}"])


def to_tokens(task: Task, text: str) -> np.ndarray:
    """Parse a problem into one sequence [T], all padding in front.

    Raises:
        InputError: names the part that is wrong, and why.
    """
    *assignments, core = [part.strip() for part in text.strip().removesuffix("=").split(",")]
    words: list[int] = []
    for part in assignments:
        match = re.fullmatch(r"([^=+]+)=([^=+]+)", part)
        if not match:
            raise InputError(f"{part!r} is no assignment such as c=17 (a problem looks like {EXAMPLE})")
        variable, number = (_operand(task, word.strip(), part) for word in match.groups())
        if variable < task.first_variable:
            raise InputError(f"{part!r} assigns to a number: a variable must stand on the left of =")
        if number >= task.N:
            raise InputError(
                f"{part!r} assigns a variable: a number from 0 to {task.N - 1} must stand on the right of ="
            )
        if variable in words[::2]:
            raise InputError(f"variable {task.names[variable - task.first_variable]} is assigned twice")
        words += [variable, number]
    match = re.fullmatch(r"([^=+]+)\+([^=+]+)", core)
    if not match:
        raise InputError(f"{core!r} is no sum such as b+19: a problem ends in one, as in {EXAMPLE}")
    left, right = (word.strip() for word in match.groups())
    assigned = [task.names[variable - task.first_variable] for variable in words[::2]]
    for word in (left, right):
        if re.fullmatch("[a-z]", word) and word not in assigned:
            unknown = "" if word in task.names else f" (the variables of this task are a to {task.names[-1]})"
            raise InputError(f"variable {word} is used but never assigned{unknown}")
    operands = [_operand(task, word, core) for word in (left, right)]
    if operands[0] == operands[1] >= task.first_variable:
        raise InputError(f"{left}+{right} is not part of the task: two variables must be different")
    if len(words) > task.prefix:
        raise InputError(f"{len(assignments)} assignments do not fit a context of {task.context}")
    padding = [task.padding] * (task.prefix - len(words))
    return np.array([*padding, *words, task.plus, *operands, task.equals], dtype=TOKEN)


def _operand(task: Task, word: str, part: str) -> int:
    """Token id of a number or a variable; `part` is what the message points at."""
    if re.fullmatch(r"[0-9]+", word):
        digits = word.lstrip("0") or "0"
        if len(digits) > len(str(task.N)) or int(digits) >= task.N:  # int() itself refuses thousands of digits
            raise InputError(f"{word} is not below N = {task.N}")
        return int(digits)
    if len(word) == 1 and word in task.names:
        return task.first_variable + task.names.index(word)
    raise InputError(
        f"{word!r} in {part!r} is neither a number from 0 to {task.N - 1} nor a variable from a to {task.names[-1]}"
    )
