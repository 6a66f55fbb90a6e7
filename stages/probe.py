"""Linear probes: what can be read from the residual stream, where, and how much of that is learned by heart.

A probe is a logistic regression from the residual stream at one position, after one point of the model, to one fact
about the sequence (paper, progress measures; SPEC: linear probes). Beside each stands a control probe on the same
vectors, whose label is drawn at random once for each token type (Hewitt and Liang 2019, "Designing and interpreting
probes with control tasks"); at ``=``, where the token is always the same, once for each pair (n1, n2). A control can
only be learned by heart; the probe's accuracy minus the control's is its selectivity.

Sequences are a third 0var, 1var and 2var, uniform over all operand couples and all N² pairs, whether or not the model
was trained on them. Some fit the probes, others test them. Types and pairs occur in both, as a control needs: on new
ones it would be at chance whatever it had learned. At numbers and at operands the token itself fills much of the
residual stream, so that the control is near 1 there and says that the token can still be read.

Shapes: B sequences of T positions; d = d_model; n places that a target reads, each a sequence and a position in it.
"""

import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import pandas as pd
import torch
import typer
from joblib import cpu_count
from pydantic import Field
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from stages.core import checkpoints, params
from stages.core.bridge import to_bridge
from stages.core.layouts import lay_out
from stages.core.outputs import write_csv, write_metrics
from stages.core.params import Section
from stages.core.task import FORMS, Task
from stages.parts.probe_targets import Target, control_labels, draw_problems, find_targets

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

# Where the residual stream is read: after the embedding, layer 1, layer 2's attention and layer 2's MLP.
POINTS = {
    "embed": "blocks.0.hook_resid_pre",
    "layer1": "blocks.0.hook_resid_post",
    "attn2": "blocks.1.hook_resid_mid",
    "mlp2": "blocks.1.hook_resid_post",
}
# The point at which metrics/probe.json reports each target: where the model's own circuits would read it.
REPORTED = {
    "variable_at_number": "layer1",
    "value_at_operand": "layer1",
    "distractor_at_operand": "layer1",
    "left_variable_at_equals": "layer1",
    "right_variable_at_equals": "layer1",
    "left_value_at_equals": "attn2",
    "right_value_at_equals": "attn2",
    "answer_at_equals": "mlp2",
}
TOLERANCE = 1e-4  # on every entry of the mean loss's gradient; a hundredth of it moves accuracies by 0.002 at most
CHUNK = 1024  # sequences that the bridge runs at a time, which bounds memory


class ProbeParams(Section):
    """Section ``probe``: how many sequences fit and test the probes, in how many samples, and how they are fitted.

    `C` is the inverse strength of the ridge penalty on standardised features, as in scikit-learn.
    """

    train_sequences: int = Field(ge=100, le=1_000_000)
    test_sequences: int = Field(ge=100, le=1_000_000)
    samples: int = Field(ge=2, le=100)
    C: float = Field(gt=0)
    max_iter: int = Field(ge=1, le=1_000_000)
    seed: int = Field(ge=0, lt=2**63)


def read_residuals(bridge: "TransformerBridge", tokens: np.ndarray, wanted: np.ndarray) -> dict[str, np.ndarray]:
    """The residual stream after each point, only where it is wanted.

    Args:
        tokens: [B, T].
        wanted: [B, T] bool.

    Returns:
        by point, [places, d] in the order of ``np.nonzero(wanted)``.
    """
    parts: dict[str, list[np.ndarray]] = {point: [] for point in POINTS}
    with torch.inference_mode():
        for start in range(0, len(tokens), CHUNK):
            chunk = torch.from_numpy(tokens[start : start + CHUNK].astype(np.int64))
            _, cache = bridge.run_with_cache(chunk, names_filter=list(POINTS.values()))
            for point, hook in POINTS.items():
                parts[point].append(cache[hook].numpy()[wanted[start : start + CHUNK]])
    return {point: np.concatenate(chunks) for point, chunks in parts.items()}


def fit_probe(X: np.ndarray, y: np.ndarray, C: float, max_iter: int) -> tuple[Pipeline, bool]:
    """Fit a logistic regression on standardised features, and check the optimum itself.

    Args:
        X: [n, d] float64.
        y: [n] labels, of at least two kinds.

    Returns:
        the probe, and whether it has converged: whether no entry of the objective's gradient exceeds `TOLERANCE`.
    """
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=C, tol=0.9 * TOLERANCE, max_iter=max_iter))
    probe.fit(X, y)
    return probe, gradient_size(probe, X, y, C) <= TOLERANCE


def gradient_size(probe: Pipeline, X: np.ndarray, y: np.ndarray, C: float) -> float:
    """Largest entry, by size, of the gradient of mean cross-entropy + |W|² / (2 C n) at a fitted probe."""
    model = probe[-1]
    error = probe.predict_proba(X)  # [n, K]
    error[np.arange(len(y)), np.searchsorted(model.classes_, y)] -= 1
    error = error[:, -len(model.coef_) :]  # two classes have one row of weights, for the second
    gradient = error.T @ probe[:-1].transform(X) / len(y) + model.coef_ / (C * len(y))  # [K, n] @ [n, d]
    return max(np.abs(gradient).max(), np.abs(error.mean(axis=0)).max())


def probe_target(
    X: np.ndarray, target: Target, control: np.ndarray, form: np.ndarray, p: ProbeParams
) -> dict[str, float]:
    """Fit the probe and its control on the first `p.train_sequences` sequences and test them on the others.

    Args:
        X: [n, d] the residual stream at the target's places.
        control: [n] the control's labels.
        form: [B] each sequence's form.

    Returns:
        test accuracies: of the probe, of the control and their difference; of the probe by form; and how often the
        probe names the value of either operand (by chance about 2 / N). And how many of the two have not converged.
    """
    fit = target.row < p.train_sequences
    probe, probe_converged = fit_probe(X[fit], target.label[fit], p.C, p.max_iter)
    other, other_converged = fit_probe(X[fit], control[fit], p.C, p.max_iter)
    said = probe.predict(X[~fit])
    right = said == target.label[~fit]
    accuracy, control_accuracy = right.mean(), (other.predict(X[~fit]) == control[~fit]).mean()
    either = np.nan if target.other is None else (right | (said == target.other[~fit])).mean()
    by_form = pd.Series(right).groupby(form[target.row[~fit]]).mean()
    return {
        "accuracy": accuracy,
        "control_accuracy": control_accuracy,
        "selectivity": accuracy - control_accuracy,
        "accuracy_either": either,
        **{f"accuracy_{name}": by_form.get(f, np.nan) for f, name in enumerate(FORMS)},
        "unconverged": 2 - probe_converged - other_converged,
    }


def probe_sample(bridge: "TransformerBridge", task: Task, p: ProbeParams, rng: np.random.Generator) -> pd.DataFrame:
    """Draw one sample of sequences and probe every target at every point: one row each."""
    problems = draw_problems(task, p.train_sequences + p.test_sequences, rng)
    tokens = lay_out(task, problems, rng)
    targets = find_targets(task, problems, tokens, rng)
    controls = {name: control_labels(target.type, target.classes, rng) for name, target in targets.items()}

    wanted = np.zeros(tokens.shape, dtype=bool)
    for target in targets.values():
        wanted[target.row, target.position] = True
    place = np.cumsum(wanted).reshape(wanted.shape) - 1  # [B, T] the row of each wanted place in `residuals`
    residuals = read_residuals(bridge, tokens, wanted)

    def row(job: tuple[str, str]) -> dict[str, float | str]:
        name, point = job
        target = targets[name]
        X = residuals[point][place[target.row, target.position]].astype(np.float64)  # float32 stalls before converging
        found = probe_target(X, target, controls[name], problems.operands.form, p)
        return {"target": name, "point": point, "chance": 1 / target.classes} | found

    # One thread a probe: its matrices are too small to be worth sharing out, and sums stay in one order.
    with threadpool_limits(1), ThreadPoolExecutor(cpu_count()) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # counted instead
        return pd.DataFrame(pool.map(row, product(targets, POINTS)))


def summarise(samples: list[pd.DataFrame]) -> pd.DataFrame:
    """Means over the samples with the standard errors of the means, one row for each target and point."""
    groups = pd.concat(samples).groupby(["target", "point"], sort=False)
    mean, error = groups.mean(), groups.sem()
    table = pd.DataFrame({"accuracy": mean.accuracy, "standard_error": error.accuracy})
    for name in ("control_accuracy", "selectivity"):
        table[name], table[f"{name}_standard_error"] = mean[name], error[name]
    rest = ["chance", "accuracy_either", *(f"accuracy_{form}" for form in FORMS)]
    return table.join(mean[rest]).assign(unconverged=groups.unconverged.sum()).reset_index()


def metrics(table: pd.DataFrame) -> dict[str, float]:
    """Each target's accuracy at its point of `REPORTED`, and what the whole table is worth."""
    at = table.set_index(["target", "point"])
    accuracy = {f"{target}_after_{point}": at.accuracy[target, point] for target, point in REPORTED.items()}
    return accuracy | {
        "either_value_at_equals_after_attn2": at.accuracy_either["left_value_at_equals", "attn2"],
        "answer_at_equals_selectivity": at.selectivity["answer_at_equals", "mlp2"],
        "largest_standard_error": table.standard_error.max(),
        "unconverged_probes": table.unconverged.sum(),
    }


def main(
    model: Annotated[Path, typer.Option(help="Weights to probe.")] = checkpoints.MODEL,
    out: Annotated[Path, typer.Option(help="Folder to write metrics/ and plots/ in.")] = Path("."),
    params_file: Annotated[Path, typer.Option("--params", help="Parameter file.")] = params.PARAMS,
) -> None:
    """Probe the residual stream of the final model, with controls."""
    p = params.read(params_file, "probe", ProbeParams)
    weights, config = checkpoints.load_checked(model, params_file)
    bridge = to_bridge(weights, config)
    seeds = np.random.SeedSequence(p.seed).spawn(p.samples)
    table = summarise([probe_sample(bridge, config.task, p, np.random.default_rng(seed)) for seed in seeds])
    write_csv(out / "plots/probe.csv", table)
    write_metrics(out / "metrics/probe.json", metrics(table))


if __name__ == "__main__":
    params.run(main)
