"""The circuits of the trained model: attention, position, identity, one adder, refinement (paper, circuit analysis).

At the final model, at `assignment` and on both sides of the spike: attention on example sequences, P QK1 Pᵀ, V QK2 Vᵀ
and the parts of layer 2's scores. At the final model: whether all forms reach one adder, and whether OV2 adds. From
`assignment` to `refinement`: which variable is read on which side, and how strongly layer 1 looks at it.

Heads are summed over throughout. Shapes: B sequences of T positions; d = d_model.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
import typer
from pydantic import Field
from torch import Tensor

from stages.core import checkpoints, params
from stages.core.attention import attention_table
from stages.core.checkpoints import load_checked
from stages.core.circuit_form import Circuits
from stages.core.layouts import Problems, lay_out
from stages.core.outputs import write_metrics
from stages.core.params import InputError, Section
from stages.core.task import Operands, Task, write_table
from stages.core.weights import Config
from stages.parts import refinement
from stages.parts.adder import additivity, one_adder, write_out
from stages.parts.decomposition import BEST_WRONG, PARTS, held_out_sides, score_decomposition

FINAL = "final"
BEFORE_FINAL = ("spike_before", "spike", "assignment")


class CircuitsParams(Section):
    """Section ``circuits``.

    `layouts` is how many times each pair is laid out for the one-adder cosines, `sequences` how many sequences stand
    behind each accuracy of a variable on a side and behind each case of the score decomposition.
    """

    layouts: int = Field(ge=1, le=1000)
    sequences: int = Field(ge=1, le=100_000)
    seed: int = Field(ge=0, lt=2**63)


def examples(task: Task, seed: int) -> np.ndarray:
    """One prefix, asked for with a variable on neither side, on the left, on the right and on both: [4, T]."""
    operands = Operands.of(task).trained
    couples = np.flatnonzero(operands.form == 2)
    middle = couples[[len(couples) // 2]]
    problem = Problems(np.array([7 % task.N]), np.array([23 % task.N]), operands[middle])
    tokens = lay_out(task, problem, np.random.default_rng(seed)).repeat(4, axis=0)
    return write_out(task, tokens, np.array([[True, True], [False, True], [True, False], [False, False]]))


def position_circuit(circuits: Circuits, config: Config) -> Tensor:
    """P QK1 Pᵀ over the prefix, unscaled: [prefix, prefix], query by key; NaN where the key is in the future."""
    task = config.task
    prefix = slice(task.vocabulary, task.vocabulary + task.prefix)
    scores = circuits.scores1.sum(0)[prefix, prefix] * config.model.d_head**0.5
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), torch.nan)


def identity_circuit(circuits: Circuits, config: Config) -> Tensor:
    """V QK2 Vᵀ with V = E_variables OV1, unscaled: [variables, variables], query by key."""
    V = circuits.XOV1.sum(0)[config.task.first_variable : config.task.vocabulary]  # [variables, d]
    return V @ (circuits.QK2.sum(0) * config.model.d_head**0.5) @ V.T  # [variables, d] @ [d, d] @ [d, variables]


def circuit_table(scores: Tensor, labels: list[str] | list[int]) -> pd.DataFrame:
    """A square of scores in long form: query, key, score; without NaNs."""
    query, key = np.indices(scores.shape).reshape(2, -1)
    names = np.array(labels)
    return pd.DataFrame({"query": names[query], "key": names[key], "score": scores.numpy().ravel()}).dropna()


def summary(
    task: Task, adder: pd.DataFrame, sums: pd.DataFrame, r2: float, parts: pd.DataFrame, accuracy: np.ndarray
) -> dict[str, float | None]:
    """What metrics/circuits.json holds, all of it about the final model.

    Margins whose names end in ``layer1`` count only what layer 1 wrote into query and key, the match of variables.

    Args:
        task: the task.
        adder, sums, r2: of `one_adder` and `additivity`.
        parts: of `score_decomposition`.
        accuracy: [2, variables] of `refinement.accuracy_by_side`.
    """
    held_out = held_out_sides(task)
    identity = parts[(parts.query_part == PARTS[2]) & (parts.key_part == PARTS[2])]
    return {
        "one_adder_cosine_1var": adder.cosine_1var.mean(),
        "one_adder_cosine_2var": adder.cosine_2var.mean(),
        "one_adder_cosine_mismatched": adder[["mismatched_1var", "mismatched_2var"]].to_numpy().mean(),
        "additivity_cosine": sums.cosine.mean(),
        "additivity_cosine_shuffled": sums.shuffled.mean(),
        "additivity_r2": r2,
        "lowest_accuracy_trained_position": accuracy[~held_out].min(),
        "lowest_accuracy_held_out_position": accuracy[held_out].min() if held_out.any() else None,
        "score_margin_trained_position": score_margin(parts, "trained"),
        "score_margin_held_out_position": score_margin(parts, "held out"),
        "score_margin_trained_position_layer1": score_margin(identity, "trained"),
        "score_margin_held_out_position_layer1": score_margin(identity, "held out"),
    }


def score_margin(parts: pd.DataFrame, kind: str) -> float | None:
    """Layer 2's score to a variable's value minus that to the best wrong position, in 1var sequences.

    Args:
        parts: of `score_decomposition`, whole or some of its terms.
        kind: ``trained`` or ``held out``; None comes back where the task has no such position.
    """
    rows = parts[(parts.form == "1var") & (parts.held_out == (kind == "held out"))]
    total = rows.groupby("position").score.sum()
    return total[kind] - total[BEST_WRONG] if kind in total else None


def moment_files(folder: Path, model: Path, moments: dict[str, int | None]) -> dict[str, Path]:
    """The weights at the moments that were reached, and the final ones, by name.

    Raises:
        InputError: the folder lacks a checkpoint.
    """
    files = checkpoints.find(folder)
    reached = {name: moments[name] for name in BEFORE_FINAL if moments[name] is not None}
    for name, step in reached.items():
        if step not in files:
            raise InputError(f"{folder} has no checkpoint of step {step} ({name}): run `dvc repro progress` again")
    return {name: files[step] for name, step in reached.items()} | {FINAL: model}


def generator(seed: int, use: int) -> np.random.Generator:
    """One of the stage's independent generators."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(use,)))


@torch.no_grad()
def main(
    folder: Annotated[Path, typer.Option("--checkpoints", help="Folder of checkpoints.")] = checkpoints.CHECKPOINTS,
    model: Annotated[
        Path | None, typer.Option(help="The final weights; without, the pipeline's, or the last of --checkpoints.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder that has metrics/progress.json; metrics/ and data/ below it are written to.")
    ] = Path("."),
    params_file: Annotated[Path, typer.Option("--params", help="Parameter file.")] = params.PARAMS,
) -> None:
    """Measure the circuits of the final model, at the spike and through refinement."""
    p = params.read(params_file, "circuits", CircuitsParams)
    moments = checkpoints.read_moments(out / "metrics/progress.json")
    by_moment: dict[str, list[pd.DataFrame]] = {"attention": [], "position": [], "identity": [], "scores": []}
    final = checkpoints.final_model(model, folder)
    for moment, file in moment_files(folder, final, moments).items():
        weights, config = load_checked(file, params_file)
        task, circuits = config.task, Circuits.of(weights)  # after the loop: the final model's
        tables = (
            attention_table(circuits, task, examples(task, p.seed)),
            circuit_table(position_circuit(circuits, config), [*range(task.prefix)]),
            circuit_table(identity_circuit(circuits, config), [*task.names]),
            score_decomposition(circuits, task, p.sequences, generator(p.seed, 0)),
        )
        for kept, table in zip(by_moment.values(), tables, strict=True):
            kept.append(table.assign(moment=moment))

    rng = generator(p.seed, 1)
    adder = pd.concat([one_adder(circuits, task, rng) for _ in range(p.layouts)], ignore_index=True)
    sums, r2 = additivity(circuits, task, generator(p.seed, 2))
    tokens, answers = refinement.problems_by_side(task, p.sequences, generator(p.seed, 3))
    steps = refinement.window([*checkpoints.find(folder)], moments["assignment"], moments["refinement"])
    accuracy, scores = [], []
    for step in steps:
        at_step = Circuits.of(load_checked(checkpoints.find(folder)[step], params_file)[0])
        accuracy.append(refinement.accuracy_by_side(at_step, task, tokens, answers))
        scores.append(refinement.scores_from_equals(at_step, task))

    results = {name: pd.concat(tables, ignore_index=True) for name, tables in by_moment.items()} | {
        "one_adder": adder,
        "additivity": sums,
        "accuracy_by_side": refinement.accuracy_table(task, steps, accuracy),
        "scores_from_equals": refinement.score_table(task, steps, scores),
    }
    for name, table in results.items():
        write_table(out / f"data/circuits/{name}.parquet", [pa.Table.from_pandas(table, preserve_index=False)], task)
    final_parts = tables[-1]
    final_accuracy = refinement.accuracy_by_side(circuits, task, tokens, answers)
    write_metrics(out / "metrics/circuits.json", summary(task, adder, sums, r2, final_parts, final_accuracy))


if __name__ == "__main__":
    params.run(main)
