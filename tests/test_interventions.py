"""The interventions, on models whose circuit is known and against a forward pass written out."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages import interventions
from stages.core.bridge import to_bridge
from stages.core.circuit_form import Circuits, forward, mlp2
from stages.core.layouts import lay_out, value_positions, values
from stages.core.params import InputError
from stages.core.task import CONSTANT, Task
from stages.core.weights import Config, ModelConfig, Weights, checkpoint_name, initialise, save
from stages.draw import interventions as draw
from stages.parts import ablation
from stages.parts.hooked_runs import ONLY_LAST, predict
from stages.parts.interchange import (
    EXPERIMENTS,
    LAYER1,
    answers,
    draw_distracted,
    draw_problems,
    draw_scene,
    layer1_at_equals,
    layer1_at_equals_and_right,
    layer1_at_one_value,
    layer1_at_two_values,
    mlp2_input,
    mlp2_input_one_operand,
)
from tests.hand_built import hand_built

SMALL = Task(N=5, variables=5, context=12, left_only=1, right_only=1)
SIZE = 400


@pytest.fixture(scope="module")
def known():
    """A hand-built model that finds every constant by its position."""
    return to_bridge(*hand_built(SMALL))


@pytest.fixture(scope="module")
def known_binding():
    """A hand-built model that finds a constant right of a variable by that variable's name."""
    return to_bridge(*hand_built(SMALL, binds_right_constant=True))


@pytest.fixture(scope="module")
def tables(known):
    """What the stage finds in the hand-built model: interchanges and ablations."""
    rng = np.random.default_rng(0)
    return tuple(pd.DataFrame(rows(known, SMALL, SIZE, rng)) for rows in (interventions.interchange, ablation.ablate))


def drawn(task: Task, form: int, make, seed: int = 0, size: int = SIZE):
    rng = np.random.default_rng(seed)
    return make(task, draw_scene(task, form, size, rng), rng)


def patched(bridge, x, donors: np.ndarray) -> np.ndarray:
    return predict(bridge, x.targets, partial(interventions.patch, bridge, x, donors))


# What the experiments are made of


tasks = st.builds(
    Task,
    N=st.integers(2, 30),
    variables=st.integers(4, 12),
    context=st.integers(10, 20),
    left_only=st.just(1),
    right_only=st.just(1),
)


@settings(max_examples=25, deadline=None)
@given(tasks, st.sampled_from([1, 2]), st.sampled_from(EXPERIMENTS), st.integers(0, 1000))
def test_the_counterfactual_answer_is_never_the_original_one(task, form, make, seed):
    x = drawn(task, form, make, seed, size=50)
    assert (answers(task, x.donors) != answers(task, x.scene.tokens)).all()


@settings(max_examples=25, deadline=None)
@given(tasks, st.sampled_from([1, 2]), st.integers(0, 1000))
def test_the_other_variable_is_assigned_and_not_in_the_core(task, form, seed):
    scene = draw_scene(task, form, 50, np.random.default_rng(seed))
    assert (scene.asked == np.where(scene.side == 0, scene.tokens[:, -3], scene.tokens[:, -2])).all()
    assert (scene.asked >= task.first_variable).all() and (scene.other >= task.first_variable).all()
    assert (scene.other_at < task.prefix).all()
    assert (scene.other[:, None] != scene.tokens[:, -4:]).all()
    other_number = scene.tokens[scene.rows, scene.other_at + 1]
    assert (other_number != values(task, scene.tokens)[scene.rows, scene.side]).all()


def test_a_scene_is_as_long_as_asked_for_and_uses_both_sides():
    for form in (1, 2):
        scene = draw_scene(SMALL, form, SIZE, np.random.default_rng(0))
        assert len(scene) == SIZE
        assert 0.4 < scene.side.mean() < 0.6


@settings(max_examples=25, deadline=None)
@given(tasks, st.sampled_from([0, 1, 2]), st.integers(0, 1000))
def test_sequences_with_a_distractor_assign_a_variable_that_is_not_asked_for(task, form, seed):
    tokens = draw_distracted(task, form, 30, np.random.default_rng(seed))
    assert len(tokens) == 30
    for row in tokens:
        core = set(row[-3:-1][row[-3:-1] >= task.first_variable])
        assigned = set(row[: task.prefix][row[: task.prefix] >= task.first_variable])
        assert len(core) == form and core < assigned


def test_a_task_of_two_variables_has_no_distractor_for_both():
    task, rng = Task(N=3, variables=2, context=12, left_only=0, right_only=0), np.random.default_rng(0)
    assert [len(draw_distracted(task, form, 30, rng)) for form in range(3)] == [30, 30, 0]


@pytest.mark.parametrize("form", [1, 2])
@pytest.mark.parametrize("make", [mlp2_input, mlp2_input_one_operand])
def test_donors_of_mlp2_input_write_constants_among_the_same_assignments(make, form):
    x = drawn(SMALL, form, make)
    for sequences in (x.donors, x.placebos):
        assert (sequences[:, -3:-1] < SMALL.N).all()
    assert (x.donors[:, :-3] == x.targets[:, :-3]).all()
    assert (x.placebos[:, -3:-1] == values(SMALL, x.targets)).all()


@pytest.mark.parametrize("form", [1, 2])
def test_one_operand_changes_the_asked_number_alone(form):
    x = drawn(SMALL, form, mlp2_input_one_operand)
    changed = x.donors != x.base
    assert (changed.sum(1) == 1).all()
    assert (changed.argmax(1) == SMALL.context - 3 + x.scene.side).all()
    assert (x.base[:, -3:-1] == values(SMALL, x.targets)).all()
    assert (x.placebos[:, : SMALL.prefix] != x.base[:, : SMALL.prefix]).any(1).mean() > 0.9


@pytest.mark.parametrize("form", [1, 2])
def test_donors_of_layer1_at_equals_ask_for_the_other_variable(form):
    x = drawn(SMALL, form, layer1_at_equals)
    changed = x.donors != x.targets
    assert (changed.sum(1) == 1).all()
    assert (x.donors[changed] == x.scene.other).all()
    assert (x.placebos[:, -4:] == x.targets[:, -4:]).all()
    assert (x.placebos[:, : SMALL.prefix] != x.targets[:, : SMALL.prefix]).any(1).mean() > 0.9


@pytest.mark.parametrize("form", [1, 2])
def test_donors_of_layer1_at_two_values_exchange_two_names(form):
    x = drawn(SMALL, form, layer1_at_two_values)
    changed = x.donors != x.targets
    assert (changed.sum(1) == 2).all()
    for tokens, row, where in zip(x.donors, changed, x.positions, strict=True):
        assert set(np.flatnonzero(row) + 1) == set(where)  # the changed names stand before the patched numbers
        assert len(set(tokens[row])) == 2
    assert (values(SMALL, x.donors)[x.scene.rows, x.scene.side] == x.targets[x.scene.rows, x.positions[:, 1]]).all()


@pytest.mark.parametrize("form", [1, 2])
def test_targets_of_layer1_at_one_value_assign_the_asked_variable_nowhere(form):
    x = drawn(SMALL, form, layer1_at_one_value)
    prefix = x.targets[:, : SMALL.prefix]
    assert (prefix != x.scene.asked[:, None]).all()
    bound = value_positions(SMALL, x.donors)[x.scene.rows, x.scene.side]
    assert (bound == x.positions[:, 0]).all()
    assert ((prefix == x.scene.other[:, None]).sum(1) == 1).all()


@pytest.mark.parametrize("make", [layer1_at_two_values, layer1_at_one_value])
def test_placebos_at_values_keep_variables_and_redraw_numbers(make):
    x = drawn(SMALL, 1, make)
    number = (x.targets < SMALL.N) & (np.arange(SMALL.context) < SMALL.prefix)
    assert (x.placebos[~number] == x.targets[~number]).all()
    assert 0.7 < (x.placebos[number] != x.targets[number]).mean() < 0.9  # 4 of 5


# The known circuits


@pytest.mark.parametrize("binds", [False, True])
def test_the_hand_built_models_solve_every_form(binds, known, known_binding):
    bridge = known_binding if binds else known
    rng = np.random.default_rng(1)
    for form in range(3):
        problems = draw_problems(SMALL, form, 2000, rng)
        predicted = predict(bridge, lay_out(SMALL, problems, rng))
        assert (predicted == (problems.n1 + problems.n2) % SMALL.N).all()


@pytest.mark.parametrize("form", ["1var", "2var"])
@pytest.mark.parametrize("make", EXPERIMENTS)
def test_every_interchange_in_a_known_circuit_gives_the_counterfactual_answer(make, form, tables):
    rows = tables[0].query("experiment == @make.__name__ and form == @form")
    swapped = rows[rows["variant"] == "interchange"]
    assert (swapped["accuracy_counterfactual"] == 1).all() and (swapped["accuracy_original"] == 0).all()
    assert set(rows["side"]) == {"left", "right"}


@pytest.mark.parametrize("form", ["1var", "2var"])
@pytest.mark.parametrize("make", EXPERIMENTS)
def test_every_placebo_in_a_known_circuit_changes_nothing(make, form, tables):
    rows = tables[0].query("experiment == @make.__name__ and form == @form and variant == 'placebo'")
    assert (rows["unchanged"] == 1).all()
    if make is not layer1_at_one_value:  # whose target asks for what it does not assign
        assert (rows["accuracy_original"] == 1).all() and (rows["accuracy_counterfactual"] == 0).all()


def test_a_constant_bound_by_its_name_is_lost_when_only_equals_asks_for_another(known_binding):
    x = drawn(SMALL, 1, layer1_at_equals)
    left = x.scene.side == 0
    predicted = patched(known_binding, x, x.donors)
    other_number = x.targets[x.scene.rows, x.scene.other_at + 1]
    assert (predicted[left] == 2 * other_number[left] % SMALL.N).all()  # both halves of the attention go to it
    assert (predicted[~left] == answers(SMALL, x.donors)[~left]).all()

    both = drawn(SMALL, 1, layer1_at_equals_and_right)
    assert (patched(known_binding, both, both.donors) == answers(SMALL, both.donors)).all()


def test_ablating_what_does_nothing_does_nothing(tables):
    accuracy = tables[1].set_index(["ablated", "form"])["accuracy"]
    assert (accuracy.loc[["nothing", "layer1_elsewhere"]] == 1).all()


@pytest.mark.parametrize("site", ["layer1_numbers", "layer1_equals"])
def test_without_binding_or_asking_a_variable_is_lost_and_a_constant_is_not(site, known):
    rng = np.random.default_rng(0)
    problems = [draw_problems(SMALL, form, SIZE, rng) for form in range(3)]
    tokens = np.concatenate([lay_out(SMALL, some, rng) for some in problems])
    mean = ablation.site_means(known, SMALL, tokens)[site]
    predicted = predict(known, tokens, partial(ablation.ablation, SMALL, tokens, site, mean))
    constants, one, _ = np.split(predicted, 3)
    assert (constants == answers(SMALL, tokens[:SIZE])).all()
    constant = np.where(problems[1].operands.left == CONSTANT, problems[1].n1, problems[1].n2)
    assert (one == 2 * constant % SMALL.N).all()  # layer 2 finds nothing but the constant


@pytest.mark.parametrize("site", ["layer2_attention", "mlp2"])
def test_without_layer_2_every_answer_is_the_same(site, known):
    rng = np.random.default_rng(0)
    tokens = np.concatenate([lay_out(SMALL, draw_problems(SMALL, form, SIZE, rng), rng) for form in range(3)])
    mean = ablation.site_means(known, SMALL, tokens)[site]
    predicted = predict(known, tokens, partial(ablation.ablation, SMALL, tokens, site, mean))
    assert len(np.unique(predicted)) == 1


def test_ablation_sites_of_layer_1_cover_every_position_once():
    rng = np.random.default_rng(0)
    tokens = lay_out(SMALL, draw_problems(SMALL, 1, SIZE, rng), rng)
    sites = ablation.ablation_sites(SMALL, tokens)
    assert (sum(site.astype(int) for name, (_, site) in sites.items() if name.startswith("layer1")) == 1).all()
    before_numbers = np.roll(sites["layer1_numbers"][1], -1, axis=1)
    assert (before_numbers == (tokens >= SMALL.first_variable) & (np.arange(SMALL.context) < SMALL.prefix)).all()


# The code of the patches, on models without any circuit


def written_out(weights: Weights, tokens: Tensor, layer1: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Layer 1's output [B, T, d] and the logits [B, N]; `layer1` stands in for the former."""
    x = weights["embed.W_E"][tokens] + weights["pos_embed.W_pos"]
    future = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
    for layer in (0, 1):
        Q, K, V, O = (weights[f"blocks.{layer}.attn.W_{name}"] for name in "QKVO")  # noqa: E741
        q, k, v = (torch.einsum("btd,hde->bhte", x, W) for W in (Q, K, V))
        scores = torch.einsum("bhqe,bhke->bhqk", q, k) / Q.shape[-1] ** 0.5
        pattern = scores.masked_fill(future, -torch.inf).softmax(-1)
        out = torch.einsum("bhqk,bhke,hed->bqd", pattern, v, O)
        if layer == 0:
            out = first = out if layer1 is None else layer1
        x = x + out
    x = x + torch.relu(x @ weights["blocks.1.mlp.W_in"]) @ weights["blocks.1.mlp.W_out"]
    return first, (x @ weights["unembed.W_U"])[:, -1]


@pytest.fixture(scope="module")
def random_model():
    """A task, random weights of several heads and their bridge; large enough weights that patterns are not flat."""
    task = Task(N=7, variables=6, context=14, left_only=1, right_only=1)
    config = Config(task, ModelConfig(d_model=16, d_head=8, n_heads=2, d_mlp=32))
    weights = {name: 2 * w for name, w in initialise(config, seed=3).items()}
    return task, weights, to_bridge(weights, config)


@pytest.mark.parametrize("form", [1, 2])
@pytest.mark.parametrize(
    "make", [layer1_at_equals, layer1_at_equals_and_right, layer1_at_two_values, layer1_at_one_value]
)
def test_a_patch_of_layer_1_is_the_written_out_forward_pass_with_those_rows_exchanged(make, form, random_model):
    task, weights, bridge = random_model
    x = drawn(task, form, make)
    targets, donors = (torch.from_numpy(tokens.astype(np.int64)) for tokens in (x.targets, x.donors))
    (layer1, unpatched), (from_donors, _) = written_out(weights, targets), written_out(weights, donors)
    rows, positions = torch.arange(len(targets))[:, None], torch.from_numpy(x.positions)
    layer1[rows, positions] = from_donors[rows, positions]
    wanted = written_out(weights, targets, layer1)[1].argmax(-1).numpy()
    assert (patched(bridge, x, x.donors) == wanted).all()
    assert (wanted != unpatched.argmax(-1).numpy()).any()  # so that a patch which does nothing fails


@pytest.mark.parametrize("form", [1, 2])
@pytest.mark.parametrize("make", [mlp2_input, mlp2_input_one_operand])
def test_a_patch_of_mlp2s_input_leaves_the_residual_stream_beside_it(make, form, random_model):
    task, weights, bridge = random_model
    x = drawn(task, form, make)
    c = Circuits.of(weights)

    def resid_mid(tokens: np.ndarray) -> Tensor:
        return forward(c, torch.from_numpy(tokens.astype(np.int64))).resid_mid

    own = resid_mid(x.targets)
    value = resid_mid(x.donors) if x.base is None else own + resid_mid(x.donors) - resid_mid(x.base)
    wanted = ((own + mlp2(c, value)) @ c.W_U).argmax(-1).numpy()
    assert (patched(bridge, x, x.donors) == wanted).all()
    assert (wanted != ((value + mlp2(c, value)) @ c.W_U).argmax(-1).numpy()).any()


def test_an_ablation_of_layer_1_is_the_written_out_forward_pass_with_means(random_model):
    task, weights, bridge = random_model
    rng = np.random.default_rng(0)
    tokens = np.concatenate([lay_out(task, draw_problems(task, form, SIZE, rng), rng) for form in range(3)])
    layer1, _ = written_out(weights, torch.from_numpy(tokens.astype(np.int64)))
    for name, (hook, site) in ablation.ablation_sites(task, tokens).items():
        if hook != LAYER1:
            continue
        ablated = layer1.clone()
        for position in range(task.context):
            here = torch.from_numpy(site[:, position])
            ablated[here, position] = layer1[here, position].mean(0)
        wanted = written_out(weights, torch.from_numpy(tokens.astype(np.int64)), ablated)[1].argmax(-1).numpy()
        mean = ablation.site_means(bridge, task, tokens)[name]
        predicted = predict(bridge, tokens, partial(ablation.ablation, task, tokens, name, mean))
        assert (predicted == wanted).mean() > 0.999  # the sums of the means are in another order


def test_computing_only_the_last_position_changes_no_logit(random_model):
    task, _, bridge = random_model
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(lay_out(task, draw_problems(task, 2, 50, rng), rng).astype(np.int64))
    with torch.no_grad():
        whole = bridge(tokens)[:, -1]
        cut = bridge.run_with_hooks(tokens, fwd_hooks=ONLY_LAST)[:, -1]
    assert torch.allclose(whole, cut, atol=1e-5)


# The metrics and the figures


SITES = ("layer1_numbers", "layer1_equals", "layer1_elsewhere", "layer2_attention", "mlp2")


def test_metrics_are_taken_from_their_rows():
    columns = ["moment", "experiment", "form", "side", "variant", *interventions.INTERCHANGE_COLUMNS[4:]]
    rows = [
        ("addition", "mlp2_input_one_operand", "1var", "left", "interchange", 0.20, 0.01, 0.02, 10),
        ("addition", "mlp2_input_one_operand", "2var", "left", "interchange", 0.10, 0.03, 0.04, 30),
        ("addition", "mlp2_input_one_operand", "2var", "left", "placebo", 0.05, 0.06, 0.07, 30),
        ("assignment", "mlp2_input_one_operand", "1var", "left", "interchange", 0.50, 0.08, 0.09, 10),
        ("final", "mlp2_input_one_operand", "1var", "left", "interchange", 0.80, 0.11, 0.12, 10),
        ("final", "mlp2_input", "1var", "left", "unpatched", 0.13, 0.14, 1.0, 10),
        ("final", "mlp2_input", "1var", "left", "interchange", 0.90, 0.15, 0.16, 10),
        ("final", "mlp2_input", "2var", "right", "interchange", 0.50, 0.17, 0.18, 30),
        ("final", "mlp2_input", "1var", "left", "placebo", 0.19, 0.89, 0.97, 10),
        ("final", "mlp2_input", "2var", "right", "placebo", 0.21, 0.88, 0.91, 30),
    ]
    keys = [(m, site, form) for m in ("addition", "final") for form in ("0var", "1var", "2var") for site in SITES]
    ablations = pd.DataFrame(keys, columns=["moment", "ablated", "form"]).assign(accuracy=np.arange(30) / 100)
    found = interventions.summary(pd.DataFrame(rows, columns=columns), ablations)
    assert {name: value for name, value in found.items() if value is not None} == pytest.approx(
        {
            "mlp2_input": (0.90 * 10 + 0.50 * 30) / 40,
            "mlp2_input_one_operand": 0.80,
            "mlp2_input_one_operand_addition": (0.20 * 10 + 0.10 * 30) / 40,
            "mlp2_input_one_operand_assignment": 0.50,
            "placebo_unchanged_min": 0.91,
            "ablated_layer1_numbers_2var": 0.25,
            "ablated_layer1_equals_2var": 0.26,
            "ablated_layer1_elsewhere_2var": 0.27,
            "ablated_layer2_attention_2var": 0.28,
            "ablated_mlp2_2var": 0.29,
        }
    )
    assert {name for name, value in found.items() if value is None} == {
        make.__name__ for make in EXPERIMENTS if make.__name__.startswith("layer1")
    }


@pytest.fixture(scope="module")
def all_different():
    """A table of interchanges, all shares different."""
    sides = [("1var", "left"), ("1var", "right"), ("2var", "left"), ("2var", "right")]
    rows = [
        (moment, step, make.__name__, form, side, variant)
        for moment, step in (("addition", 10), ("assignment", 20), ("final", 30))
        for make in EXPERIMENTS
        for form, side in sides
        for variant in ("unpatched", "interchange", "placebo")
    ]
    table = pd.DataFrame(rows, columns=["moment", "step", "experiment", "form", "side", "variant"])
    shares = ["accuracy_counterfactual", "accuracy_original", "unchanged"]
    table[shares] = np.random.default_rng(0).permutation(3 * len(table)).reshape(-1, 3) / (3 * len(table))
    return table.assign(n=np.tile([10, 20, 30], len(table) // 3))  # by variant, so that both sides weigh alike


def share(table: pd.DataFrame, column: str, **marks: str) -> float:
    return table.loc[(table[list(marks)] == pd.Series(marks)).all(axis=1), column].mean()


GROUPS = ({"form": "1var", "side": "left"}, {"form": "1var", "side": "right"}, {"form": "2var"})
NAMES = [make.__name__ for make in EXPERIMENTS]


def test_bars_are_counterfactual_answers_and_marks_original_ones_and_placebos(all_different):
    (axis,) = draw.interchange(all_different).axes
    drawn = zip(GROUPS, axis.containers, axis.lines[::2], axis.lines[1::2], strict=True)
    for group, bars, crosses, circles in drawn:
        assert (crosses.get_marker(), circles.get_marker()) == ("x", "o")
        for heights, variant, column in (
            ([bar.get_height() for bar in bars], "interchange", "accuracy_counterfactual"),
            (crosses.get_ydata(), "interchange", "accuracy_original"),
            (circles.get_ydata(), "placebo", "unchanged"),
        ):
            expected = [
                share(all_different, column, moment="final", experiment=name, variant=variant, **group)
                for name in NAMES
            ]
            np.testing.assert_allclose(heights, expected)


def test_lines_over_the_moments_are_counterfactual_answers_and_dotted_ones_unpatched(all_different):
    fig = draw.by_moment(all_different)
    for axis, name in zip(fig.axes, NAMES, strict=True):
        for group, dotted, line in zip(GROUPS, axis.lines[::2], axis.lines[1::2], strict=True):
            assert (dotted.get_linestyle(), line.get_linestyle()) == (":", "-")
            for found, variant, column in (
                (dotted, "unpatched", "accuracy_original"),
                (line, "interchange", "accuracy_counterfactual"),
            ):
                expected = [
                    share(all_different, column, moment=moment, experiment=name, variant=variant, **group)
                    for moment in ("addition", "assignment", "final")
                ]
                np.testing.assert_allclose(found.get_ydata(), expected)


def test_the_ablation_figure_has_a_row_for_each_site_and_the_forms_of_each_moment_in_order():
    moments, sites = {"addition": 10, "final": 30}, ("nothing", *SITES)
    keys = [(m, step, site, form) for m, step in moments.items() for site in sites for form in ("0var", "1var", "2var")]
    table = pd.DataFrame(keys, columns=["moment", "step", "ablated", "form"])
    table["accuracy"] = np.arange(len(keys)) / len(keys)
    fig = draw.ablation(table)
    axis = fig.axes[0]
    image = np.asarray(axis.images[0].get_array())
    addition, final = np.split(100 * table["accuracy"].to_numpy(), 2)
    np.testing.assert_allclose(image, np.hstack([addition.reshape(6, 3), final.reshape(6, 3)]))
    assert [text.get_text() for text in axis.texts[:36]] == [f"{value:.0f}" for value in image.ravel()]
    assert [text.get_text() for text in axis.texts[36:]] == ["addition\n10", "final\n30"]
    assert [label.get_text() for label in axis.get_yticklabels()] == [draw.ABLATED_WORDS[site] for site in sites]


# The stage


def test_moments_are_before_and_at_each_phase_that_was_reached():
    phases = {"addition": 0, "assignment": 300, "refinement": None}
    assert interventions.moments([0, 100, 300, 500], phases, "progress.json") == {
        "addition": 0,
        "before assignment": 100,
        "assignment": 300,
        "final": 500,
    }


def test_a_phase_without_its_checkpoint_is_refused():
    with pytest.raises(InputError, match=r"progress\.json puts addition at step 200"):
        interventions.moments([0, 100], {"addition": 200, "assignment": None, "refinement": None}, "progress.json")


def run_stage(folder: Path, config: Config, phases: dict[str, int | None]) -> Path:
    """Run `main` on two untrained checkpoints below `folder`."""
    (folder / "checkpoints").mkdir()
    for step in (0, 10):
        save(folder / "checkpoints" / checkpoint_name(step), initialise(config, seed=step), config)
    (folder / "metrics").mkdir()
    (folder / "metrics/progress.json").write_text(json.dumps(phases))
    params = folder / "params.yaml"
    params.write_text("interventions: {sequences: 40, seed: 0}\n")
    interventions.main(folder / "checkpoints", folder, params)
    return folder


PHASES = dict.fromkeys(("addition", "assignment", "refinement", "spike_before", "spike"))


def test_the_stage_works_before_any_phase_is_reached(tmp_path, tiny_config):
    out = run_stage(tmp_path, tiny_config, PHASES)
    table = pd.read_csv(out / "plots/interventions.csv")
    assert list(table.columns) == ["step", "moment", *interventions.INTERCHANGE_COLUMNS]
    assert set(table["moment"]) == {"final"} and set(table["step"]) == {10}
    assert set(table["experiment"]) == {make.__name__ for make in EXPERIMENTS}
    metrics = json.loads((out / "metrics/interventions.json").read_text())
    assert metrics.pop("mlp2_input_one_operand_addition") is metrics.pop("mlp2_input_one_operand_assignment") is None
    assert all(0 <= value <= 1 for value in metrics.values()) and len(metrics) == 12
    assert len(list(draw.figures(out))) == 3


def test_one_step_that_is_several_moments_stands_under_each(tmp_path, tiny_config):
    out = run_stage(tmp_path, tiny_config, PHASES | {"addition": 10, "assignment": 10})
    table = pd.read_csv(out / "plots/interventions_ablation.csv")
    moments = {"before addition": 0, "addition": 10, "before assignment": 0, "assignment": 10, "final": 10}
    assert dict(zip(table["moment"], table["step"], strict=True)) == moments
    accuracy = table.pivot(index=["ablated", "form"], columns="moment", values="accuracy")
    assert (accuracy["addition"] == accuracy["final"]).all()
    assert len(list(draw.figures(out))) == 3


def test_a_task_without_another_variable_has_no_interchange(tmp_path):
    task = Task(N=3, variables=2, context=8, left_only=0, right_only=0)
    out = run_stage(tmp_path, Config(task, ModelConfig(d_model=8, d_head=8, n_heads=1, d_mlp=8)), PHASES)
    table = pd.read_csv(out / "plots/interventions.csv")
    assert set(table["form"]) == {"1var"} and layer1_at_one_value.__name__ not in set(table["experiment"])
    metrics = json.loads((out / "metrics/interventions.json").read_text())
    assert metrics["layer1_at_one_value"] is None and metrics["mlp2_input"] is not None
    ablations = pd.read_csv(out / "plots/interventions_ablation.csv")
    assert set(ablations["form"]) == {"0var", "1var"} and metrics["ablated_mlp2_2var"] is None
    assert len(list(draw.figures(out))) == 3
