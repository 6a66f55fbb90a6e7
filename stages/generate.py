"""Generate the problems as Parquet: pairs, operand couples, evaluation splits and exact sets (paper, section 2).

Training examples are drawn while training; what is written here is the split into seen and held out, and the sequences
on which every checkpoint is judged.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import typer
from pydantic import Field

from stages.core import params
from stages.core.layouts import TOKEN, Problems, lay_out
from stages.core.params import InputError, Section
from stages.core.task import CONSTANT, FORMS, SPLITS, Operands, Split, Task, trained_pairs, write_table
from stages.core.text import to_text

CHUNK = 2**18  # tokens written at a time, which bounds memory whatever the context
EXACT = ("0var_exact", "2var_exact")
TOKEN_TYPE = pa.from_numpy_dtype(TOKEN)


class GenerateParams(Section):
    """Section ``generate``: the fraction f of pairs that training sees, and how many sequences judge a split."""

    f: float = Field(gt=0, le=1)
    eval_size: int = Field(ge=1, le=1_000_000)
    exact_limit: int = Field(ge=1, le=10_000_000)
    seed: int = Field(ge=0, lt=2**63)


def pair_table(N: int, trained: np.ndarray) -> pa.Table:
    """All N² ordered pairs: n1, n2, answer, trained."""
    n1, n2 = np.divmod(np.arange(N * N, dtype=np.int32), N)
    return pa.table({"n1": n1, "n2": n2, "answer": (n1 + n2) % N, "trained": trained})


def operand_table(task: Task) -> pa.Table:
    """All operand couples: form, left and right (a letter, null for a constant), held_out_positions, trained."""
    operands = Operands.of(task)
    letters = np.array([*task.names, None], dtype=object)  # CONSTANT, -1, is the last
    return pa.table(
        {
            "form": np.array(FORMS)[operands.form],
            "left": letters[operands.left],
            "right": letters[operands.right],
            "held_out_positions": operands.held_out.astype(np.int8),
            "trained": operands.held_out == 0,
        }
    )


def draw_split(split: Split, task: Task, trained: np.ndarray, size: int, rng: np.random.Generator) -> Problems:
    """Problems of one split: a pair uniformly, a couple uniformly (1var: first a side, then a variable for it).

    Returns:
        `size` problems, or none where the parameters leave the split empty.
    """
    operands = Operands.of(task)
    couples = np.flatnonzero((operands.form == split.form) & (operands.held_out == split.held_out))
    pairs = np.flatnonzero(trained == split.pair_trained)
    if not len(couples) or not len(pairs):
        return _problems(task.N, pairs[:0], operands[couples[:0]])
    weights = np.ones(len(couples))
    if split.form == 1:
        on_left = operands.left[couples] != CONSTANT
        weights = 1 / np.where(on_left, on_left.sum(), (~on_left).sum())
    couple = rng.choice(couples, size, p=weights / weights.sum())
    return _problems(task.N, rng.choice(pairs, size), operands[couple])


def exact_set(name: str, task: Task, trained: np.ndarray, limit: int, rng: np.random.Generator) -> tuple[Problems, int]:
    """``0var_exact`` (held-out pairs) or ``2var_exact`` (held-out pairs × trained couples, trained pairs × held-out).

    Returns:
        every such problem once, or a uniform sample of `limit` of them where there are more; and how many there are.
    """
    operands = Operands.of(task)
    form = FORMS.index(name.removesuffix("_exact"))
    of_form = operands.form == form
    blocks = [(np.flatnonzero(~trained), np.flatnonzero(of_form & (operands.held_out == 0)))]
    if form == 2:
        blocks.append((np.flatnonzero(trained), np.flatnonzero(of_form & (operands.held_out > 0))))
    sizes = [len(pairs) * len(couples) for pairs, couples in blocks]
    population = sum(sizes)
    index = np.arange(population) if population <= limit else np.sort(rng.choice(population, limit, replace=False))
    pair, couple = [], []
    for (pairs, couples), size, start in zip(blocks, sizes, np.cumsum([0, *sizes]), strict=False):
        here = index[(index >= start) & (index < start + size)] - start
        pair.append(pairs[here // max(1, len(couples))])
        couple.append(couples[here % max(1, len(couples))])
    return _problems(task.N, np.concatenate(pair), operands[np.concatenate(couple)]), population


def sequence_tables(
    split: str, task: Task, problems: Problems, rng: np.random.Generator, **marks: bool
) -> Iterator[pa.Table]:
    """The problems as sequences, a chunk at a time: split, tokens, answer, text, and marks that hold for all."""
    sequences = max(1, CHUNK // task.context)
    for start in range(0, max(1, len(problems)), sequences):
        rows = slice(start, start + sequences)
        some = replace(problems, n1=problems.n1[rows], n2=problems.n2[rows], operands=problems.operands[rows])
        tokens = lay_out(task, some, rng)
        yield pa.table(
            {
                "split": pa.array([split] * len(some), pa.string()),
                "tokens": pa.FixedSizeListArray.from_arrays(pa.array(tokens.ravel(), TOKEN_TYPE), task.context),
                "answer": ((some.n1 + some.n2) % task.N).astype(TOKEN),
                "text": pa.array([to_text(task, sequence) for sequence in tokens], pa.string()),
                **{name: np.full(len(some), mark) for name, mark in marks.items()},
            }
        )


def eval_tables(task: Task, p: GenerateParams, trained: np.ndarray) -> Iterator[pa.Table]:
    """The sequences of every split, each drawn with its own seed; a split that the parameters leave empty has none."""
    for i, split in enumerate(SPLITS):
        rng = np.random.default_rng(np.random.SeedSequence(p.seed, spawn_key=(0, i)))
        yield from sequence_tables(split.name, task, draw_split(split, task, trained, p.eval_size, rng), rng)


def exact_tables(task: Task, p: GenerateParams, trained: np.ndarray) -> Iterator[pa.Table]:
    """The sequences of both exact sets; ``sampled`` marks one that is a sample because it would be too large."""
    for i, name in enumerate(EXACT):
        rng = np.random.default_rng(np.random.SeedSequence(p.seed, spawn_key=(1, i)))
        problems, population = exact_set(name, task, trained, p.exact_limit, rng)
        yield from sequence_tables(name, task, problems, rng, sampled=population > p.exact_limit)


def _problems(N: int, pair: np.ndarray, operands: Operands) -> Problems:
    n1, n2 = np.divmod(pair, N)
    return Problems(n1, n2, operands)


def main(
    out: Annotated[Path, typer.Option(help="Folder to write the Parquet files to.")] = Path("data"),
    params_file: Annotated[Path, typer.Option("--params", help="Parameter file.")] = params.PARAMS,
) -> None:
    """Generate the pairs, the operand couples, the evaluation splits and the exact sets."""
    task = params.read(params_file, "task", Task)
    p = params.read(params_file, "generate", GenerateParams)
    trained = trained_pairs(task.N, p.f, p.seed)
    if not trained.any():
        raise InputError(f"generate.f = {p.f}: no pair of {task.N**2} is trained; must be at least 1/{task.N**2}")
    write_table(out / "pairs.parquet", [pair_table(task.N, trained)], task)
    write_table(out / "operands.parquet", [operand_table(task)], task)
    write_table(out / "eval.parquet", eval_tables(task, p, trained), task)
    write_table(out / "exact.parquet", exact_tables(task, p, trained), task)


if __name__ == "__main__":
    params.run(main)
