"""The waves that the model adds with: Fourier fits of its neurons, spectra, restricted and excluded loss.

Paper, on the neurons of layer 2's MLP; Nanda et al. 2023, "Progress measures for grokking via mechanistic
interpretability". Every neuron is fitted, at every frequency k, by a wave of either operand,

    pre-activation(n, m) ≈ mean + A cos(2πkn/N + α) + B cos(2πkm/N + β),

on the N² *core-only* sequences: padding, then ``+ n m =``. ReLU makes products of the two waves, which contain
cos(2πk(n + m)/N + α + β). The neuron then speaks for the right answer if its output direction, as a function of the
answer c, is cos(2πkc/N + γ) with γ = α + β: the phase relation.

Key frequencies are those k for which cos and sin of k(n + m) hold at least `fourier.key_share` of the variance of the
final model's logits over the core-only sequences. Two losses follow these logits through training, as in Nanda et al.:

- *restricted* loss, over held-out pairs, keeps of every logit its mean over all pairs and the key frequencies' cos and
  sin of k(n + m);
- *excluded* loss, over trained pairs, takes those cos and sin away and keeps everything else.

The restricted logits of a pair are what the logits of all pairs of the same sum have in common, and most of those pairs
are trained. So a small restricted loss says that the key waves alone would add, not that the model has learned unseen
pairs so well; that is what the plain loss on held-out pairs says.

What stands in metrics/fourier.json; the losses are those of the last checkpoint:

- live_neurons: neurons that fire for some core-only sequence. The shares and means of neurons below are over these.
- key_frequency_count, key_logit_share: how many frequencies are key, and their share of the logits' variance.
- best_explained_variance, median_explained_variance, share_above_085: of the neurons' pre-activations by the fit at
  the best k; largest, median, and share of neurons above 0.85. Noise has 4/(N² - 1) at a given k, and a few times that
  at its best k.
- same_k_1var, same_k_2var: share of neurons with the same best k when numbers come through variables.
- output_same_k: share of neurons in whose output direction the strongest frequency is their best k.
- phase_cosine, phase_cosine_shuffled: mean cos(γ - α - β), each at the neuron's best k; and the same expected when
  the phases γ of neurons with the same k are shuffled.
- circle_r2, circle_r2_random: mean over key frequencies of how well the embeddings' projections (`plane`) lie on an
  exact circle (`circle_r2`), and for embeddings drawn from a normal distribution. In a space of many dimensions those
  lie near a circle too (R² about d/(d + N)), because the plane is chosen with the vectors that are projected on it.
- embedding_energy_at_key: share of the centred embeddings' sum of squares at key frequencies; if all were equal, this
  would be (key frequencies)/K for odd N.
- restricted_loss, excluded_loss: see above.
- non_key_loss: the control of restricted_loss; it keeps the means and those waves of k(n + m) that are not key.
- held_out_loss: of the logits as they are, over held-out pairs.

Shapes: N numbers, K = floor(N/2) frequencies, M neurons, d = d_model, T positions.
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
from stages.core.circuit_form import Circuits, forward
from stages.core.layouts import Problems, lay_out
from stages.core.outputs import write_csv, write_metrics
from stages.core.params import InputError, Section
from stages.core.task import FORMS, Operands, Task, read_trained_pairs, write_table
from stages.parts import fourier_basis
from stages.parts.fourier_basis import BY_N1, BY_N2, BY_SUM, PairWaves
from stages.parts.logit_waves import logit_shares, losses

SEQUENCES_AT_ONCE = 4096
VALUES_AT_ONCE = 2**24  # pre-activations held at a time; with the line above, what bounds memory for large N
WELL_FITTED = 0.85  # the explained variance that `share_above_085` counts from


class FourierParams(Section):
    """Section ``fourier``: the share of the logits' variance that makes a frequency key; the seed of the sequences."""

    key_share: float = Field(gt=0, le=1)
    seed: int = Field(ge=0, lt=2**63)


def core_only(task: Task) -> Tensor:
    """Every pair as a sequence without assignments, row-major in (n1, n2): tokens [N², T]."""
    n1, n2 = np.divmod(np.arange(task.N**2), task.N)
    tokens = np.full((task.N**2, task.context), task.padding)
    tokens[:, -4], tokens[:, -3], tokens[:, -2], tokens[:, -1] = task.plus, n1, n2, task.equals
    return torch.from_numpy(tokens)


def with_variables(task: Task, form: str, rng: np.random.Generator) -> Tensor:
    """Every pair as a 1var or 2var sequence, with operands that training shows, row-major: tokens [N², T]."""
    couples = Operands.of(task).trained
    couples = couples[couples.form == FORMS.index(form)]
    n1, n2 = np.divmod(np.arange(task.N**2), task.N)
    problems = Problems(n1, n2, couples[rng.integers(len(couples), size=len(n1))])
    return torch.from_numpy(lay_out(task, problems, rng).astype(np.int64))


def run_model(circuits: Circuits, tokens: Tensor) -> tuple[Tensor, np.ndarray]:
    """For all pairs, the input of layer 2's MLP at ``=`` [N², d], and the logits [N, N, N] (n1, n2, answer)."""
    runs = [forward(circuits, some) for some in tokens.split(SEQUENCES_AT_ONCE)]
    return torch.cat([run.resid_mid for run in runs]), by_pair(torch.cat([run.logits for run in runs]))


def by_pair(values: Tensor) -> np.ndarray:
    """Values of all pairs [N², M], row-major, as [N, N, M] in float64."""
    N = round(len(values) ** 0.5)
    return values.double().numpy().reshape(N, N, -1)


def neuron_tables(resid_mid: dict[str, Tensor], W_in: Tensor, output: np.ndarray) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Fit every neuron.

    Args:
        resid_mid: by form, [N², d] the input of layer 2's MLP, row-major in the pairs; 0var is core-only.
        W_in: [d, M].
        output: [N, M] the neurons' output directions (W_out W_U)ᵀ, as functions of the answer.

    Returns:
        a row a neuron (`describe`), and a row for each neuron and k (`PairWaves.table`).
    """
    resid_mid, W_in = {form: resid.double() for form, resid in resid_mid.items()}, W_in.double()
    at_once = max(1, VALUES_AT_ONCE // len(resid_mid["0var"]))
    neurons, fits = [], []
    for first in range(0, output.shape[1], at_once):
        some = slice(first, first + at_once)
        pre = {form: by_pair(resid @ W_in[:, some]) for form, resid in resid_mid.items()}  # [N², d] @ [d, M]
        waves = {form: PairWaves.of(values) for form, values in pre.items()}
        neurons.append(describe(pre, waves, output[:, some]))
        fits.append(waves["0var"].table().rename(columns={"index": "neuron"}))
        fits[-1]["neuron"] += first
    return pd.concat(neurons, ignore_index=True).rename_axis("neuron").reset_index(), pd.concat(fits, ignore_index=True)


def describe(pre: dict[str, np.ndarray], waves: dict[str, PairWaves], output: np.ndarray) -> pd.DataFrame:
    """Each neuron at the frequency that fits it best.

    Args:
        pre: by form, [N, N, M] pre-activations.
        waves: by form, their waves.
        output: [N, M] their output directions.

    Returns:
        a row a neuron: `live` if it ever fires; the best `k` (0 if nothing varies) and its `explained_variance`;
        `activation_share`, how much of the activation's variance lies in products of waves at k, and
        `activation_sum_share`, how much in cos and sin of k(n + m) alone; `output_share`, how much of the output
        direction's variance lies at k; `output_k`, where most of it lies; its phase γ at k and `phase_error`,
        γ - (α + β) from -π to π; and by form with variables, the best k, and the correlation of the pre-activations
        with the core-only ones.
    """
    k = waves["0var"].best_k
    at_k = (..., k - 1, np.arange(len(k)))  # where nothing varies, the shares at any k are NaN
    activation = PairWaves.of(np.maximum(pre["0var"], 0)).share[at_k]  # [4, M]
    operands = waves["0var"].waves[at_k][[BY_N1, BY_N2]]  # [2, M]
    output_waves = fourier_basis.waves(output)  # [K, M]
    output_energy = fourier_basis.energy(output_waves, len(output))
    table = {
        "live": (pre["0var"] > 0).any((0, 1)),
        "k": k,
        "explained_variance": waves["0var"].explained_variance[at_k],
        "activation_share": activation.sum(0),
        "activation_sum_share": activation[BY_SUM],
        "output_share": output_energy[at_k] / output_energy.sum(0),
        "output_k": fourier_basis.strongest(output_energy),
        "output_phase": np.angle(output_waves[at_k]),
        "phase_error": np.angle(output_waves[at_k] * operands.prod(0).conj()),
    }
    for form in FORMS[1:]:
        table[f"k_{form}"] = waves[form].best_k
        table[f"correlation_{form}"] = fourier_basis.correlation(pre["0var"], pre[form])
    return pd.DataFrame(table)


def frequency_table(shares: np.ndarray, key_share: float, neurons: pd.DataFrame, fits: pd.DataFrame) -> pd.DataFrame:
    """A row a frequency: its share of the logits' variance, whether it is key, and what it is to the live neurons.

    Args:
        shares: [K], see `logit_shares`.
        key_share: the smallest share of a key frequency.
        neurons, fits: see `neuron_tables`.

    Returns:
        k, logit_share, key, neurons (for how many it is the best), best_neuron (the one that it fits best) and its
        explained_variance; the last two are null if no neuron is live.
    """
    table = pd.DataFrame({"k": np.arange(1, len(shares) + 1), "logit_share": shares, "key": shares >= key_share})
    live = neurons[neurons.live]
    table["neurons"] = table.k.map(live.k.value_counts()).fillna(0).astype(int)
    fits = fits[fits.neuron.isin(live.neuron)].dropna(subset="explained_variance")
    best = fits.loc[fits.groupby("k").explained_variance.idxmax(), ["k", "neuron", "explained_variance"]]
    best = best.rename(columns={"neuron": "best_neuron"}).astype({"best_neuron": "Int64"})
    return table.merge(best, on="k", how="left")


def loss_curves(folder: Path, params_file: Path, task: Task, trained: np.ndarray, key: np.ndarray) -> pd.DataFrame:
    """`losses` at every checkpoint: a row a step.

    Raises:
        InputError: a checkpoint is of another task than the model.
    """
    tokens, rows = core_only(task), []
    for step, weights, config in checkpoints.load_all(folder, params_file):
        if config.task != task:
            raise InputError(f"{folder}: the checkpoint of step {step} was made for another task than the model")
        _, logits = run_model(Circuits.of(weights), tokens)
        rows.append({"step": step, **losses(logits, trained, key)})
    return pd.DataFrame(rows)


def summary(neurons: pd.DataFrame, frequencies: pd.DataFrame, last: pd.Series) -> dict[str, float]:
    """The scalars of metrics/fourier.json.

    Args:
        neurons: see `describe`.
        frequencies: see `frequency_table` and `fourier_basis.circle_table`.
        last: `losses` at the last checkpoint.
    """
    live, key = neurons[neurons.live], frequencies[frequencies.key]
    agreement, shuffled = fourier_basis.phase_agreement(live.k, live.output_phase, live.phase_error)
    return {
        "live_neurons": len(live),
        "key_frequency_count": len(key),
        "key_logit_share": key.logit_share.sum(),
        "best_explained_variance": live.explained_variance.max(),
        "median_explained_variance": live.explained_variance.median(),
        "share_above_085": (live.explained_variance > WELL_FITTED).mean(),
        "same_k_1var": (live.k_1var == live.k).mean(),
        "same_k_2var": (live.k_2var == live.k).mean(),
        "output_same_k": (live.output_k == live.k).mean(),
        "phase_cosine": agreement,
        "phase_cosine_shuffled": shuffled,
        "circle_r2": key.circle_r2.mean(),
        "circle_r2_random": key.circle_r2_random.mean(),
        "embedding_energy_at_key": key.circle_share.sum(),
        "restricted_loss": last.restricted_loss,
        "non_key_loss": last.non_key_loss,
        "excluded_loss": last.excluded_loss,
        "held_out_loss": last.held_out_loss,
    }


def main(
    model: Annotated[
        Path | None, typer.Option(help="Weights to fit; without, the pipeline's, or the last of --checkpoints.")
    ] = None,
    checkpoint_folder: Annotated[
        Path, typer.Option("--checkpoints", help="Folder of the checkpoints that the losses follow.")
    ] = checkpoints.CHECKPOINTS,
    data: Annotated[Path, typer.Option(help="Folder with pairs.parquet.")] = Path("data"),
    out: Annotated[Path, typer.Option(help="Folder below which metrics/, plots/ and data/ are written.")] = Path("."),
    params_file: Annotated[Path, typer.Option("--params", help="Parameter file.")] = params.PARAMS,
) -> None:
    """Fit every neuron by waves, find the key frequencies, and follow restricted and excluded loss through training."""
    p = params.read(params_file, "fourier", FourierParams)
    weights, config = checkpoints.load_checked(checkpoints.final_model(model, checkpoint_folder), params_file)
    task, circuits = config.task, Circuits.of(weights)
    trained = read_trained_pairs(data, task)

    rng = np.random.default_rng(p.seed)
    core_resid, logits = run_model(circuits, core_only(task))
    resid_mid = {"0var": core_resid}
    resid_mid |= {form: run_model(circuits, with_variables(task, form, rng))[0] for form in FORMS[1:]}
    output = (circuits.W_out @ circuits.W_U).T.double().numpy()  # ([M, d] @ [d, N])ᵀ
    neurons, fits = neuron_tables(resid_mid, circuits.W_in, output)
    W_E = weights["embed.W_E"][: task.N].double().numpy()
    frequencies = frequency_table(logit_shares(logits), p.key_share, neurons, fits).join(
        fourier_basis.circle_table(W_E, rng)
    )
    key = frequencies.k[frequencies.key].to_numpy()
    curves = loss_curves(checkpoint_folder, params_file, task, trained, key)

    shown = frequencies[frequencies.key | (frequencies.explained_variance == frequencies.explained_variance.max())]
    shown = shown.dropna(subset="best_neuron")
    pre = by_pair(core_resid @ circuits.W_in[:, shown.best_neuron.astype(int).tolist()])  # [N², d] @ [d, M]
    tables = {
        "neurons": neurons,
        "fits": fits,
        "frequencies": frequencies,
        "maps": fourier_basis.map_table(pre, shown.k.to_numpy()),
        "planes": fourier_basis.plane_table(W_E, key),
        "spectra": fourier_basis.norm_table({"W_E": W_E, "W_out_W_U": output}),
    }
    for name, table in tables.items():
        write_table(out / f"data/fourier/{name}.parquet", [pa.Table.from_pandas(table, preserve_index=False)], task)
    write_csv(out / "plots/fourier.csv", curves)
    write_metrics(out / "metrics/fourier.json", summary(neurons, frequencies, curves.iloc[-1]))


if __name__ == "__main__":
    params.run(main)
