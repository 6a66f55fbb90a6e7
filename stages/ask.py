"""A tool, not a stage: put a problem to a trained model.

Prints the answer with its probability, the runners-up, the split that the problem belongs to, and where ``=`` looks in
each layer. Without a problem, asks on standard input until it ends.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from stages.core import params
from stages.core.attention import PADDING, attention_table
from stages.core.checkpoints import MODEL
from stages.core.circuit_form import Circuits, forward
from stages.core.layouts import values
from stages.core.params import InputError
from stages.core.task import CONSTANT, Operands, Split, Task, read_table, read_trained_pairs
from stages.core.text import to_text, to_tokens
from stages.core.weights import load

RUNNERS_UP = 3


@dataclass(frozen=True)
class Answer:
    """What the model says to one problem, and what the problem is.

    Attributes:
        problem: as text.
        answer, probability: what the model says.
        expected: what is right.
        runners_up: (answer, probability), the likeliest first.
        pair: the two values that are added.
        pair_trained: whether training saw this pair; None where that is not known.
        held_out_positions: how many variables of the sum stand on a side where training never showed them.
        split: the problem's split; None where `pair_trained` is.
        trained: whether training could have seen the problem; None where that is not known.
        note: what sets the sequence apart from every sequence of the task, or None.
        tokens: [T] in words, padding as ``·``.
        layer1, layer2: [T] attention from ``=``, averaged over heads.
    """

    problem: str
    answer: int
    probability: float
    expected: int
    runners_up: list[tuple[int, float]]
    pair: tuple[int, int]
    pair_trained: bool | None
    held_out_positions: int
    split: str | None
    trained: bool | None
    note: str | None
    tokens: list[str]
    layer1: list[float]
    layer2: list[float]


def trained_pairs(folder: Path, task: Task) -> np.ndarray | None:
    """Which pairs training saw, bool [N, N]; None where the folder has no pairs.parquet, or one for another task."""
    file = folder / "pairs.parquet"
    if not file.exists() or read_table(file)[1] != task:
        return None
    return read_trained_pairs(folder, task)


@torch.no_grad()
def answer(circuits: Circuits, task: Task, trained: np.ndarray | None, text: str) -> Answer:
    """Put one problem to the model.

    Args:
        circuits: the model.
        task: its task.
        trained: of `trained_pairs`.
        text: such as ``c=17, b=42, b+19``.

    Raises:
        InputError: the text is no problem of this task.
    """
    tokens = to_tokens(task, text)[None]  # [1, T]
    logits = forward(circuits, torch.from_numpy(tokens.astype(np.int64))).logits[0]  # [N]
    probability, number = logits.softmax(0).topk(min(1 + RUNNERS_UP, task.N))
    ranked = [*zip(number.tolist(), probability.tolist(), strict=True)]
    n1, n2 = values(task, tokens)[0].tolist()

    couple = np.maximum(tokens[0, -3:-1].astype(int) - task.first_variable, CONSTANT)
    operands = Operands.of(task)
    (which,) = np.flatnonzero((operands.left == couple[0]) & (operands.right == couple[1]))
    held_out = int(operands.held_out[which])
    pair_trained = None if trained is None else bool(trained[n1, n2])
    split = None if pair_trained is None else Split(int(operands.form[which]), held_out, pair_trained)

    looks = attention_table(circuits, task, tokens)
    looks = looks[looks["query"] == task.context - 1]
    layer1, layer2 = (looks[looks.layer == layer] for layer in (1, 2))
    return Answer(
        problem=to_text(task, tokens[0]),
        answer=ranked[0][0],
        probability=ranked[0][1],
        expected=(n1 + n2) % task.N,
        runners_up=ranked[1:],
        pair=(n1, n2),
        pair_trained=pair_trained,
        held_out_positions=held_out,
        split=None if split is None else split.name,
        trained=False if held_out else pair_trained,
        note=None if (tokens < task.N)[0, : task.prefix].any() else "no assignment; training always has at least one",
        tokens=layer1.key_token.tolist(),
        layer1=(layer1.weight / len(circuits.scores1)).tolist(),
        layer2=(layer2.weight / len(circuits.QK2)).tolist(),
    )


def show(said: Answer, console: Console) -> None:
    """Print an answer for people."""
    right = "right" if said.answer == said.expected else f"wrong, it is {said.expected}"
    console.print(f"{said.problem} → [bold]{said.answer}[/bold] ({right}), probability {said.probability:.4f}")
    console.print("then " + ", ".join(f"{number} ({p:.2g})" for number, p in said.runners_up))
    console.print(membership(said))
    if said.note:
        console.print(f"note: {said.note}")

    table = Table("where = looks", box=None, padding=(0, 2, 0, 0))
    table.add_column("layer 1", justify="right")
    table.add_column("layer 2", justify="right")
    for word, a, b in looks_by_token(said):
        table.add_row(word, *(f"[bold]{weight:.2f}[/bold]" if weight >= 0.2 else f"{weight:.2f}" for weight in (a, b)))
    console.print(table)


def membership(said: Answer) -> str:
    """The problem's split and what it says, in one line."""
    pair = {True: "trained", False: "held out", None: "trained or held out (no pairs.parquet of this task to tell)"}
    variables = ("no variable", "one variable", "two variables")[said.held_out_positions]
    split = f"split {said.split}: " if said.split else ""
    return f"{split}pair {said.pair} is {pair[said.pair_trained]}; {variables} in a held-out position"


def looks_by_token(said: Answer) -> list[tuple[str, float, float]]:
    """Token, layer 1's and layer 2's weight from ``=``; all padding together in front, if there is any."""
    rows = [*zip(said.tokens, said.layer1, said.layer2, strict=True)]
    padding = [row for row in rows if row[0] == PADDING]
    others = [row for row in rows if row[0] != PADDING]
    if not padding:
        return others
    return [(f"padding ×{len(padding)}", sum(row[1] for row in padding), sum(row[2] for row in padding)), *others]


def questions() -> Iterator[str]:
    """The lines of standard input that are not empty; with a prompt where a person types and reads."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # what is no text shall be answered like other nonsense
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line:
            yield line


def main(
    problem: Annotated[
        list[str] | None, typer.Argument(help="Such as 'c=17, b=42, b+19'; none: asks for them.")
    ] = None,
    model: Annotated[Path, typer.Option(help="The model's weights.")] = MODEL,
    data: Annotated[Path, typer.Option(help="Folder with pairs.parquet, which says what was trained.")] = Path("data"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a problem, for programs.")] = False,
) -> None:
    """Put a problem to a trained model."""
    weights, config = load(model)
    task, circuits = config.task, Circuits.of(weights)
    trained = trained_pairs(data, task)
    console = Console(highlight=False, soft_wrap=True)

    def respond(text: str) -> None:
        said = answer(circuits, task, trained, text)
        if as_json:
            print(json.dumps(asdict(said), ensure_ascii=False), flush=True)
        else:
            show(said, console)

    if problem:
        respond(" ".join(problem))
        return
    for text in questions():
        try:
            respond(text)
        except InputError as error:
            if as_json:  # a line for each problem, so that a program knows which one it was
                print(json.dumps({"problem": text, "error": str(error)}, ensure_ascii=False), flush=True)
            else:
                print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    params.run(main)
