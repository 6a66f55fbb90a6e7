"""How fast a training step is, as ratios of times taken in one process: ``python -m tests.benchmarks.step``.

Everything runs in turn, round after round, and a ratio is the median over rounds of the ratio within a round, so that a
machine whose speed drifts gives the same numbers. Measured:

- step: loss, gradients and fused AdamW on one batch, as `stages.train` does it;
- bridge: the same batch, loss and optimiser through the TransformerLens bridge. It computes all positions and layer 1's
  MLP of zeros, as a TransformerLens model does; its zeros are frozen, which spares it their gradients and updates;
- products: every matrix product (mm, bmm) that one step calls, forward and backward, noted down once and called again
  on the same tensors, one after the other;
- draw: drawing one step's batch, as a share of the block that is drawn together;
- evaluate: every split and 0var_exact with weights that are loaded, if the data folder holds their sequences.
"""

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from stages import evaluate
from stages.core import params
from stages.core.bridge import to_bridge
from stages.core.circuit_form import Circuits
from stages.core.task import Task, trained_pairs
from stages.core.weights import Config, ModelConfig, Weights, initialise
from stages.generate import GenerateParams
from stages.train import BLOCK, TrainParams, batches, loss_and_accuracy, training_data

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
MS = 1000


class NotedProducts(TorchDispatchMode):
    """Notes every matrix product that is called inside, with its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Tensor], tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Note and call."""
        if func in PRODUCTS:
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def again(self) -> None:
        """Call them again."""
        for product, operands in self.calls:
            product(*operands)


def step_of(parameters: list[Tensor], loss: Callable[[], Tensor], p: TrainParams) -> Callable[[], None]:
    """One optimiser step on a loss, with the optimiser of `stages.train`."""
    optimiser = torch.optim.AdamW(parameters, lr=p.lr, betas=(0.9, 0.999), weight_decay=p.weight_decay, fused=True)

    def step() -> None:
        value = loss()
        optimiser.zero_grad()
        value.backward()
        optimiser.step()

    return step


def circuit_step(weights: Weights, p: TrainParams, tokens: Tensor, answers: Tensor) -> Callable[[], None]:
    """The step in circuit form."""
    own = {name: w.clone().requires_grad_() for name, w in weights.items()}
    return step_of(list(own.values()), lambda: loss_and_accuracy(own, tokens, answers)[0], p)


def bridge_step(
    weights: Weights, config: Config, p: TrainParams, tokens: Tensor, answers: Tensor
) -> Callable[[], None]:
    """The same step through the bridge."""
    bridge = to_bridge(weights, config)
    trained = [parameter for parameter in bridge.parameters() if parameter.requires_grad]
    return step_of(trained, lambda: torch.nn.functional.cross_entropy(bridge(tokens)[:, -1], answers), p)


def seconds(call: Callable[[], object], times: int) -> float:
    """Mean time of one call."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def measure(jobs: dict[str, tuple[Callable[[], object], int]], rounds: int) -> dict[str, list[float]]:
    """Seconds a call of every job in every round, after one round that is thrown away.

    Args:
        jobs: by name, what to call and how many times a round.
    """
    taken = [{name: seconds(*job) for name, job in jobs.items()} for _ in range(rounds + 1)][1:]
    return {name: [one[name] for one in taken] for name in jobs}


def report(name: str, ratios: list[float], wanted: str) -> None:
    """One line: the median ratio, how far single rounds are from it, and what it should be."""
    print(f"{name:<34} {median(ratios):8.3f}   ({min(ratios):.3f} to {max(ratios):.3f}; {wanted})")


def main(
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 30,
    data: Annotated[Path, typer.Option(help="Folder with eval.parquet and exact.parquet.")] = Path("data"),
    params_file: Annotated[Path, typer.Option("--params", help="Parameter file.")] = params.PARAMS,
) -> None:
    """Measure a training step against TransformerLens, against its matrix products, and what goes with it."""
    task = params.read(params_file, "task", Task)
    config = Config(task, params.read(params_file, "model", ModelConfig))
    p = params.read(params_file, "train", TrainParams)
    split = params.read(params_file, "generate", GenerateParams)
    pairs = np.stack(np.divmod(np.flatnonzero(trained_pairs(task.N, split.f, split.seed)), task.N), axis=1)
    draw = training_data(task, pairs, p)
    tokens, answers = next(batches(task, draw, p, 0))
    weights = initialise(config, p.seed)

    step = circuit_step(weights, p, tokens, answers)
    step()
    with NotedProducts() as products, FlopCounterMode(display=False) as counter:
        step()
    jobs = {
        "step": (step, 8),
        "bridge": (bridge_step(weights, config, p, tokens, answers), 1),
        "products": (products.again, 8),
        "draw": (lambda: list(islice(batches(task, draw, p, 0), BLOCK)), 1),
    }
    if (data / "eval.parquet").exists() and (data / "exact.parquet").exists():
        splits, _ = evaluate.load_sequences(data)
        splits.pop(evaluate.LAST_CHECKPOINT, None)
        jobs["evaluate"] = (lambda: evaluate.judge_splits(Circuits.of(weights), splits), 1)
    taken = measure(jobs, rounds)
    taken["draw"] = [block / BLOCK for block in taken["draw"]]

    print(f"{torch.get_num_threads()} threads, {rounds} rounds, batches of {p.batch_size}; milliseconds, median:")
    print(", ".join(f"{name} {median(times) * MS:.2f}" for name, times in taken.items()))
    print(f"one step calls {len(products.calls)} matrix products, {counter.get_total_flops() / 1e9:.3f} GFLOP")

    def ratios(name: str, of: str) -> list[float]:
        return [a / b for a, b in zip(taken[name], taken[of], strict=True)]

    report("bridge / step", ratios("bridge", "step"), "at least 12")
    report("draw / step", ratios("draw", "step"), "at most 0.1")
    report("step / products", ratios("step", "products"), "at most 2.5")
    if "evaluate" in taken:
        report("evaluate, seconds a checkpoint", taken["evaluate"], "at most 1")
    else:
        print(f"evaluate is not measured: {data} does not hold eval.parquet and exact.parquet")


if __name__ == "__main__":
    params.run(main)
