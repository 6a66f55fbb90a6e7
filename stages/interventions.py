"""Causal tests: exchange or remove one activation and see what becomes of the answer (paper, part on the circuits).

The paper argues from similarity; these experiments intervene, through TransformerLens hooks.

**Interchange.** A target run gets one activation from a donor run; what is exchanged, the counterfactual answer and the
placebo of each experiment are defined in `stages.parts.interchange`.

**Ablation.** An activation is replaced by its mean; the sites are defined in `stages.parts.ablation`.

Shapes: B sequences of T tokens (b in a batch), d = d_model.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from pydantic import Field
from torch import Tensor

from stages.core import params
from stages.core.bridge import to_bridge
from stages.core.checkpoints import CHECKPOINTS, find, load_checked, read_moments
from stages.core.outputs import write_csv, write_metrics
from stages.core.params import InputError, Section
from stages.core.task import FORMS, Task
from stages.parts.ablation import ABLATION_COLUMNS, ablate
from stages.parts.hooked_runs import Hooks, activations, predict
from stages.parts.interchange import EXPERIMENTS, Interchange, answers, draw_scene, mlp2_input_one_operand

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

PHASES = ("addition", "assignment", "refinement")
INTERCHANGE_COLUMNS = (
    *("experiment", "form", "side", "variant"),
    *("accuracy_counterfactual", "accuracy_original", "unchanged", "n"),
)


class InterventionsParams(Section):
    """Section ``interventions``: how many sequences of each form an experiment has, and the seed that draws them."""

    sequences: int = Field(ge=1, le=1_000_000)
    seed: int = Field(ge=0, lt=2**63)


def patch(bridge: "TransformerBridge", x: Interchange, donors: np.ndarray, rows: slice) -> Hooks:
    """What puts the activation of `donors` [B, T] into the targets of a batch."""
    positions = torch.from_numpy(x.positions[rows])
    index = torch.arange(len(positions))[:, None], positions  # [b, 1], [b, P]
    value = activations(bridge, donors[rows], x.hook)[x.hook][index]  # [b, P, d]
    if x.base is not None:
        value = value - activations(bridge, x.base[rows], x.hook)[x.hook][index]

    def put(activation: Tensor, hook: Any) -> Tensor:
        return activation.index_put(index, value, accumulate=x.base is not None)

    return [(x.hook, put)]


def judge(task: Task, x: Interchange, predicted: np.ndarray, unpatched: np.ndarray) -> Iterator[dict[str, Any]]:
    """Compare predictions [B] with the counterfactual and the original answers, and with those without a patch.

    Yields:
        for either side: side (of the asked variable), accuracy_counterfactual, accuracy_original, unchanged, n.
    """
    counterfactual, original = answers(task, x.donors), answers(task, x.scene.tokens)
    for side, name in enumerate(("left", "right")):
        rows = x.scene.side == side
        if rows.any():
            yield {
                "side": name,
                "accuracy_counterfactual": (predicted == counterfactual)[rows].mean(),
                "accuracy_original": (predicted == original)[rows].mean(),
                "unchanged": (predicted == unpatched)[rows].mean(),
                "n": rows.sum(),
            }


def interchange(
    bridge: "TransformerBridge", task: Task, size: int, rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """Every experiment on `size` sequences of each form, or on as many as the task has.

    Yields:
        `INTERCHANGE_COLUMNS`; the variants are ``unpatched``, ``interchange`` and ``placebo``.
    """
    for form in (1, 2):
        scene = draw_scene(task, form, size, rng)
        plain = predict(bridge, scene.tokens) if len(scene) else None
        for make in EXPERIMENTS:
            x = make(task, scene, rng)
            if not len(x.scene):
                continue
            unpatched = plain if x.targets is scene.tokens else predict(bridge, x.targets)
            predictions = {"unpatched": unpatched}
            for variant, donors in (("interchange", x.donors), ("placebo", x.placebos)):
                predictions[variant] = predict(bridge, x.targets, partial(patch, bridge, x, donors))
            for variant, predicted in predictions.items():
                for row in judge(task, x, predicted, unpatched):
                    yield {"experiment": make.__name__, "form": FORMS[form], "variant": variant, **row}


def moments(steps: list[int], phases: Mapping[str, int | None], where: str) -> dict[str, int]:
    """The checkpoints to test, by name: before and at each phase that was reached, and the last (``final``).

    Raises:
        InputError: a phase is at a step of which there is no checkpoint.
    """
    found = {}
    for phase in PHASES:
        step = phases[phase]
        if step is None:
            continue
        if step not in steps:
            raise InputError(
                f"{where} puts {phase} at step {step}, of which there is no checkpoint: run progress again"
            )
        before = [earlier for earlier in steps if earlier < step]
        found |= {f"before {phase}": before[-1]} if before else {}
        found[phase] = step
    return found | {"final": steps[-1]}


def by_moment(rows: Mapping[int, list[dict]], named: Mapping[str, int], columns: tuple[str, ...]) -> pd.DataFrame:
    """The rows of each step under the name of each moment that it is: step, moment, then `columns`."""
    table = [{"step": step, "moment": moment, **row} for moment, step in named.items() for row in rows[step]]
    return pd.DataFrame(table, columns=["step", "moment", *columns])


def summary(interchanges: pd.DataFrame, ablations: pd.DataFrame) -> dict[str, float | None]:
    """What metrics/interventions.json holds, of the final checkpoint unless a name ends in another moment.

    How often each interchange gives the counterfactual answer, over both forms, and how often the one that tells
    whether the adder is shared did at earlier moments; the smallest share of predictions that a placebo leaves; and
    accuracy on 2var sequences, which need layer 1 at numbers and at ``=``, with each site ablated.
    """
    swapped = interchanges[interchanges["variant"] == "interchange"].set_index(["experiment", "moment"])
    hits = swapped["accuracy_counterfactual"] * swapped["n"]
    share = hits.groupby(level=[0, 1]).sum() / swapped["n"].groupby(level=[0, 1]).sum()
    one_operand = mlp2_input_one_operand.__name__
    placebos = interchanges[(interchanges["moment"] == "final") & (interchanges["variant"] == "placebo")]
    left = ablations[(ablations["moment"] == "final") & (ablations["form"] == "2var")].set_index("ablated")["accuracy"]
    sites = [name for name in ablations["ablated"].unique() if name != "nothing"]
    return {
        **{make.__name__: share.get((make.__name__, "final")) for make in EXPERIMENTS},
        **{f"{one_operand}_{moment}": share.get((one_operand, moment)) for moment in ("addition", "assignment")},
        "placebo_unchanged_min": placebos["unchanged"].min(),
        **{f"ablated_{name}_2var": left.get(name) for name in sites},
    }


def main(
    checkpoints: Annotated[Path, typer.Option(help="Folder of checkpoints.")] = CHECKPOINTS,
    out: Annotated[Path, typer.Option(help="Folder with metrics/progress.json; results go below it.")] = Path("."),
    params_file: Annotated[Path, typer.Option("--params", help="Parameter file.")] = params.PARAMS,
) -> None:
    """Intervene at the final checkpoint and on both sides of each phase that was reached."""
    p = params.read(params_file, "interventions", InterventionsParams)
    files = find(checkpoints)
    progress = out / "metrics/progress.json"
    named = moments(list(files), read_moments(progress), str(progress))

    rows, ablation_rows = {}, {}
    for step in sorted(set(named.values())):
        weights, config = load_checked(files[step], params_file)
        bridge, rng = to_bridge(weights, config), np.random.default_rng(p.seed)  # the same sequences at every step
        rows[step] = list(interchange(bridge, config.task, p.sequences, rng))
        ablation_rows[step] = list(ablate(bridge, config.task, p.sequences, rng))
    interchanges = by_moment(rows, named, INTERCHANGE_COLUMNS)
    ablations = by_moment(ablation_rows, named, ABLATION_COLUMNS)

    write_csv(out / "plots/interventions.csv", interchanges)
    write_csv(out / "plots/interventions_ablation.csv", ablations)
    write_metrics(out / "metrics/interventions.json", summary(interchanges, ablations))


if __name__ == "__main__":
    params.run(main)
