"""Progress measures and phases of training at every checkpoint (paper, section 4 and figure on progress measures).

Seven measures say how far each part of the circuit has formed: layer 1's attention from a number to its variable and
from ``=`` to the operands, layer 2's match of operand and variable, and the adder. The phases of training and the
sudden rise are found in the accuracy curves that stage ``evaluate`` wrote.

Layers are numbered 1 and 2. Shapes: B sequences of T tokens, of which the first T - 4 are the prefix; V tokens;
d = d_model; H heads. Patterns and circuits are summed over heads.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer
from pydantic import Field
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits
from torch import Tensor

from stages.core import params
from stages.core.checkpoints import CHECKPOINTS, find, load_all
from stages.core.circuit_form import Circuits, Forward, forward, mlp2
from stages.core.layouts import Problems, lay_out, value_positions
from stages.core.outputs import write_csv, write_metrics
from stages.core.params import InputError, Section
from stages.core.phases import moments
from stages.core.task import CONSTANT, Operands, Task
from stages.core.weights import Weights

PAIRS_AT_A_TIME = 4096  # bounds memory when N is large


class ProgressParams(Section):
    """Section ``progress``: the sizes of the fixed batches, and the seed that draws them."""

    sequences: int = Field(ge=3, le=100_000)
    probe_fit: int = Field(ge=100, le=100_000)
    probe_test: int = Field(ge=1, le=100_000)
    seed: int = Field(ge=0, lt=2**63)


@dataclass(frozen=True)
class Batches:
    """The sequences that every checkpoint is measured on, each as tokens [B, T].

    Attributes:
        mixed: a third each of two constants, a variable on the left, a variable on the right.
        two_variables: two variables.
        probe_fit, probe_test: as `mixed`, for the probe.
    """

    mixed: np.ndarray
    two_variables: np.ndarray
    probe_fit: np.ndarray
    probe_test: np.ndarray


def draw_batches(task: Task, p: ProgressParams) -> Batches:
    """Draw over all N² pairs, trained or not, and all variables on both sides."""
    operands = Operands.of(task)
    on_left, on_right = operands.left != CONSTANT, operands.right != CONSTANT
    mix = [np.flatnonzero(kind) for kind in (~on_left & ~on_right, on_left & ~on_right, ~on_left & on_right)]
    two = [np.flatnonzero(on_left & on_right)]
    batches = []
    for i, (kinds, size) in enumerate(
        [(mix, p.sequences), (two, p.sequences), (mix, p.probe_fit), (mix, p.probe_test)]
    ):
        rng = np.random.default_rng(np.random.SeedSequence(p.seed, spawn_key=(i,)))
        shares = np.array_split(np.arange(size), len(kinds))
        couple = np.concatenate([rng.choice(kind, len(share)) for kind, share in zip(kinds, shares, strict=True)])
        n1, n2 = rng.integers(task.N, size=(2, size))
        batches.append(lay_out(task, Problems(n1, n2, operands[couple]), rng))
    return Batches(*batches)


@torch.no_grad()
def measure(weights: Weights, task: Task, batches: Batches) -> dict[str, float]:
    """Every measure of one checkpoint, by its name."""
    circuits = Circuits.of(weights)
    share, margin = variable_identity(weights, task)
    measures = {
        "ov2_mlp2_accuracy": adder_accuracy(circuits, task),
        "qk1_num_to_prev_var": previous_position(circuits, task),
        "qk2_ov1_var_identity": share,
        "qk2_ov1_diagonal_margin": margin,
    }
    for suffix, tokens in (("", batches.mixed), ("_2var", batches.two_variables)):
        for name, value in attention(circuits, task, tokens, value_positions(task, tokens)).items():
            measures[name + suffix] = value
    fit, test = (at_numbers(circuits, task, tokens) for tokens in (batches.probe_fit, batches.probe_test))
    return measures | {"probe1_var_from_num": probe_accuracy(*fit, *test)}


def adder_accuracy(circuits: Circuits, task: Task) -> float:
    """Measure 1: share of the N² pairs for which layer 2's OV and MLP alone, without residual, add right."""
    moved = circuits.X[: task.N] @ circuits.OV2.sum(0)  # [N, d] @ [d, d]
    right = 0
    for pairs in torch.arange(task.N**2).split(PAIRS_AT_A_TIME):
        a, b = pairs // task.N, pairs % task.N
        logits = mlp2(circuits, moved[a] + moved[b]) @ circuits.W_U  # [pairs, d] @ [d, N]
        right += int((logits.argmax(-1) == (a + b) % task.N).sum())
    return right / task.N**2


def previous_position(circuits: Circuits, task: Task) -> float:
    """Measure 2: share of the prefix's positions q whose best key by P QK1 Pᵀ, before q and not q-2, is q-1.

    q-2 is left out because from a number it holds the previous assignment's number, never this one's variable.
    """
    scores = circuits.scores1.sum(0)[task.vocabulary :, task.vocabulary :]  # [T, T], scaled, which no ranking sees
    q, k = torch.arange(task.prefix).unsqueeze(1), torch.arange(task.prefix)
    scores = scores[: task.prefix, : task.prefix].masked_fill((k >= q) | (k == q - 2), -torch.inf)
    return (scores.argmax(-1) == k - 1)[1:].double().mean().item()


def variable_identity(weights: Weights, task: Task) -> tuple[float, float]:
    """Measure 3: V QK2 Vᵀ with V = E_variables OV1, which matches an operand with the variable moved to a number.

    Returns:
        share of the rows whose maximum is on the diagonal, and the mean over rows of the diagonal minus the largest
        other entry.
    """
    Q2, K2, V1, O1 = (weights[f"blocks.{name}"] for name in ("1.attn.W_Q", "1.attn.W_K", "0.attn.W_V", "0.attn.W_O"))
    variables = weights["embed.W_E"][task.first_variable :] @ (V1 @ O1).sum(0)  # [variables, d] @ [d, d]
    scores = variables @ (Q2 @ K2.mT).sum(0) @ variables.T  # [variables, variables]
    own = torch.eye(task.variables, dtype=torch.bool)
    margin = scores.diagonal() - scores.masked_fill(own, -torch.inf).amax(1)
    return (margin > 0).double().mean().item(), margin.double().mean().item()


def attention(circuits: Circuits, task: Task, tokens: np.ndarray, values: np.ndarray) -> dict[str, float]:
    """Measures 4 to 6: where layer 1 looks from ``=`` and from numbers, and layer 2 from ``=``.

    Args:
        tokens: [B, T].
        values: [B, 2] positions of the two values.
    """
    T = task.context
    result = forward(circuits, _ids(tokens))
    pattern1, pattern2 = result.pattern1.sum(0), result.pattern2.sum(0)  # [B, T, T], [B, T]
    row, number = numbers(task, tokens)
    operands = torch.tensor([T - 3, T - 2]).expand(len(tokens), 2)
    return {
        "attn1_equals_to_operands": share_largest(pattern1[:, -1], operands),
        "attn1_num_to_prev": share_largest(pattern1[row, number], (number - 1).unsqueeze(1)),
        "attn2_equals_to_values": share_largest(pattern2, torch.from_numpy(values)),
    }


def share_largest(weights: Tensor, positions: Tensor) -> float:
    """Share of rows whose k largest weights are at the k given positions; equal to another one is not larger.

    Args:
        weights: [B, T], none below 0.
        positions: [B, k], different ones in each row.
    """
    smallest = weights.gather(1, positions).amin(1)
    largest_other = weights.scatter(1, positions, -1.0).amax(1)
    return (smallest > largest_other).double().mean().item()


def numbers(task: Task, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
    """Row and position of each number in the prefixes; its variable stands right before it."""
    row, position = np.nonzero(tokens[:, : task.prefix] < task.N)
    return torch.from_numpy(row), torch.from_numpy(position)


def resid_post1(circuits: Circuits, tokens: Tensor, result: Forward) -> Tensor:
    """The residual stream after layer 1, everywhere: X + Σ_heads pattern (X OV1), as [B, T, d]."""
    V = len(circuits.X) - tokens.shape[1]
    resid = circuits.X[tokens] + circuits.X[V:]
    for pattern, XOV in zip(result.pattern1, circuits.XOV1, strict=True):
        resid += pattern @ (XOV[tokens] + XOV[V:])  # [B, T, T] @ [B, T, d]
    return resid


def at_numbers(circuits: Circuits, task: Task, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The residual stream after layer 1 at each number of the prefixes [n, d], and that number's variable [n]."""
    ids = _ids(tokens)
    row, position = numbers(task, tokens)
    resid = resid_post1(circuits, ids, forward(circuits, ids))[row, position]
    return resid.double().numpy(), (ids[row, position - 1] - task.first_variable).numpy()


def probe_accuracy(
    x_fit: np.ndarray, y_fit: np.ndarray, x_test: np.ndarray, y_test: np.ndarray, most_iterations: int = 1000
) -> float:
    """Measure 7: test accuracy of a logistic regression on standardised features, L2 penalty with C = 1.

    Returns:
        the accuracy; NaN where the fit did not converge within `most_iterations`.
    """
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=most_iterations))
    # Products this small gain nothing from a second thread, and waiting for one that is busy elsewhere costs seconds.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            return float(probe.fit(x_fit, y_fit).score(x_test, y_test))
        except ConvergenceWarning:
            return float("nan")


def read_accuracy(file: Path, steps: list[int]) -> pd.DataFrame:
    """The accuracy curves of the checkpoints at `steps`.

    Raises:
        InputError: the file is missing or damaged, or is of other checkpoints.
    """
    try:
        accuracy = pd.read_csv(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}): make it with `dvc repro evaluate`") from None
    if not all(pd.api.types.is_numeric_dtype(kind) for kind in accuracy.dtypes) or len(accuracy.columns) < 2:
        raise InputError(f"{file} is not a table of accuracies: make it with `dvc repro evaluate`")
    if "step" not in accuracy or accuracy.step.tolist() != steps:
        raise InputError(f"{file} is not of the same steps as the checkpoints: make it again with stage evaluate")
    return accuracy


def _ids(tokens: np.ndarray) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64))


def main(
    checkpoints: Annotated[Path, typer.Option(help="Folder of checkpoints.")] = CHECKPOINTS,
    out: Annotated[Path, typer.Option(help="Folder with plots/accuracy.csv; results go below it.")] = Path("."),
    params_file: Annotated[Path, typer.Option("--params", help="Parameter file.")] = params.PARAMS,
) -> None:
    """Measure how far the circuit has formed at every checkpoint, and find the phases of training."""
    p = params.read(params_file, "progress", ProgressParams)
    accuracy = read_accuracy(out / "plots/accuracy.csv", list(find(checkpoints)))
    rows, task, batches = [], None, None
    for step, weights, config in load_all(checkpoints, params_file):
        if config.task != task:
            task, batches = config.task, draw_batches(config.task, p)
        rows.append({"step": step, **measure(weights, task, batches)})
    write_csv(out / "plots/progress.csv", pd.DataFrame(rows))
    last = {name: value for name, value in rows[-1].items() if name != "step"}
    write_metrics(out / "metrics/progress.json", moments(accuracy) | last)


if __name__ == "__main__":
    params.run(main)
