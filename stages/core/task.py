"""The task: vocabulary, forms, operand couples, held-out pairs and the splits they make (SPEC: paper, section 2).

A problem is a pair of numbers (n1, n2) and a couple of operands (what stands left and right of ``+``: a constant or a
variable). Pairs and operand couples are held out independently of each other; a split is one cell of their product.
"""

import json
import math
import os
import random
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from stages.core.params import InputError, Section

CORE = 4  # the last four tokens of every sequence: + L R =
FORMS = ("0var", "1var", "2var")
CONSTANT = -1  # stands for "no variable" wherever operands are variable indices


class Task(Section):
    """Section ``task``: N numbers, how many variables, the sequence length, and which variables have held-out sides.

    The first `left_only` variables never stand right of ``+`` in training, the last `right_only` never left of it.
    """

    N: int = Field(ge=2, le=1000)
    variables: int = Field(ge=2, le=26)
    context: int = Field(ge=8, le=100_000)
    left_only: int = Field(ge=0)
    right_only: int = Field(ge=0)

    @model_validator(mode="after")
    def _a_variable_for_each_side(self) -> Self:
        if self.left_only + self.right_only > self.variables or max(self.left_only, self.right_only) == self.variables:
            raise ValueError(
                f"left_only = {self.left_only} and right_only = {self.right_only} with variables = {self.variables}: "
                "together they must be at most the number of variables, and each below it, "
                "so that both sides of + keep a variable"
            )
        return self

    @property
    def plus(self) -> int:
        """Token id of ``+``."""
        return self.N

    @property
    def equals(self) -> int:
        """Token id of ``=``."""
        return self.N + 1

    @property
    def padding(self) -> int:
        """Token id of the padding."""
        return self.N + 2

    @property
    def first_variable(self) -> int:
        """Token id of variable ``a``; the others follow."""
        return self.N + 3

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.N + 3 + self.variables

    @property
    def prefix(self) -> int:
        """Length of the part before the core, which holds assignments and padding."""
        return self.context - CORE

    @property
    def most_assignments(self) -> int:
        """The largest number of assignments in a sequence (M in the paper's data generation)."""
        return min(self.variables, self.prefix // 2)

    @property
    def names(self) -> str:
        """The variables' letters, in order."""
        return string.ascii_lowercase[: self.variables]


@dataclass(frozen=True)
class Operands:
    """All K operand couples, in the order constants, one variable left, one right, two variables row by row.

    Attributes:
        form: [K] index into `FORMS`, which is also the number of variables in the core.
        left, right: [K] variable index, or `CONSTANT`.
        held_out: [K] how many of the couple's variables stand on a side that training never shows.
    """

    form: np.ndarray
    left: np.ndarray
    right: np.ndarray
    held_out: np.ndarray

    @classmethod
    def of(cls, task: Task) -> Self:
        """Every couple of the task: 1 + 2·variables + variables·(variables - 1) of them."""
        v = np.arange(task.variables)
        first, second = (side.ravel() for side in np.meshgrid(v, v, indexing="ij"))
        different = first != second  # b+b is not part of the task
        none = np.full(task.variables, CONSTANT)
        left = np.concatenate([[CONSTANT], v, none, first[different]])
        right = np.concatenate([[CONSTANT], none, v, second[different]])
        form = (left != CONSTANT).astype(int) + (right != CONSTANT)
        held_out = (left >= task.variables - task.right_only).astype(int)
        held_out += (right >= 0) & (right < task.left_only)
        return cls(form, left, right, held_out)

    def __getitem__(self, index: np.ndarray) -> "Operands":
        return Operands(self.form[index], self.left[index], self.right[index], self.held_out[index])

    def __len__(self) -> int:
        return len(self.form)

    @property
    def trained(self) -> "Operands":
        """The couples that training shows."""
        return self[self.held_out == 0]


def trained_pairs(N: int, f: float, seed: int) -> np.ndarray:
    """Which of the N² ordered pairs training sees: bool [N²], row-major (n1 outer, n2 inner).

    The draw is ``random.Random(seed).sample(pairs, floor(f·N²))``, which with seed 42 gives the split behind the
    published checkpoints.
    """
    trained = np.zeros(N * N, dtype=bool)
    trained[random.Random(seed).sample(range(N * N), math.floor(f * N**2))] = True
    return trained


@dataclass(frozen=True)
class Split:
    """One cell of the table of splits: a form, a number of held-out positions, and whether pairs are trained."""

    form: int
    held_out: int
    pair_trained: bool

    @property
    def name(self) -> str:
        """The name used in files, metrics and figures, such as ``2var_both_restricted_1``."""
        if self.held_out == 0:
            kind = "train" if self.pair_trained else "add_restricted"
        else:
            kind = "var_restricted" if self.pair_trained else "both_restricted"
        return f"{FORMS[self.form]}_{kind}" + (f"_{self.held_out}" if self.form == 2 and self.held_out else "")


SPLITS = tuple(
    Split(form, held_out, pair_trained)
    for form in range(3)
    for held_out in range(form + 1)
    for pair_trained in (True, False)
)


def write_table(path: Path, tables: Iterable[pa.Table], task: Task) -> None:
    """Write tables of one schema, one after the other, as a Parquet file that carries the task; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    writer = None
    for table in tables:
        table = table.replace_schema_metadata({"task": task.model_dump_json()})
        writer = writer or pq.ParquetWriter(partial, table.schema, compression="zstd")
        writer.write_table(table)
    writer.close()
    os.replace(partial, path)


def read_table(path: Path, task: Task | None = None, columns: Sequence[str] = ()) -> tuple[pa.Table, Task]:
    """Read a Parquet file of this project.

    Args:
        path: the file.
        task: the task that it must be for, if that is known.
        columns: what it must have, so that one file in the place of another is noticed.

    Returns:
        the table, and the task that it is for.

    Raises:
        InputError: the file is missing, damaged, not this project's, of another kind, or made for another task.
    """
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: make it with `dvc repro`, or get it with `dvc pull`") from None
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is damaged or no Parquet file ({' '.join(str(error).split())})") from None
    metadata = table.schema.metadata or {}
    if b"task" not in metadata:
        raise InputError(f"{path} does not say which task it is for: it was not written by this project")
    found = Task.parse(json.loads(metadata[b"task"]), f"{path}: task")
    if lacking := set(columns) - set(table.column_names):
        raise InputError(f"{path} has no column {min(lacking)!r}: it is not the file that its name says")
    if task is not None:
        require_task(found, task, str(path))
    return table, found


def read_trained_pairs(folder: Path, task: Task) -> np.ndarray:
    """Which pairs training sees, from pairs.parquet: bool [N, N] by n1 and n2.

    Raises:
        InputError: see `read_table`.
    """
    table, _ = read_table(folder / "pairs.parquet", task, ("n1", "n2", "trained"))
    trained = np.zeros((task.N, task.N), dtype=bool)
    trained[table["n1"].to_numpy(), table["n2"].to_numpy()] = table["trained"].to_numpy()
    return trained


def require_task(found: Task, wanted: Task, where: str) -> None:
    """Refuse data made for another task.

    Raises:
        InputError: names the first parameter that differs, with both values.
    """
    for key in Task.model_fields:
        if getattr(found, key) != getattr(wanted, key):
            raise InputError(
                f"{where} was made for task.{key} = {getattr(found, key)}, not for {getattr(wanted, key)}: "
                "make it again with `python -m stages.generate`, or set the parameter back"
            )


def token_array(table: pa.Table) -> np.ndarray:
    """The column ``tokens`` as one array [rows, context]."""
    column = table.column("tokens").combine_chunks()
    return column.flatten().to_numpy().reshape(-1, column.type.list_size)
