"""Accuracy and loss of every split at every checkpoint (paper, section 3 and figure on training dynamics).

Reads the sequences of data/eval.parquet and data/exact.parquet. ``0var_exact`` is judged at every checkpoint,
``2var_exact`` (193,580 sequences at the defaults) at the last.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer
from torch import Tensor

from stages.core import params
from stages.core.checkpoints import CHECKPOINTS, load_all
from stages.core.circuit_form import Circuits, forward
from stages.core.outputs import write_csv, write_metrics
from stages.core.task import SPLITS, Task, read_table, require_task, token_array

BATCH = 2048  # sequences at a time: enough to keep the matrix products busy, few enough to stay in the cache
LAST = 10  # checkpoints that the means at the end are over
EVERY_CHECKPOINT = (*(split.name for split in SPLITS), "0var_exact")
LAST_CHECKPOINT = "2var_exact"
COLUMNS = ("split", "tokens", "answer")

Sequences = tuple[Tensor, Tensor]


def load_sequences(folder: Path) -> tuple[dict[str, Sequences], Task]:
    """Tokens [B, T] and answers [B] of every split that eval.parquet and exact.parquet hold, and their task.

    Raises:
        InputError: a file is missing, damaged or for another task than the other one.
    """
    evaluation, task = read_table(folder / "eval.parquet", columns=COLUMNS)
    exact, _ = read_table(folder / "exact.parquet", task, COLUMNS)
    found = {}
    for table in (evaluation, exact):
        names = table.column("split").to_numpy()
        tokens = torch.from_numpy(token_array(table).astype(np.int64))
        answers = torch.from_numpy(table.column("answer").to_numpy().astype(np.int64))
        for name in dict.fromkeys(names):
            rows = torch.from_numpy(np.flatnonzero(names == name))
            found[name] = tokens[rows], answers[rows]
    return found, task


@torch.no_grad()
def judge(circuits: Circuits, tokens: Tensor, answers: Tensor) -> tuple[float, float]:
    """Share of right answers, and mean cross-entropy in nats.

    Args:
        tokens: [B, T].
        answers: [B].
    """
    right, loss = 0, 0.0
    for some, wanted in zip(tokens.split(BATCH), answers.split(BATCH), strict=True):
        logits = forward(circuits, some).logits
        right += int((logits.argmax(-1) == wanted).sum())
        loss += float(torch.nn.functional.cross_entropy(logits.double(), wanted, reduction="sum"))
    return right / len(tokens), loss / len(tokens)


def judge_splits(circuits: Circuits, splits: Mapping[str, Sequences]) -> dict[str, tuple[float, float]]:
    """`judge` for each split by name."""
    return {name: judge(circuits, *sequences) for name, sequences in splits.items()}


def summary(accuracy: pd.DataFrame, exact: float | None) -> dict[str, object]:
    """What metrics/evaluate.json holds: the last checkpoint, and the mean over the last ten.

    Args:
        accuracy: one row a checkpoint, one column a split; splits without sequences have no column.
        exact: accuracy on ``2var_exact`` at the last checkpoint, None without sequences.
    """
    last, mean = accuracy.iloc[-1], accuracy.tail(LAST).mean()
    return {
        **{name: last.get(name) for name in EVERY_CHECKPOINT},
        LAST_CHECKPOINT: exact,
        "mean_last_ten": {name: mean.get(name) for name in EVERY_CHECKPOINT},
    }


def main(
    checkpoints: Annotated[Path, typer.Option(help="Folder of checkpoints.")] = CHECKPOINTS,
    data: Annotated[Path, typer.Option(help="Folder with eval.parquet and exact.parquet.")] = Path("data"),
    out: Annotated[Path, typer.Option(help="Folder below which metrics/ and plots/ are written.")] = Path("."),
    params_file: Annotated[Path, typer.Option("--params", help="Parameter file.")] = params.PARAMS,
) -> None:
    """Judge every checkpoint on every split."""
    splits, task = load_sequences(data)
    exact = splits.pop(LAST_CHECKPOINT, None)
    rows = {}
    for step, weights, config in load_all(checkpoints, params_file):
        require_task(task, config.task, str(data))
        circuits = Circuits.of(weights)
        rows[step] = judge_splits(circuits, splits)
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("step")
    columns = [name for name in EVERY_CHECKPOINT if name in table]
    accuracy, loss = (table[columns].map(lambda both, i=i: both[i]) for i in (0, 1))
    last = judge(circuits, *exact)[0] if exact is not None else None

    write_csv(out / "plots/accuracy.csv", accuracy.reset_index())
    write_csv(out / "plots/loss.csv", loss.reset_index())
    write_metrics(out / "metrics/evaluate.json", summary(accuracy, last))


if __name__ == "__main__":
    params.run(main)
