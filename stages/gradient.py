"""Does the gradient build layer 2's variable matching? A test of the account of learning (paper, theory section).

Layer 2's query at ``=`` has to find the numbers that the operands were assigned. The account: once addition is learned
and layer 1 routes, the negative gradient of the loss on layer 2's query-key matrix is an associative memory that maps
each variable to itself. Here that is derived for an idealised model (`stages.parts.idealised`), the derivation is
compared with automatic differentiation, and the same gradient is measured on real checkpoints.

Notation: a sequence has T tokens t_j, the last is ``=``, and the answer y. x_j is the residual stream after layer 1 at
position j, r = x_T. QK2 = W_Q W_Kᵀ of layer 2 (unscaled), κ = 1/sqrt(d_head), scores s_j = κ r QK2 x_jᵀ, pattern
b = softmax(s). V = E_variables OV1 is what layer 1 writes where it attends to a variable. E is the mean over sequences,
e the answer as a one-hot vector, p the model's probabilities.

The derivation, and what each step assumes:

1. *Layer 2 attends uniformly* (QK2 = 0): b_j = 1/T and ∂b_i/∂s_j = (δ_ij - 1/T) / T.
2. Let g_j = -∂loss/∂b_j be the use of attending to position j, and ḡ its mean over positions. By 1, -∂loss/∂s_j =
   (g_j - ḡ) / T, so that -∂loss/∂QK2 = κ/T E[Σ_j (g_j - ḡ) rᵀ x_j]. So far this is any model with QK2 = 0.
3. *V is orthonormal, and orthogonal to all else in the residual stream*; below, "orthonormal" is short for both. With
   A_jv the layer-1 attention of position j to tokens that are the variable v, V x_jᵀ = A_j and V rᵀ = A_T. Over the
   variables the gradient is the block V (-∂loss/∂QK2) Vᵀ = κ/T E[Σ_j (g_j - ḡ) A_Tᵀ A_j] (`closed_form`): a row is
   what ``=`` has seen, a column what a key has seen. Nothing has been approximated.
4. *The adder's logit for c is λ Σ_{n+m≡c} h_n h_m*, h_n being layer 2's attention on the number n (here how often n
   stands in the sequence, over T). Then g_j = 2λ Σ_c (e_c - p_c) h_{c - t_j} where t_j is a number, and 0 elsewhere.
5. *λ is small (p is uniform), and all numbers of a sequence are uniform and independent.* An operand's value n1 is of
   use because y - n1 = n2 is there: E g = G = 2λ/T (1 - 1/N). For another number d, y - d is there as often as chance
   has it: E g = 0, exactly. ḡ then has the mean 2G/T. The batch meets neither quite: the operands' values are a trained
   pair, so that each depends on the other, and the answer's logit stands out by about 2λ/T², which is not small at the
   default λ. Step 3's closed form, with which automatic differentiation is compared, needs neither.
6. *Layer 1 routes*: ``=`` attends to both operands (A_Tu = 1/2), each number to the token before it (A_jv = 1). What
   else has seen a variable (``=`` itself; a variable at the first position, which sees itself) holds no number, and
   weighs -ḡ. So up to terms of relative order 1/T, with P(u, v) the probability that both are operands,

       block_uv = κG/2T · P(u, v) - κG/T² · P(u is an operand, v is assigned).

   P(u, u) is the largest entry of row u: off the diagonal P is 0 with one variable in the core. With two of n it is
   n - 1 times smaller than P(u, u) if every position is trained. Otherwise it is that many times smaller as u has
   trained couples for each one with v: 9, 10 or 18 times at the defaults, and it is 0 for two variables that are never
   asked for together (a and b, k and l). The distractors' term is negative.

The prediction: every row is largest on the diagonal, and the cosine with the identity is near 1 (row means removed: a
constant along a row prefers no variable). To tell which assumption is to blame where it fails, each checkpoint is
measured four times: with its own layer 1 or one ``routed`` by hand as in step 6, and with its ``own`` V, that is
V (-∂loss/∂QK2) Vᵀ itself, or as if V were ``orthonormal``, that is step 3's formula with the model's own g and A.

What held at the defaults (metrics/gradient.json, both forms together): the algebra, to rounding (`ideal_error`), and
the prediction for the idealised model. For real weights it holds from addition on if V is made orthonormal; this alone,
with the model's own layer 1, gives the block its direction (`…_orthonormal`), though little of it in the rows of
variables that ``=`` hardly sees. Routing brings it nearer to the identity (`…_routed_orthonormal`) and, at addition,
makes it larger by orders of magnitude.

What did not hold: the prediction for the gradient as it is, while the block is being built. At addition and on both
sides of the sudden rise most rows are not largest on the diagonal (`diagonal_share_…`), and the cosine is low
(`cosine_identity_…`): some variables still have nearly the same image (`variables_cosine_max` in plots/gradient.csv).
That the last checkpoint agrees shows nothing about the building, since the block has been built by then.

Shapes: B sequences of T tokens; N numbers; n variables; d = d_model; V+T rows of X, as in `stages.core.circuit_form`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
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
from stages.core.weights import Weights
from stages.parts.assumptions import assumptions, use_of_positions, variable_images
from stages.parts.idealised import ideal_circuits, product_adder, routed, use_under_product_adder

REACHED = ("addition", "spike_before", "spike")  # moments between the first and the last checkpoint

Batch = tuple[Tensor, Tensor]  # tokens [B, T] and answers [B], int64


class GradientParams(Section):
    """Section ``gradient``: how many sequences of each form, the idealised adder's λ, and the seed of the draw."""

    sequences: int = Field(ge=2, le=1_000_000)
    adder_scale: float = Field(gt=0)
    seed: int = Field(ge=0, lt=2**63)


def training_batch(task: Task, pairs: np.ndarray, form: str, size: int, rng: np.random.Generator) -> Batch:
    """Training sequences of one form: trained pairs [P, 2] and trained couples of operands, each uniformly."""
    operands = Operands.of(task).trained
    couples = np.flatnonzero(operands.form == FORMS.index(form))
    n1, n2 = pairs[rng.integers(len(pairs), size=size)].T
    tokens = lay_out(task, Problems(n1, n2, operands[rng.choice(couples, size)]), rng, training=True)
    return torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy((n1 + n2) % task.N)


def negative_gradient(
    circuits: Circuits, batch: Batch, kappa: float, adder: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """-∂loss/∂QK2 at QK2 = 0, for the unscaled product W_Q W_Kᵀ, summed over heads: [d, d].

    Args:
        circuits: the model; its own QK2 is not used.
        batch: the sequences; the loss is their mean cross-entropy in nats.
        kappa: 1/sqrt(d_head), which `Circuits` has inside QK2.
        adder: turns what `forward` calls logits into logits, for the idealised model.
    """
    tokens, answers = batch
    QK2 = torch.zeros_like(circuits.QK2).requires_grad_()
    logits = forward(replace(circuits, QK2=QK2), tokens).logits
    loss = torch.nn.functional.cross_entropy(adder(logits) if adder else logits, answers)
    return -kappa * torch.autograd.grad(loss, QK2)[0].sum(0)


def seen_variables(circuits: Circuits, task: Task, tokens: Tensor) -> Tensor:
    """A of step 3, [B, T, n]: the mean over layer 1's heads, since V is their sum."""
    variables = torch.arange(task.first_variable, task.vocabulary)
    pattern1 = forward(circuits, tokens).pattern1.mean(0)
    return pattern1 @ (tokens.unsqueeze(-1) == variables).to(pattern1.dtype)  # [B, T, T] @ [B, T, n]


def closed_form(use: Tensor, seen: Tensor, kappa: float) -> Tensor:
    """The block of step 3, [n, n], from g [B, T] (its mean over positions does not matter) and A [B, T, n]."""
    B, T = use.shape
    weight = (use - use.mean(1, keepdim=True)).unsqueeze(1)  # [B, 1, T]
    return kappa / (B * T) * seen[:, -1].T @ (weight @ seen).squeeze(1)  # [n, B] @ [B, n]


def halves(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """A function's blocks of the two halves of a batch, [2, n, n]; how far they differ tells what is noise."""
    return torch.stack([function(*half) for half in zip(*(tensor.chunk(2) for tensor in tensors), strict=True)])


def gradient_blocks(
    circuits: Circuits, task: Task, batch: Batch, kappa: float, adder: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """V (-∂loss/∂QK2) Vᵀ of the two halves of a batch: [2, n, n]; see `negative_gradient`."""
    V = variable_images(circuits, task)
    return halves(lambda *half: V @ negative_gradient(circuits, half, kappa, adder) @ V.T, *batch)


def expected_blocks(use: Tensor, seen: Tensor, kappa: float) -> Tensor:
    """Step 3's `closed_form` of the two halves of a batch: [2, n, n]."""
    return halves(lambda *half: closed_form(*half, kappa), use, seen)


def checkpoint_blocks(
    weights: Weights, task: Task, batches: dict[str, Batch], kappa: float
) -> Iterator[tuple[dict[str, str], Tensor, dict[str, float]]]:
    """The four measurements of one checkpoint, for each form and ``both``.

    Yields:
        marks (layer1, V, form), the halves' blocks [2, n, n], and how the model meets the `assumptions` (once a form).
    """
    own = Circuits.of({name: w.double() for name, w in weights.items()})
    for layer1, circuits in {"own": own, "routed": routed(own, task)}.items():
        blocks: dict[str, dict[str, Tensor]] = {"own": {}, "orthonormal": {}}
        met = {}
        for form, batch in batches.items():
            use, seen = use_of_positions(circuits, *batch), seen_variables(circuits, task, batch[0])
            met[form] = assumptions(circuits, task, batch[0], use)
            blocks["own"][form] = gradient_blocks(circuits, task, batch, kappa)
            blocks["orthonormal"][form] = expected_blocks(use, seen, kappa)
        for V, by_form in blocks.items():
            for form, two in with_both(by_form).items():
                yield {"layer1": layer1, "V": V, "form": form}, two, met.get(form, {}) if V == "own" else {}


def with_both(blocks: dict[str, Tensor]) -> dict[str, Tensor]:
    """The blocks by form, and those of all forms together with equal weight as ``both``."""
    return blocks | {"both": torch.stack(list(blocks.values())).mean(0)}


def ideal_blocks(
    task: Task, batches: dict[str, Batch], kappa: float, adder_scale: float
) -> tuple[dict[str, Tensor], float]:
    """The idealised model's blocks by form, as `gradient_blocks` gives them, and how far the closed form is from them.

    The second is the largest difference of an entry, relative to the form's largest entry.
    """
    circuits, blocks, errors = ideal_circuits(task), {}, []
    for form, batch in batches.items():
        blocks[form] = gradient_blocks(circuits, task, batch, kappa, lambda h: product_adder(h, adder_scale))
        use = use_under_product_adder(task, *batch, adder_scale)
        difference = blocks[form] - expected_blocks(use, seen_variables(circuits, task, batch[0]), kappa)
        errors.append((difference.abs().max() / blocks[form].abs().max()).item())
    return with_both(blocks), max(errors)


def block_measures(blocks: Tensor, final: Tensor) -> dict[str, float]:
    """What the mean of two halves' blocks [2, n, n] has of the identity and of the final V QK2 Vᵀ [n, n].

    Returns:
        `diagonal_share`: share of rows whose maximum is on the diagonal; `diagonal_margin`: mean over rows of the
        diagonal less the largest entry off it, in the block's units; `cosine_identity`: cosine with the identity after
        removing row means; `cosine_final`: cosine with `final`; `cosine_halves`: cosine of the two halves.
    """
    block = blocks.mean(0)
    eye = torch.eye(len(block), dtype=torch.bool)
    off_diagonal = block.masked_fill(eye, -torch.inf).max(1).values
    return {
        "diagonal_share": (block.argmax(1) == torch.arange(len(block))).double().mean().item(),
        "diagonal_margin": (block.diagonal() - off_diagonal).mean().item(),
        "cosine_identity": cosine(block - block.mean(1, keepdim=True), eye.double() - 1 / len(block)),
        "cosine_final": cosine(block, final),
        "cosine_halves": cosine(*blocks),
    }


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two matrices as vectors; NaN where one is zero."""
    return ((a * b).sum() / (a.norm() * b.norm())).item()


def block_table(block: Tensor, task: Task) -> pd.DataFrame:
    """A block [n, n] as rows (query, key, value), row by row."""
    letters = np.array(list(task.names))
    n = len(letters)
    return pd.DataFrame({"query": letters.repeat(n), "key": np.tile(letters, n), "value": block.flatten().numpy()})


def summary(table: pd.DataFrame, ideal_error: float) -> dict[str, float | None]:
    """The metrics, of both forms together; null where a moment was not reached."""
    both = table[table.form == "both"].set_index(["moment", "layer1", "V"])

    def get(measure: str, moment: str, layer1: str = "own", V: str = "own") -> float | None:
        return both[measure].get((moment, layer1, V))

    identity, share, before = "cosine_identity", "diagonal_share", ("addition", "spike_before")
    return {
        **{f"{identity}_{moment}": get(identity, moment) for moment in ("initialisation", *REACHED, "final")},
        **{f"{identity}_{moment}_orthonormal": get(identity, moment, "own", "orthonormal") for moment in before},
        **{
            f"{identity}_{moment}_routed_orthonormal": get(identity, moment, "routed", "orthonormal")
            for moment in before
        },
        f"{identity}_ideal": get(identity, "ideal", "routed", "orthonormal"),
        "ideal_error": ideal_error,
        **{f"{share}_{moment}": get(share, moment) for moment in (*REACHED, "final")},
    }


def main(
    folder: Annotated[Path, typer.Option("--checkpoints", help="Folder of checkpoints.")] = checkpoints.CHECKPOINTS,
    data: Annotated[Path, typer.Option(help="Folder with pairs.parquet.")] = Path("data"),
    out: Annotated[Path, typer.Option(help="Folder with metrics/progress.json, and for the results.")] = Path("."),
    params_file: Annotated[Path, typer.Option("--params", help="Parameter file.")] = params.PARAMS,
) -> None:
    """Measure the gradient on layer 2's query-key matrix at the phases, and compare it with the theory."""
    p = params.read(params_file, "gradient", GradientParams)
    files = checkpoints.find(folder)
    reached = checkpoints.read_moments(out / "metrics/progress.json")
    moments = {"initialisation": min(files), **{name: reached[name] for name in REACHED}, "final": max(files)}
    moments = {name: step for name, step in moments.items() if step is not None}
    if lacking := set(moments.values()) - files.keys():
        raise InputError(f"{folder} has no checkpoint of step {min(lacking)}, which metrics/progress.json names")

    weights, config = checkpoints.load_checked(files[max(files)], params_file)
    task, kappa = config.task, config.model.d_head**-0.5
    trained = np.argwhere(read_trained_pairs(data, task))
    rng = np.random.default_rng(p.seed)
    batches = {form: training_batch(task, trained, form, p.sequences, rng) for form in FORMS[1:]}

    circuits = Circuits.of({name: w.double() for name, w in weights.items()})
    V = variable_images(circuits, task)
    final = V @ circuits.QK2.sum(0) @ V.T / kappa  # V QK2 Vᵀ, unscaled

    results = []
    for moment, step in moments.items():
        weights, _ = checkpoints.load_checked(files[step], params_file)
        for marks, blocks, met in checkpoint_blocks(weights, task, batches, kappa):
            results.append(({"step": step, "moment": moment, **marks}, blocks, met))
    ideal, ideal_error = ideal_blocks(task, batches, kappa, p.adder_scale)
    marks = {"step": None, "moment": "ideal", "layer1": "routed", "V": "orthonormal"}
    results += [({**marks, "form": form}, blocks, {}) for form, blocks in ideal.items()]

    table = pd.DataFrame([marks | block_measures(blocks, final) | met for marks, blocks, met in results])
    table = table.astype({"step": "Int64"})
    long = pd.concat([block_table(blocks.mean(0), task).assign(**marks) for marks, blocks, _ in results])
    long = long.astype({"step": "Int64"})
    for name, rows in {"blocks": long, "identity": block_table(final, task)}.items():
        write_table(out / f"data/gradient/{name}.parquet", [pa.Table.from_pandas(rows, preserve_index=False)], task)
    write_csv(out / "plots/gradient.csv", table)
    write_metrics(out / "metrics/gradient.json", summary(table, ideal_error))


if __name__ == "__main__":
    params.run(main)
