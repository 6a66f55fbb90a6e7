"""Interchange experiments as sequences: what runs, what is exchanged, and with which answer.

A target run gets one activation from a donor run. The donor's sequence differs from the target's in what the activation
is supposed to carry; the *counterfactual* answer is the donor sequence's own answer, the *original* answer is the
target's. A placebo donor carries the same relevant value as the target and must change no prediction.

Targets are 1var and 2var sequences over all pairs and all operand couples. In each, one of the core's variables is the
*asked* one (at random where there are two), and one that is assigned, not in the core and with another number is the
*other* one.

Shapes: B sequences of T tokens.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from stages.core import layouts
from stages.core.layouts import Problems, lay_out
from stages.core.task import CONSTANT, Operands, Task

LAYER1 = "blocks.0.hook_attn_out"
MLP2_INPUT = "blocks.1.mlp.hook_in"
SURPLUS = 4  # sequences drawn for each one wanted, since not every one has another variable to exchange with


@dataclass(frozen=True)
class Scene:
    """B sequences and what can be exchanged in them.

    Attributes:
        tokens: [B, T].
        operands: [B] what stands in the cores.
        side: [B] which operand is the asked variable, 0 left or 1 right.
        other_at: [B] where the other variable is assigned; its number follows.
    """

    tokens: np.ndarray
    operands: Operands
    side: np.ndarray
    other_at: np.ndarray

    def __getitem__(self, rows: np.ndarray) -> "Scene":
        return Scene(*(getattr(self, field.name)[rows] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def rows(self) -> np.ndarray:
        """0..B-1, to index with."""
        return np.arange(len(self))

    @property
    def asked(self) -> np.ndarray:
        """[B] token of the asked variable."""
        return self.tokens[self.rows, self.side - 3]

    @property
    def other(self) -> np.ndarray:
        """[B] token of the other variable."""
        return self.tokens[self.rows, self.other_at]


@dataclass(frozen=True)
class Interchange:
    """One experiment on the B sequences of a scene.

    Attributes:
        scene: whose right answers are the original ones.
        hook: TransformerLens's name of what is patched.
        positions: [B, P] where.
        targets, donors, placebos: [B, T] sequences; the donors' right answers are the counterfactual ones.
        base: [B, T] or None. None: the donor's activation replaces the target's. Sequences: the donor's activation
            minus theirs is added to the target's.
    """

    scene: Scene
    hook: str
    positions: np.ndarray
    targets: np.ndarray
    donors: np.ndarray
    placebos: np.ndarray
    base: np.ndarray | None = None


def draw_problems(task: Task, form: int, size: int, rng: np.random.Generator) -> Problems:
    """Problems of a form, over all pairs and all operand couples."""
    operands = Operands.of(task)
    n1, n2 = rng.integers(task.N, size=(2, size))
    return Problems(n1, n2, operands[rng.choice(np.flatnonzero(operands.form == form), size)])


def draw_scene(task: Task, form: int, size: int, rng: np.random.Generator) -> Scene:
    """`size` sequences of a form (1 or 2) that assign another variable; fewer where the task has few of them."""
    problems = draw_problems(task, form, SURPLUS * size, rng)
    tokens = lay_out(task, problems, rng)
    is_variable = tokens[:, -3:-1] >= task.first_variable
    side = np.where(is_variable.all(1), rng.integers(2, size=len(tokens)), is_variable.argmax(1))
    number = layouts.values(task, tokens)[np.arange(len(tokens)), side]
    prefix, following = tokens[:, : task.prefix], tokens[:, 1 : task.prefix + 1]
    in_core = (prefix[:, :, None] == tokens[:, None, -3:-1]).any(2)
    candidates = (prefix >= task.first_variable) & ~in_core & (following != number[:, None])
    other_at = np.where(candidates, rng.random(candidates.shape), -1).argmax(1)
    scene = Scene(tokens, problems.operands, side, other_at)
    return scene[np.flatnonzero(candidates.any(1))[:size]]


def draw_distracted(task: Task, form: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """`size` sequences [B, T] of a form with a distractor, an assigned variable that is not in the core.

    None where the task leaves no room for a distractor.
    """
    tokens = lay_out(task, draw_problems(task, form, SURPLUS * size, rng), rng)
    assigned = (tokens[:, : task.prefix] >= task.first_variable).sum(1)
    return tokens[assigned > form][:size]


def mlp2_input(task: Task, scene: Scene, rng: np.random.Generator) -> Interchange:
    """MLP2's input at ``=`` from a 0var run: the same assignments, with constants n1', n2' of another sum in the core.

    The residual stream that passes MLP2 by stays the target's. Placebo: the constants are the target's n1, n2.

    A whole input decides what MLP2 says whatever the target run does by itself: this succeeds as soon as sums of
    constants are learned, on targets that the model cannot solve yet. It shows that MLP2's output decides the answer,
    and nothing about the adder being shared; for that see `mlp2_input_one_operand`.
    """
    n1, n2 = layouts.values(task, scene.tokens).T
    first = rng.integers(task.N, size=len(n1))
    second = (n1 + n2 + rng.integers(1, task.N, size=len(n1)) - first) % task.N
    return Interchange(
        scene,
        MLP2_INPUT,
        positions=_at(scene, task.context - 1),
        targets=scene.tokens,
        donors=_with_constants(scene.tokens, first, second),
        placebos=_with_constants(scene.tokens, n1, n2),
    )


def mlp2_input_one_operand(task: Task, scene: Scene, rng: np.random.Generator) -> Interchange:
    """To MLP2's input at ``=`` is added what changes in a 0var run with n1, n2 when one of them becomes another number.

    The test of one adder for both: a sum begun with variables has to go on with constants. The number that changes is
    the asked variable's. Placebo: the change from the 0var run with n1, n2 to another one that differs from it in the
    assignments.
    """
    n1, n2 = layouts.values(task, scene.tokens).T
    shift = rng.integers(1, task.N, size=len(n1))
    first, second = (n1 + shift * (scene.side == 0)) % task.N, (n2 + shift * (scene.side == 1)) % task.N
    return Interchange(
        scene,
        MLP2_INPUT,
        positions=_at(scene, task.context - 1),
        targets=scene.tokens,
        donors=_with_constants(scene.tokens, first, second),
        placebos=_with_constants(_same_core(task, scene, rng), n1, n2),
        base=_with_constants(scene.tokens, n1, n2),
    )


def layer1_at_equals(task: Task, scene: Scene, rng: np.random.Generator) -> Interchange:
    """Layer 1's output at ``=`` from the same sequence asking for the other variable in place of the asked one.

    Left of a constant the exchange may fail for a reason of its own, see `layer1_at_equals_and_right`. Placebo: a
    sequence with the same core, all assignments redrawn.
    """
    donors = scene.tokens.copy()
    donors[scene.rows, scene.side - 3] = scene.other
    return Interchange(
        scene,
        LAYER1,
        positions=_at(scene, task.context - 1),
        targets=scene.tokens,
        donors=donors,
        placebos=_same_core(task, scene, rng),
    )


def layer1_at_equals_and_right(task: Task, scene: Scene, rng: np.random.Generator) -> Interchange:
    """As `layer1_at_equals`, and also at the operand right of ``+``.

    A constant there stands behind a variable, as an assigned number does: layer 1 may bind it to that variable, and
    layer 2 may look for it under that name.
    """
    positions = _at(scene, task.context - 1, task.context - 2)
    return replace(layer1_at_equals(task, scene, rng), positions=positions)


def layer1_at_two_values(task: Task, scene: Scene, rng: np.random.Generator) -> Interchange:
    """Layer 1's output at the numbers of both variables, from the same sequence with their names exchanged.

    Either number is bound to the other name. Placebo: the same variables in the same places, all numbers redrawn.
    """
    donors = _renamed(task, scene.tokens, scene.asked, scene.other)
    donors[scene.rows, scene.other_at] = scene.asked
    asked_number = layouts.value_positions(task, scene.tokens)[scene.rows, scene.side]
    return Interchange(
        scene,
        LAYER1,
        positions=np.stack([asked_number, scene.other_at + 1], axis=1),
        targets=scene.tokens,
        donors=donors,
        placebos=_renumbered(task, scene.tokens, rng),
    )


def layer1_at_one_value(task: Task, scene: Scene, rng: np.random.Generator) -> Interchange:
    """Layer 1's output at the other variable's number alone, from a run in which that number is the asked variable's.

    So that no second number is bound to the asked variable, the target has it renamed, where it is assigned, to a
    variable that the sequence does not have: without a patch, a model that binds cannot answer. The original answer is
    the one before the renaming. The donor is the target with the other variable renamed to the asked one. Placebo: the
    target with all numbers redrawn.
    """
    variables = task.first_variable + np.arange(task.variables)
    assigned = (scene.tokens[:, : task.prefix, None] == variables).any(1)  # [B, variables]
    one_is_left = ~assigned.all(1)
    scene, assigned = scene[one_is_left], assigned[one_is_left]
    absent = variables[np.where(assigned, -1, rng.random(assigned.shape)).argmax(1)]
    targets = _renamed(task, scene.tokens, scene.asked, absent)
    return Interchange(
        scene,
        LAYER1,
        positions=scene.other_at[:, None] + 1,
        targets=targets,
        donors=_renamed(task, targets, scene.other, scene.asked),
        placebos=_renumbered(task, targets, rng),
    )


EXPERIMENTS = (
    mlp2_input,
    mlp2_input_one_operand,
    layer1_at_equals,
    layer1_at_equals_and_right,
    layer1_at_two_values,
    layer1_at_one_value,
)


def answers(task: Task, tokens: np.ndarray) -> np.ndarray:
    """The right answers [B]."""
    return layouts.values(task, tokens).sum(1) % task.N


def _at(scene: Scene, *positions: int) -> np.ndarray:
    """The same positions in every sequence, [B, P]."""
    return np.tile(positions, (len(scene), 1))


def _with_constants(tokens: np.ndarray, n1: np.ndarray, n2: np.ndarray) -> np.ndarray:
    """The sequences with constants in the core."""
    return np.column_stack([tokens[:, :-3], n1, n2, tokens[:, -1]])


def _same_core(task: Task, scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Sequences with the same cores, everything before them redrawn."""
    is_constant = np.stack([scene.operands.left, scene.operands.right]) == CONSTANT
    n1, n2 = np.where(is_constant, scene.tokens[:, -3:-1].T, rng.integers(task.N, size=is_constant.shape))
    return lay_out(task, Problems(n1, n2, scene.operands), rng)


def _renumbered(task: Task, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The sequences with every assigned number redrawn."""
    is_number = (tokens < task.N) & (np.arange(task.context) < task.prefix)
    return np.where(is_number, rng.integers(task.N, size=tokens.shape), tokens)


def _renamed(task: Task, tokens: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The sequences with variable `old` [B] named `new` [B] where it is assigned; the core stays."""
    is_old = (tokens == old[:, None]) & (np.arange(task.context) < task.prefix)
    return np.where(is_old, new[:, None], tokens)
