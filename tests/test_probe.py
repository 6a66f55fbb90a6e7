"""Linear probes: targets read off the text, the residual stream in closed form, converged fits, planted circuits."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import probe
from stages.core import bridge, weights
from stages.core.circuit_form import Circuits, forward
from stages.core.layouts import Problems, lay_out
from stages.core.params import InputError
from stages.core.task import Task
from stages.core.text import to_text
from stages.core.weights import Config, ModelConfig, Weights
from stages.draw import probe as draw
from stages.parts.probe_targets import Target, control_labels, draw_problems, find_targets
from tests.strategies import tasks

SETTINGS = {"train_sequences": 500, "test_sequences": 400, "samples": 2, "C": 1.0, "max_iter": 2000, "seed": 3}
CHANCE_AT_N_7 = 1 / 7
TARGETS = (
    "variable_at_number",
    "value_at_operand",
    "distractor_at_operand",
    "left_variable_at_equals",
    "right_variable_at_equals",
    "left_value_at_equals",
    "right_value_at_equals",
    "answer_at_equals",
)
POINTS = ("embed", "layer1", "attn2", "mlp2")
METRICS = (
    "variable_at_number_after_layer1",
    "value_at_operand_after_layer1",
    "distractor_at_operand_after_layer1",
    "left_variable_at_equals_after_layer1",
    "right_variable_at_equals_after_layer1",
    "left_value_at_equals_after_attn2",
    "right_value_at_equals_after_attn2",
    "answer_at_equals_after_mlp2",
    "either_value_at_equals_after_attn2",
    "answer_at_equals_selectivity",
    "largest_standard_error",
    "unconverged_probes",
)


def sample(task: Task, size: int, seed: int = 0) -> tuple[Problems, np.ndarray, dict[str, Target]]:
    rng = np.random.default_rng(seed)
    problems = draw_problems(task, size, rng)
    tokens = lay_out(task, problems, rng)
    return problems, tokens, find_targets(task, problems, tokens, rng)


def run(tmp_path: Path, planted: Weights, config: Config, **changes: float) -> tuple[pd.DataFrame, dict[str, float]]:
    """The stage as a user runs it, on weights in a file."""
    lines = [f"  {key}: {value}" for key, value in (SETTINGS | changes).items()]
    (tmp_path / "params.yaml").write_text("\n".join(["probe:", *lines]))
    weights.save(tmp_path / "model.safetensors", planted, config)
    probe.main(model=tmp_path / "model.safetensors", out=tmp_path, params_file=tmp_path / "params.yaml")
    return pd.read_csv(tmp_path / "plots/probe.csv"), json.loads((tmp_path / "metrics/probe.json").read_text())


@given(seed=st.integers(0, 2**32 - 1), task=tasks(most_numbers=60, longest=18))
@settings(max_examples=30, deadline=None)
def test_every_label_is_what_the_text_says(seed: int, task: Task) -> None:
    _, tokens, targets = sample(task, 12, seed)
    seen = {name: set() for name in targets}
    for name, target in targets.items():
        assert ((target.label >= 0) & (target.label < target.classes)).all()
        for row, position, label, kind in zip(target.row, target.position, target.label, target.type, strict=True):
            *assignments, core = to_text(task, tokens[row]).split(", ")
            value_of = {variable: int(value) for variable, value in (part.split("=") for part in assignments)}
            operands = core.split("+")
            values = [value_of[o] if o in value_of else int(o) for o in operands]
            token = [*map(str, range(task.N)), "+", "=", "", *task.names][tokens[row, position]]
            seen[name].add((row, position))
            if name.endswith("_at_equals"):
                assert position == task.context - 1
                assert kind == values[0] * task.N + values[1]
                expected = {
                    "left_variable": task.names.find(operands[0]),
                    "right_variable": task.names.find(operands[1]),
                    "left_value": values[0],
                    "right_value": values[1],
                    "answer": sum(values) % task.N,
                }[name.removesuffix("_at_equals")]
                assert label == expected
                if target.other is not None:
                    assert label + target.other[target.row == row] == sum(values)
            elif name == "variable_at_number":
                assert f"{task.names[label]}={token}" in assignments
                assert kind == int(token)
            else:
                assert token == operands[position - task.context + 3]
                if name == "value_at_operand":
                    assert label == value_of[token]
                else:
                    assert label in {value for variable, value in value_of.items() if variable not in operands}
    texts = [to_text(task, sequence) for sequence in tokens]
    asked = [len(re.findall("[a-z]", text.split(", ")[-1])) for text in texts]
    assert len(seen["variable_at_number"]) == sum(text.count("=") for text in texts)
    with_distractor = sum(k for k, text in zip(asked, texts, strict=True) if text.count("=") > k)
    assert len(seen["value_at_operand"]) == len(seen["distractor_at_operand"]) == with_distractor
    assert len(seen["answer_at_equals"]) == len(seen["left_value_at_equals"]) == len(texts)


def test_a_sample_is_a_third_of_each_form_over_all_couples_and_all_pairs(task: Task) -> None:
    problems, _, _ = sample(task, 30_000)
    assert np.bincount(problems.operands.form).tolist() == [10_000] * 3
    couples = set(zip(problems.operands.left, problems.operands.right, strict=True))
    assert len(couples) == 1 + 24 + 132
    pairs = np.bincount(problems.n1 * task.N + problems.n2)
    assert len(pairs) == task.N**2
    assert pairs.var() == pytest.approx(pairs.mean(), rel=0.1)  # as uniform draws have it: about 8.6 ± 2.9 a pair


@given(
    types=st.lists(st.integers(0, 200), min_size=1, max_size=300), classes=st.integers(2, 60), seed=st.integers(0, 9)
)
def test_control_labels_hang_on_the_type_alone_and_are_shared_out_equally(
    types: list[int], classes: int, seed: int
) -> None:
    labels = control_labels(np.array(types), classes, np.random.default_rng(seed))
    of_type = dict(zip(types, labels, strict=True))
    assert [of_type[t] for t in types] == labels.tolist()
    counts = np.bincount(list(of_type.values()), minlength=min(classes, len(of_type)))
    assert len(counts) == min(classes, len(of_type))
    assert counts.max() - counts.min() <= 1


def test_control_labels_change_with_the_generator() -> None:
    types = np.arange(100)
    one, other = (control_labels(types, 10, np.random.default_rng(seed)) for seed in (0, 1))
    assert (one != other).mean() > 0.5


def test_residuals_agree_with_the_circuit_form(tiny_config: Config) -> None:
    _, tokens, _ = sample(tiny_config.task, probe.CHUNK + 30)
    model = weights.initialise(tiny_config, seed=5)
    everywhere = np.ones(tokens.shape, dtype=bool)
    found = probe.read_residuals(bridge.to_bridge(model, tiny_config), tokens, everywhere)
    found = {point: torch.from_numpy(r).view(*tokens.shape, -1) for point, r in found.items()}

    circuits = Circuits.of(model)
    tokens_ = torch.from_numpy(tokens.astype(np.int64))
    exact = forward(circuits, tokens_)
    embed = model["embed.W_E"][tokens_] + model["pos_embed.W_pos"]
    V = tiny_config.task.vocabulary
    OV1 = circuits.XOV1[:, tokens_] + circuits.XOV1[:, None, V:]  # [H, B, T, d]
    layer1 = embed + (exact.pattern1 @ OV1).sum(0)
    torch.testing.assert_close(found["embed"], embed)
    torch.testing.assert_close(found["layer1"], layer1, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found["attn2"][:, -1], exact.resid_mid, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found["mlp2"][:, -1] @ circuits.W_U, exact.logits, atol=1e-5, rtol=1e-4)


def test_residuals_come_in_the_order_of_the_wanted_places(tiny_config: Config) -> None:
    _, tokens, _ = sample(tiny_config.task, probe.CHUNK + 30)
    model = weights.initialise(tiny_config, seed=5)
    wanted = np.random.default_rng(0).random(tokens.shape) < 0.3
    found = probe.read_residuals(bridge.to_bridge(model, tiny_config), tokens, wanted)
    row, position = np.nonzero(wanted)
    expected = model["embed.W_E"][tokens[row, position].astype(int)] + model["pos_embed.W_pos"][position]
    np.testing.assert_allclose(found["embed"], expected, atol=1e-6)


@pytest.mark.parametrize("classes", [2, 5])
def test_a_converged_probe_is_at_a_minimum_of_the_penalised_cross_entropy(classes: int) -> None:
    rng = np.random.default_rng(classes)
    X = rng.normal(size=(300, 8)) * np.arange(1, 9)
    y = (X @ rng.normal(size=(8, classes)) + 3 * rng.normal(size=(300, classes))).argmax(1)
    fitted, converged = probe.fit_probe(X, y, C=0.5, max_iter=2000)
    assert converged

    standardised = torch.from_numpy((X - X.mean(0)) / X.std(0))
    model = fitted[-1]
    W, b = (torch.tensor(w, requires_grad=True) for w in (model.coef_, model.intercept_))
    logits = standardised @ W.T + b  # [n, K], with one column where there are two classes
    if classes == 2:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y)) + (W**2).sum() / (2 * 0.5 * len(y))
    gradients = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [W, b])])
    assert gradients.abs().max() <= probe.TOLERANCE
    assert probe.gradient_size(fitted, X, y, C=0.5) == pytest.approx(gradients.abs().max().item(), rel=1e-6)


def test_a_probe_that_is_stopped_early_counts_as_not_converged() -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(200, 5)), rng.integers(3, size=200)
    with pytest.warns(probe.ConvergenceWarning):
        _, converged = probe.fit_probe(X, y, C=1.0, max_iter=1)
    assert not converged


def test_a_probe_is_tested_on_other_sequences_than_it_was_fitted_on() -> None:
    p = probe.ProbeParams(**SETTINGS)
    rng = np.random.default_rng(0)
    row = np.arange(p.train_sequences + p.test_sequences)
    form = row % 3
    label = rng.integers(2, size=len(row))
    X = np.where(label, 1.0, -1.0)[:, None]
    X[p.train_sequences :] *= np.where(form[p.train_sequences :] == 2, -1, 1)[:, None]  # wrong where tested, for 2var
    other = np.where(form == 2, 1 - label, label)
    found = probe.probe_target(X, Target(row, row, label, row, 2, other), rng.permutation(label), form, p)
    assert (found["accuracy_0var"], found["accuracy_1var"], found["accuracy_2var"]) == (1, 1, 0)
    assert found["accuracy"] == (form[p.train_sequences :] != 2).mean()
    assert found["accuracy_either"] == 1
    assert found["selectivity"] == found["accuracy"] - found["control_accuracy"]
    assert found["unconverged"] == 0


def test_the_summary_is_the_mean_and_its_standard_error() -> None:
    either = {"accuracy_either": 0.11, "accuracy_0var": 0.22, "accuracy_1var": 0.33, "accuracy_2var": 0.44}
    row = {"target": "answer_at_equals", "point": "mlp2", "chance": 0.1, "unconverged": 1} | either
    other = row | {"point": "attn2", "accuracy": 0.05, "control_accuracy": 0.04, "selectivity": 0.01}
    samples = [
        pd.DataFrame(
            [other, row | {"accuracy": accuracy, "control_accuracy": control, "selectivity": accuracy - control}]
        )
        for accuracy, control in ((0.7, 0.1), (0.8, 0.7), (0.9, 0.4))
    ]
    samples[1].accuracy_either += 0.3
    at_other_point, found = probe.summarise(samples).to_dict("records")
    assert at_other_point["accuracy"] == pytest.approx(0.05)
    assert found == {
        "target": "answer_at_equals",
        "point": "mlp2",
        "accuracy": pytest.approx(0.8),
        "standard_error": pytest.approx(0.1 / math.sqrt(3)),
        "control_accuracy": pytest.approx(0.4),
        "control_accuracy_standard_error": pytest.approx(0.3 / math.sqrt(3)),
        "selectivity": pytest.approx(0.4),
        "selectivity_standard_error": pytest.approx(math.sqrt(0.07 / 3)),  # of 0.6, 0.1 and 0.5: variance 0.07
        "chance": pytest.approx(0.1),
        "accuracy_either": pytest.approx(0.21),
        "accuracy_0var": pytest.approx(0.22),
        "accuracy_1var": pytest.approx(0.33),
        "accuracy_2var": pytest.approx(0.44),
        "unconverged": 3,
    }


def test_each_metric_is_read_off_its_own_row_and_column() -> None:
    """Accuracies count the rows in thousandths, so that each says where it came from."""
    table = pd.DataFrame([{"target": target, "point": point} for target in TARGETS for point in POINTS])
    row = np.arange(len(table)) / 1000
    table["accuracy"], table["control_accuracy"] = 0.1 + row, 0.2 + row
    table["accuracy_either"], table["selectivity"], table["standard_error"] = 0.3 + row, 0.4 + row, (row - 0.01) ** 2
    table["selectivity_standard_error"] = table["control_accuracy_standard_error"] = 0.5
    table["unconverged"] = np.arange(len(table)) % 2
    values = (0.101, 0.105, 0.109, 0.113, 0.117, 0.122, 0.126, 0.131, 0.322, 0.431, 0.021**2, 16)
    assert probe.metrics(table) == pytest.approx(dict(zip(METRICS, values, strict=True)))


def previous_token_model(task: Task) -> tuple[Weights, Config]:
    """Layer 1 attends one position back and copies variables from there; layer 2 does nothing. Worked out by hand."""
    V, T, n = task.vocabulary, task.context, task.variables
    config = Config(task, ModelConfig(d_model=V + T + n, d_head=T, n_heads=1, d_mlp=3))
    model = {name: torch.zeros(shape) for name, shape in config.shapes().items()}
    model["embed.W_E"][:, :V] = torch.eye(V)
    model["pos_embed.W_pos"][:, V : V + T] = torch.eye(T)
    model["blocks.0.attn.W_Q"][0, V + 1 : V + T, : T - 1] = 200 * torch.eye(T - 1)
    model["blocks.0.attn.W_K"][0, V : V + T] = torch.eye(T)
    model["blocks.0.attn.W_V"][0, task.first_variable : V, :n] = torch.eye(n)
    model["blocks.0.attn.W_O"][0, :n, V + T :] = torch.eye(n)
    return model, config


def test_probes_find_what_a_previous_token_head_writes_and_nothing_else(tmp_path: Path, tiny_config: Config) -> None:
    model, config = previous_token_model(tiny_config.task)
    table, metrics = run(tmp_path, model, config, train_sequences=2000, test_sequences=1000)
    accuracy = table.set_index(["target", "point"]).accuracy
    for point in ("layer1", "attn2", "mlp2"):
        assert accuracy["variable_at_number", point] == 1
        assert accuracy["right_variable_at_equals", point] == 1
        # The token before = is the right variable, which the left one differs from in 2var sequences.
        assert accuracy["left_variable_at_equals", point] == pytest.approx(2 / 3 * 1 / 3 + 1 / 3 * 1 / 4, abs=0.06)
        assert accuracy["value_at_operand", point] == pytest.approx(CHANCE_AT_N_7, abs=0.06)
    assert accuracy["variable_at_number", "embed"] == pytest.approx(1 / 4, abs=0.06)
    assert accuracy["right_variable_at_equals", "embed"] == pytest.approx(1 / 4, abs=0.06)
    assert metrics["variable_at_number_after_layer1"] == 1
    assert metrics["unconverged_probes"] == 0


def test_the_stage_writes_every_target_at_every_point_with_its_control(tmp_path: Path, tiny_config: Config) -> None:
    table, metrics = run(tmp_path, weights.initialise(tiny_config, seed=0), tiny_config)
    assert list(zip(table.target, table.point, strict=True)) == [
        (target, point) for target in TARGETS for point in POINTS
    ]
    assert set(table.chance.round(4)) == {0.25, round(CHANCE_AT_N_7, 4)}
    assert np.allclose(table.selectivity, table.accuracy - table.control_accuracy, atol=1e-5)
    at = table.set_index(["target", "point"])
    # A token is all that its embedding holds, and = is one token: learned by heart there, and not here.
    assert at.control_accuracy["variable_at_number", "embed"] == 1
    assert at.control_accuracy["answer_at_equals", "embed"] == pytest.approx(CHANCE_AT_N_7, abs=0.06)
    assert table.accuracy_0var.isna().sum() == 4 * 4  # variables in the core: no such place in 0var sequences
    assert tuple(metrics) == METRICS
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path: Path, tiny_config: Config) -> None:
    model = weights.initialise(tiny_config, seed=0)
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        run(tmp_path / name, model, tiny_config, seed=seed, train_sequences=200, test_sequences=100)
        texts.append((tmp_path / name / "plots/probe.csv").read_text())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(("key", "value"), [("samples", 1), ("train_sequences", 10), ("C", 0), ("max_iter", 0)])
def test_settings_that_make_no_sense_are_refused_with_their_key(key: str, value: int) -> None:
    with pytest.raises(InputError, match=rf"probe\.{key} = {value}: must be"):
        probe.ProbeParams.parse(SETTINGS | {key: value}, "probe")


def test_the_figure_shows_every_accuracy_and_control_in_its_cell() -> None:
    words = {
        "variable_at_number": "number: its variable (0.01)",
        "value_at_operand": "operand: its value (0.02)",
        "distractor_at_operand": "operand: a distractor's value (0.03)",
        "left_variable_at_equals": "=: left variable (0.04)",
        "right_variable_at_equals": "=: right variable (0.05)",
        "left_value_at_equals": "=: left value (0.06)",
        "right_value_at_equals": "=: right value (0.07)",
        "answer_at_equals": "=: answer (0.08)",
    }
    table = pd.DataFrame(
        [{"target": t, "point": q, "chance": 0.01 + i / 100} for i, t in enumerate(TARGETS) for q in POINTS]
    )
    table["accuracy"] = np.arange(len(table)) / 40
    table["control_accuracy"] = 1 - table.accuracy
    left, right, _ = draw.accuracy(table).axes
    for panel, title, column in ((left, "probe", "accuracy"), (right, "control", "control_accuracy")):
        assert panel.get_title().startswith(title)
        np.testing.assert_array_equal(panel.images[0].get_array(), table[column].to_numpy().reshape(8, 4))
        for text, (target, point, accuracy) in zip(
            panel.texts, table[["target", "point", column]].itertuples(index=False), strict=True
        ):
            assert text.get_position() == (POINTS.index(point), TARGETS.index(target))
            assert text.get_text() == f"{accuracy:.2f}"
        points = [label.get_text().replace("\n", " ") for label in panel.get_xticklabels()]
        assert points == ["embedding", "layer 1", "layer 2 attention", "layer 2 MLP"]
    assert [label.get_text() for label in left.get_yticklabels()] == [words[target] for target in TARGETS]


def test_in_the_published_weights_the_value_is_at_equals_and_not_at_the_operand(
    tmp_path: Path, reference: Path, config: Config
) -> None:
    state_dict = torch.load(reference / "checkpoint_step_39901.pth", weights_only=True)
    model, found = bridge.from_state_dict(state_dict, left_only=2, right_only=2)
    assert found == config
    p = probe.ProbeParams(**SETTINGS | {"train_sequences": 1500, "test_sequences": 500})
    table = probe.probe_sample(bridge.to_bridge(model, config), config.task, p, np.random.default_rng(0))
    at = table.set_index(["target", "point"])
    assert at.accuracy["variable_at_number", "layer1"] >= 0.99
    assert at.accuracy["answer_at_equals", "mlp2"] >= 0.99
    assert at.accuracy["answer_at_equals", "attn2"] <= 0.15
    assert at.selectivity["answer_at_equals", "mlp2"] >= 0.7
    # In 2var sequences no value is at = before layer 2, and then both are, without their order.
    assert at.accuracy_2var["left_value_at_equals", "layer1"] <= 0.1
    assert 0.35 <= at.accuracy_2var["left_value_at_equals", "attn2"] <= 0.7
    assert at.accuracy_either["left_value_at_equals", "attn2"] >= 0.9
    # A trace of every number of the prefix is at the operands, of the one asked for no more than of another.
    fetched = at.accuracy["value_at_operand", "layer1"] - at.accuracy["distractor_at_operand", "layer1"]
    assert fetched == pytest.approx(0, abs=0.04)
    assert at.accuracy["value_at_operand", "mlp2"] <= 0.15
    assert at.unconverged.sum() == 0
