"""Train the two-layer transformer on examples drawn fresh at every step (paper, section 3 and appendix on training).

Writes the final weights, a checkpoint at step 0, every `checkpoint_every` steps and at the last, and the curves of the
training loss and accuracy. A run that is killed and started again gives the same bytes as one that was not
(`stages.core.state`); examples are a function of `data_seed` and the step alone.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
import typer
from dvclive import Live
from pydantic import Field, model_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Task as Job
from rich.text import Text
from torch import Tensor

from stages.core import circuit_form, layouts, params, state, task, weights
from stages.core.circuit_form import Circuits, forward
from stages.core.layouts import TrainingDraw, training_examples
from stages.core.params import InputError, Section
from stages.core.weights import Config, ModelConfig, Weights

BLOCK = 32  # steps whose examples are drawn together
MODULES = (params, task, layouts, weights, circuit_form, state)  # with this file, the code that results depend on


class TrainParams(Section):
    """Section ``train``.

    `r` is the relative frequency of 2var examples (mode ``frequency``), or the share of their copies that is kept (mode
    ``subset``, as in the published sweep). `seed` draws the initial weights, `data_seed` the examples.
    """

    r: float = Field(ge=0)
    r_mode: Literal["frequency", "subset"]
    weight_0var: float = Field(ge=0)
    weight_1var: float = Field(ge=0)
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    lr: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    seed: int = Field(ge=0, lt=2**63)
    data_seed: int = Field(ge=0, lt=2**63)
    checkpoint_every: int = Field(ge=1)
    device: Literal["auto", "cpu", "cuda"]

    @model_validator(mode="after")
    def _something_to_train_on(self) -> Self:
        if self.r_mode == "subset" and self.r > 1:
            raise ValueError(f"r = {self.r} with r_mode = subset: must be a number from 0 to 1")
        if not self.r + self.weight_0var + self.weight_1var:
            raise ValueError("r, weight_0var and weight_1var are all 0: one of them must be above 0")
        return self


def checkpoint_steps(steps: int, every: int) -> list[int]:
    """0, every `every` steps, and the last."""
    return [*range(0, steps, every), steps]


def training_data(the_task: task.Task, pairs: np.ndarray, p: TrainParams) -> TrainingDraw:
    """What the examples are drawn from.

    Args:
        pairs: [P, 2] the trained pairs.

    Raises:
        InputError: the ``subset`` mode kept no 2var example and there is no other form to train on.
    """
    copies = None
    if p.r_mode == "subset":
        rng = np.random.default_rng(np.random.SeedSequence(p.data_seed, spawn_key=(1,)))
        copies = layouts.kept_copies(the_task, len(pairs), p.r, rng)
        if not (copies.any() or p.weight_0var or p.weight_1var):
            raise InputError(f"train.r = {p.r} with r_mode = subset kept no 2var example: must be larger")
    operands = task.Operands.of(the_task).trained
    return layouts.training_draw(the_task, operands, pairs, (p.weight_0var, p.weight_1var, p.r), copies)


def batches(the_task: task.Task, draw: TrainingDraw, p: TrainParams, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches from step `start` on, without end: tokens [batch, T] and answers [batch], int64.

    A block of steps is drawn together, from `data_seed` and the block's number alone.
    """
    for block in range(start // BLOCK, 2**63):
        rng = np.random.default_rng(np.random.SeedSequence(p.data_seed, spawn_key=(0, block)))
        tokens, answers = training_examples(the_task, draw, BLOCK * p.batch_size, rng)
        for i in range(max(0, start - block * BLOCK), BLOCK):
            rows = slice(i * p.batch_size, (i + 1) * p.batch_size)
            yield torch.from_numpy(tokens[rows].astype(np.int64)), torch.from_numpy(answers[rows])


def loss_and_accuracy(w: Weights, tokens: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy at the last position, in nats, and the share of right answers."""
    logits = forward(Circuits.of(w), tokens).logits
    return torch.nn.functional.cross_entropy(logits, answers), (logits.detach().argmax(-1) == answers).float().mean()


class Trainer:
    """Weights, optimiser and log; `advance` makes steps, `content` and `restore` are its state in a file."""

    def __init__(self, config: Config, p: TrainParams, draw: TrainingDraw, device: torch.device) -> None:
        self.config, self.p, self.draw, self.device = config, p, draw, device
        initial = weights.initialise(config, p.seed)
        self.weights = {name: w.to(device).requires_grad_() for name, w in initial.items()}
        self.optimiser = torch.optim.AdamW(
            self.weights.values(), lr=p.lr, betas=(0.9, 0.999), weight_decay=p.weight_decay, fused=True
        )
        self.step = 0
        self.log: list[dict[str, float]] = []

    def advance(self, until: int) -> Iterator[int]:
        """Make steps up to `until`, yielding each one's number, then put their mean loss and accuracy into the log.

        Raises:
            InputError: the loss is no longer finite.
        """
        first = self.step
        total = torch.zeros(2, device=self.device, dtype=torch.float64)
        stream = batches(self.config.task, self.draw, self.p, first)
        while self.step < until:
            tokens, answers = next(stream)
            loss, accuracy = loss_and_accuracy(self.weights, tokens.to(self.device), answers.to(self.device))
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
            total += torch.stack([loss.detach(), accuracy])
            self.step += 1
            yield self.step
        loss, accuracy = (total / (until - first)).tolist()
        if not np.isfinite(loss):
            raise InputError(f"train.lr = {self.p.lr}: the loss was not finite before step {until}; must be smaller")
        self.log.append({"step": until, "loss": loss, "accuracy": accuracy})

    def content(self) -> dict[str, Any]:
        """All that is needed to go on from here."""
        w = {name: t.detach() for name, t in self.weights.items()}
        return {"step": self.step, "log": self.log, "weights": w, "optimiser": self.optimiser.state_dict()}

    def restore(self, content: dict[str, Any]) -> None:
        """Go back to what `content` returned."""
        self.step, self.log = content["step"], content["log"]
        with torch.no_grad():
            for name, w in content["weights"].items():
                self.weights[name].copy_(w)
        self.optimiser.load_state_dict(content["optimiser"])


def train(trainer: Trainer, saved: state.State, live_folder: Path) -> None:
    """Train to the end, from the saved state if there is one; checkpoints go into the state's folder."""
    checkpoints = saved.folder / "checkpoints"
    content = saved.load()
    if content is not None:
        done = [s for s in checkpoint_steps(trainer.p.steps, trainer.p.checkpoint_every) if s <= content["step"]]
        try:
            for step in done:
                weights.load(checkpoints / weights.checkpoint_name(step))
            trainer.restore(content)
            Console(stderr=True).print(f"going on from step {trainer.step}", highlight=False)
        except InputError as error:
            saved.set_aside(str(error))
    checkpoints.mkdir(exist_ok=True)
    with Live(str(live_folder), save_dvc_exp=False, dvcyaml=False, report=None) as live, progress_bar() as bar:
        for row in trainer.log:
            log_row(live, row)
        job = bar.add_task("training", total=trainer.p.steps, completed=trainer.step, loss="")
        for until in checkpoint_steps(trainer.p.steps, trainer.p.checkpoint_every):
            if until < trainer.step or (until == trainer.step and trainer.step > 0):
                continue
            if until:
                for step in trainer.advance(until):
                    bar.update(job, completed=step)
                bar.update(job, loss=f"loss {trainer.log[-1]['loss']:.4f}")
                log_row(live, trainer.log[-1])
            weights.save(checkpoints / weights.checkpoint_name(until), trainer.weights, trainer.config)
            saved.save(trainer.content())


def log_row(live: Live, row: dict[str, float]) -> None:
    """One row of the training curves."""
    live.step = row["step"]
    live.log_metric("loss", row["loss"])
    live.log_metric("accuracy", row["accuracy"])
    live.make_summary()


class Rate(ProgressColumn):
    """Steps a second."""

    def render(self, task: Job) -> Text:
        """Text of the column."""
        return Text(f"{task.speed:.0f} steps/s" if task.speed else "")


def progress_bar() -> Progress:
    """Steps, rate, time left and loss on standard error; nothing when that is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[loss]}"), console=console, disable=not console.is_terminal)


def choose_device(name: str) -> torch.device:
    """``auto`` takes CUDA where there is one.

    Raises:
        InputError: CUDA is asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("train.device = 'cuda': there is no CUDA device here; must be auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def state_key(config: Config, p: TrainParams, data: list[Path], device: torch.device) -> str:
    """Key of everything that the bytes of the result depend on."""
    facts = {
        "task": config.task.model_dump(),
        "model": config.model.model_dump(),
        "train": p.model_dump(),
        "versions": [torch.__version__, np.__version__],
        "device": [str(device), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
    }
    code = [Path(__file__), *(source_of(module) for module in MODULES)]
    return state.key_of(facts, data + code)


def source_of(module: ModuleType) -> Path:
    """The file that a module was loaded from."""
    return Path(str(module.__file__))


def main(
    data: Annotated[Path, typer.Option(help="Folder with pairs.parquet and operands.parquet.")] = Path("data"),
    out: Annotated[Path, typer.Option(help="Folder below which models/, metrics/ and plots/ are written.")] = Path("."),
    params_file: Annotated[Path, typer.Option("--params", help="Parameter file.")] = params.PARAMS,
) -> None:
    """Train the model: weights, checkpoints and training curves. A killed run is taken up where it was."""
    the_task = params.read(params_file, "task", task.Task)
    config = Config(the_task, params.read(params_file, "model", ModelConfig))
    p = params.read(params_file, "train", TrainParams)
    device = choose_device(p.device)
    draw = training_data(the_task, np.argwhere(task.read_trained_pairs(data, the_task)), p)
    task.read_table(data / "operands.parquet", the_task, ("form", "left", "right", "trained"))
    key = state_key(config, p, [data / "pairs.parquet", data / "operands.parquet"], device)
    with state.claim(key) as saved:
        trainer = Trainer(config, p, draw, device)
        train(trainer, saved, out / "plots/train")
        models = out / "models"
        models.mkdir(parents=True, exist_ok=True)
        (out / "metrics").mkdir(parents=True, exist_ok=True)
        shutil.rmtree(models / "checkpoints", ignore_errors=True)
        shutil.copytree(saved.folder / "checkpoints", models / "checkpoints")
        weights.save(models / "model.safetensors", trainer.weights, config)
        # DVCLive's own summary is what people compare; left in its folder, DVC would take it for a curve.
        shutil.move(out / "plots/train/metrics.json", out / "metrics/train.json")
        saved.remove()


if __name__ == "__main__":
    params.run(main)
