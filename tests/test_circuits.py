"""The circuits: exact decompositions, controls, the published numbers, and runs in which nothing was learned."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stages import circuits as stage
from stages.circuits import (
    circuit_table,
    examples,
    generator,
    identity_circuit,
    moment_files,
    position_circuit,
    score_margin,
    summary,
)
from stages.core.attention import attention_table
from stages.core.bridge import from_state_dict
from stages.core.checkpoints import MOMENTS
from stages.core.circuit_form import Circuits, forward
from stages.core.layouts import Problems, lay_out, values
from stages.core.params import InputError
from stages.core.task import Operands, Task, read_table
from stages.core.text import to_text, to_tokens
from stages.core.weights import Config, ModelConfig, Weights, checkpoint_name, initialise, save
from stages.draw import circuits as draw
from stages.parts import refinement
from stages.parts.adder import additivity, one_adder, other_pairs, scale_r2, write_out
from stages.parts.decomposition import (
    BEST_WRONG,
    PARTS,
    attn2_out,
    batches,
    operand_kinds,
    resid_parts,
    score2_parts,
    score_decomposition,
)
from tests.hand_built import hand_built


def with_heads(config: Config, n_heads: int) -> Config:
    """The same task and sizes with another number of heads."""
    return Config(config.task, ModelConfig(**config.model.model_dump() | {"n_heads": n_heads}))


def model(config: Config, seed: int = 0) -> tuple[Weights, Circuits]:
    """A random model in float64, far enough from even attention that a wrong pattern shows."""
    weights = {name: 3 * w.double() for name, w in initialise(config, seed).items()}
    return weights, Circuits.of(weights)


def sequences(task: Task, size: int, seed: int = 0) -> np.ndarray:
    """Sequences of all forms and couples: [size, T]."""
    rng = np.random.default_rng(seed)
    operands = Operands.of(task)
    n1, n2 = rng.integers(task.N, size=(2, size))
    return lay_out(task, Problems(n1, n2, operands[rng.integers(len(operands), size=size)]), rng)


def published(reference: Path, step: int) -> tuple[Circuits, Config]:
    """One of the published checkpoints."""
    state = torch.load(reference / f"checkpoint_step_{step}.pth", weights_only=True)
    weights, config = from_state_dict(state, left_only=2, right_only=2)
    return Circuits.of(weights), config


def off_diagonal_margin(scores: Tensor) -> float:
    """Mean over rows of the diagonal minus the largest other entry."""
    others = scores.masked_fill(torch.eye(len(scores), dtype=torch.bool), -torch.inf)
    return float((scores.diagonal() - others.amax(1)).mean())


def test_the_nine_parts_of_a_score_add_up_to_what_layer_2_attends_by(tiny_config: Config) -> None:
    config = with_heads(tiny_config, 1)
    _, circuits = model(config)
    (tokens,) = batches(sequences(config.task, 50))
    parts = score2_parts(circuits, tokens)
    assert parts.shape == (3, 3, 50, config.task.context)
    torch.testing.assert_close(parts.sum((0, 1)).softmax(-1), forward(circuits, tokens).pattern2[0])


def test_score_parts_are_summed_over_heads(tiny_config: Config) -> None:
    weights, circuits = model(with_heads(tiny_config, 4))
    (tokens,) = batches(sequences(tiny_config.task, 20))
    resid = resid_parts(circuits, tokens).sum(0)  # [B, T, d]
    Q, K = weights["blocks.1.attn.W_Q"], weights["blocks.1.attn.W_K"]  # [G, d, h]
    scores = torch.einsum("bd,gdh,geh,bte->bt", resid[:, -1], Q, K, resid) / tiny_config.model.d_head**0.5
    torch.testing.assert_close(score2_parts(circuits, tokens).sum((0, 1)), scores)


def test_each_part_of_a_score_depends_on_its_own_part_of_the_model(tiny_config: Config) -> None:
    weights, _ = model(tiny_config)
    without_position = Circuits.of(weights | {"pos_embed.W_pos": torch.zeros_like(weights["pos_embed.W_pos"])})
    without_layer1 = Circuits.of(weights | {"blocks.0.attn.W_O": torch.zeros_like(weights["blocks.0.attn.W_O"])})
    (tokens,) = batches(sequences(tiny_config.task, 20))
    for circuits, missing in ((without_position, "position"), (without_layer1, "layer 1")):
        parts, i = score2_parts(circuits, tokens), PARTS.index(missing)
        kept = [other for other in range(3) if other != i]
        assert not parts[i].any() and not parts[:, i].any()
        assert parts[kept][:, kept].abs().amin(dim=(2, 3)).gt(0).all()


def test_layer_2s_attention_output_is_what_its_pattern_moves(tiny_config: Config) -> None:
    _, circuits = model(tiny_config)
    (tokens,) = batches(sequences(tiny_config.task, 30))
    resid = resid_parts(circuits, tokens).sum(0)
    moved = torch.einsum("gbt,btd,gde->be", forward(circuits, tokens).pattern2, resid, circuits.OV2)
    torch.testing.assert_close(attn2_out(circuits, tokens), moved)


def test_scores_are_averaged_over_values_and_over_the_best_position_of_no_value(tiny_config: Config) -> None:
    _, circuits = model(tiny_config)
    task = tiny_config.task
    table = score_decomposition(circuits, task, 40, generator(0, 0))
    assert set(zip(table.form, table.held_out, strict=True)) == {
        ("0var", 0),
        ("1var", 0),
        ("1var", 1),
        ("2var", 0),
        ("2var", 1),
        ("2var", 2),
    }
    keys = table[(table.query_part == PARTS[0]) & (table.key_part == PARTS[0])]
    of_form = keys[keys.position != BEST_WRONG].groupby(["form", "held_out"])["keys"].sum()
    assert (of_form == 80).all()  # two values a sequence
    held_out = keys[keys.position == "held out"].set_index(["form", "held_out"])["keys"]
    assert held_out.to_dict() == {("1var", 1): 40, ("2var", 1): 40, ("2var", 2): 80}

    # The same by hand for constants, whose values stand at the operand positions.
    rng = generator(0, 0)
    rng.choice([0], 40)
    n1, n2 = rng.integers(task.N, size=(2, 40))
    tokens = lay_out(task, Problems(n1, n2, Operands.of(task)[np.zeros(40, dtype=int)]), rng)
    scores = score2_parts(circuits, batches(tokens)[0]).sum((0, 1))  # [B, T]
    found = table[table.form == "0var"].groupby("position").score.sum()
    assert found["constant"] == pytest.approx(scores[:, -3:-1].mean().item())
    assert found[BEST_WRONG] == pytest.approx(scores[:, [*range(task.context - 3), -1]].amax(1).mean().item())


def test_operands_are_constants_or_variables_on_trained_or_held_out_sides(task: Task) -> None:
    operands = Operands.of(task)
    kinds = operand_kinds(task, operands)
    assert ((kinds == 0).sum(1) == 2 - operands.form).all()
    assert ((kinds == 2).sum(1) == operands.held_out).all()
    b_on_the_right = (operands.right == 1) & (operands.form == 1)
    assert kinds[b_on_the_right].tolist() == [[0, 2]]


def test_circuits_are_the_products_of_weights_that_the_paper_names(tiny_config: Config) -> None:
    weights, circuits = model(tiny_config)
    task = tiny_config.task
    QK1, QK2 = (weights[f"blocks.{i}.attn.W_Q"] @ weights[f"blocks.{i}.attn.W_K"].mT for i in (0, 1))
    OV1 = weights["blocks.0.attn.W_V"] @ weights["blocks.0.attn.W_O"]
    P = weights["pos_embed.W_pos"][: task.prefix]
    V = weights["embed.W_E"][-task.variables :] @ OV1.sum(0)
    position = position_circuit(circuits, tiny_config)
    causal = torch.ones(task.prefix, task.prefix, dtype=torch.bool).tril()
    assert torch.equal(position.isnan(), ~causal)
    torch.testing.assert_close(position[causal], (P @ QK1.sum(0) @ P.T)[causal])
    torch.testing.assert_close(identity_circuit(circuits, tiny_config), V @ QK2.sum(0) @ V.T)


def test_a_circuit_as_a_table_keeps_queries_keys_and_no_future(tiny_config: Config) -> None:
    _, circuits = model(tiny_config)
    position = position_circuit(circuits, tiny_config)
    table = circuit_table(position, [*range(6)])
    assert len(table) == 21 and (table.key <= table["query"]).all()
    row = table[(table["query"] == 4) & (table.key == 1)]
    assert row.score.item() == position[4, 1].item()


def test_scores_from_equals_are_layer_1s_query_at_the_last_position(tiny_config: Config) -> None:
    weights, circuits = model(tiny_config)
    task = tiny_config.task
    E, P = weights["embed.W_E"], weights["pos_embed.W_pos"]
    QK1 = (weights["blocks.0.attn.W_Q"] @ weights["blocks.0.attn.W_K"].mT).sum(0)
    query = (E[task.equals] + P[-1]) @ QK1 / tiny_config.model.d_head**0.5
    wanted = torch.cat([E[task.first_variable :] @ query, P[-3:-1] @ query])
    np.testing.assert_allclose(refinement.scores_from_equals(circuits, task), wanted)


@given(st.integers(2, 200), st.integers(0, 2**32))
def test_mismatched_pairs_are_a_permutation_that_moves_every_pair(pairs: int, seed: int) -> None:
    moved = other_pairs(pairs, np.random.default_rng(seed))
    assert sorted(moved) == [*range(pairs)]
    assert (moved != np.arange(pairs)).all()


def test_writing_operands_out_keeps_prefix_and_values(task: Task) -> None:
    tokens = to_tokens(task, "c=17, b=42, b+c")[None]
    for which, text in (
        ([False, False], "b+c"),
        ([True, False], "42+c"),
        ([False, True], "b+17"),
        ([True, True], "42+17"),
    ):
        written = write_out(task, tokens, np.array([which]))
        assert to_text(task, written[0]) == f"c=17, b=42, {text}"
        assert values(task, written).tolist() == [[42, 17]]


@pytest.mark.parametrize(
    "task",
    [
        Task(N=59, variables=12, context=16, left_only=2, right_only=2),
        Task(N=2, variables=2, context=8, left_only=1, right_only=1),
    ],
)
def test_examples_ask_one_prefix_in_every_form(task: Task) -> None:
    tokens = examples(task, seed=0)
    assert (tokens[:, : task.prefix] == tokens[0, : task.prefix]).all()
    assert (values(task, tokens) == [7 % task.N, 23 % task.N]).all()
    assert (tokens[:, -3:-1] >= task.first_variable).tolist() == [
        [False, False],
        [True, False],
        [False, True],
        [True, True],
    ]


def test_r2_is_one_for_a_scaled_and_shifted_copy_and_zero_for_unrelated_vectors() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.0, 5.0]], dtype=torch.float64)
    assert scale_r2(x, -2.5 * x + torch.tensor([7.0, -3.0])) == pytest.approx(1)
    x, y = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, -1.0]])
    assert scale_r2(x, y) == 0
    # Two numbers scaled differently: the best single scale 1 leaves half of (2, 0) · variance 2 of 4 unexplained.
    assert scale_r2(x, x + y) == pytest.approx(0.5)


def test_a_model_that_moves_nothing_has_one_input_of_the_adder_for_every_pair_and_form(tiny_config: Config) -> None:
    weights, _ = model(tiny_config)
    still = {name: torch.zeros_like(w) if name.endswith("W_V") else w for name, w in weights.items()}
    table = one_adder(Circuits.of(still), tiny_config.task, generator(0, 1))
    assert len(table[["n1", "n2"]].drop_duplicates()) == len(table) == 49
    np.testing.assert_allclose(table.filter(regex="cosine|mismatched"), 1)


def test_published_weights_share_one_adder_and_add_values(reference: Path) -> None:
    circuits, config = published(reference, 39901)
    task, rng = config.task, generator(0, 1)
    adder = pd.concat([one_adder(circuits, task, rng) for _ in range(8)])
    sums, r2 = additivity(circuits, task, generator(0, 2))
    tokens, answers = refinement.problems_by_side(task, 50, generator(0, 3))
    accuracy = refinement.accuracy_by_side(circuits, task, tokens, answers)
    parts = score_decomposition(circuits, task, 50, generator(0, 0))
    found = summary(task, adder, sums, r2, parts, accuracy)
    for form in ("1var", "2var"):
        assert (adder[f"cosine_{form}"] > adder[f"mismatched_{form}"]).mean() > 0.99
    assert found["one_adder_cosine_1var"] == pytest.approx(0.973, abs=0.02)
    assert found["one_adder_cosine_2var"] == pytest.approx(0.957, abs=0.02)
    assert found["one_adder_cosine_mismatched"] == pytest.approx(0.13, abs=0.02)
    assert found["additivity_cosine"] == pytest.approx(0.987, abs=0.02)
    assert found["additivity_cosine_shuffled"] == pytest.approx(0.533, abs=0.02)
    assert found["additivity_r2"] == pytest.approx(0.980, abs=0.02)
    assert found["lowest_accuracy_held_out_position"] >= 0.9
    assert found["score_margin_held_out_position"] > 1


@pytest.mark.parametrize(("step", "margin"), [(5301, 8.836), (5401, 22.227)])
def test_published_identity_margin_jumps_at_the_spike(reference: Path, step: int, margin: float) -> None:
    circuits, config = published(reference, step)
    assert off_diagonal_margin(identity_circuit(circuits, config)) == pytest.approx(margin, abs=1e-3)


def test_published_variable_b_on_the_right_comes_last(reference: Path) -> None:
    accuracy, scores = {}, {}
    for step in (14501, 16001):
        circuits, config = published(reference, step)
        tokens, answers = refinement.problems_by_side(config.task, 100, generator(0, 3))
        accuracy[step] = refinement.accuracy_by_side(circuits, config.task, tokens, answers)
        scores[step] = refinement.scores_from_equals(circuits, config.task)
    assert accuracy[14501][1, 1] < 0.2 and np.delete(accuracy[14501], 12 + 1).min() > 0.9
    assert accuracy[16001].min() > 0.9
    assert scores[14501][:12].argmin() == 1  # and layer 1 looks least at b
    assert scores[16001][1] > scores[14501][1]


def test_accuracy_is_counted_for_each_variable_on_each_side(tiny_config: Config) -> None:
    _, circuits = model(tiny_config)
    task = tiny_config.task
    tokens, answers = refinement.problems_by_side(task, 5, generator(0, 3))
    assert tokens.shape == (2 * task.variables * 5, task.context)
    cells = tokens.reshape(2, task.variables, 5, task.context)
    for v in range(task.variables):
        assert (cells[0, v, :, -3] == task.first_variable + v).all() and (cells[0, v, :, -2] < task.N).all()
        assert (cells[1, v, :, -2] == task.first_variable + v).all() and (cells[1, v, :, -3] < task.N).all()
    assert answers.tolist() == (values(task, tokens).sum(1) % task.N).tolist()

    given = forward(circuits, batches(tokens)[0]).logits.argmax(-1)
    claimed = (given + 1).reshape(2, task.variables, 5)
    claimed[1, 2, :4] -= 1
    accuracy = refinement.accuracy_by_side(circuits, task, tokens, claimed.flatten())
    wanted = np.zeros((2, task.variables))
    wanted[1, 2] = 0.8
    np.testing.assert_array_equal(accuracy, wanted)
    table = refinement.accuracy_table(task, [300], [accuracy])
    assert table[table.accuracy > 0].to_dict("records") == [
        {"step": 300, "side": "right", "variable": "c", "held_out": False, "accuracy": 0.8}
    ]
    assert {(row.side, row.variable) for row in table[table.held_out].itertuples()} == {("right", "a"), ("left", "d")}


def test_the_refinement_window_ends_with_refinement_or_the_run() -> None:
    steps = [0, 100, 200, 300, 400]
    assert refinement.window(steps, 100, 300) == [100, 200, 300]
    assert refinement.window(steps, 100, None) == [100, 200, 300, 400]
    assert refinement.window(steps, None, None) == []


def test_attention_of_a_query_adds_up_to_the_number_of_heads_and_knows_where_it_should_go(tiny_config: Config) -> None:
    _, circuits = model(tiny_config)
    task = tiny_config.task
    tokens = np.stack([to_tokens(task, "b=2, d=3, d+4"), to_tokens(task, "b=2, 4+1")])
    table = attention_table(circuits, task, tokens)
    sums = table.groupby(["sequence", "layer", "query"]).weight.sum()
    np.testing.assert_allclose(sums, 2)
    assert len(sums) == 2 * (task.context + 1)  # layer 2 is read at the last position alone
    first = table[(table.sequence == 0) & table.matters]
    assert [*zip(first.layer, first.query_token, first.key_token, first.key, strict=True)] == [
        (1, "2", "b", 2),
        (1, "3", "d", 4),
        (1, "=", "d", 7),
        (1, "=", "4", 8),
        (2, "=", "3", 5),
        (2, "=", "4", 8),
    ]
    second = table[(table.sequence == 1) & table.matters & (table.layer == 2)]
    assert second.key_token.tolist() == ["4", "1"]


def run_stage(
    folder: Path, configs: dict[int, Config], moments: dict[str, int | None], final: Weights | None = None
) -> dict[str, float | None]:
    """Run the stage on untrained models as checkpoints; the last, or `final`, is the final one. Returns the metrics."""
    (folder / "checkpoints").mkdir()
    (folder / "metrics").mkdir()
    (folder / "plots").mkdir()
    for step, config in configs.items():
        save(folder / "checkpoints" / checkpoint_name(step), initialise(config, step), config)
    (folder / "metrics/progress.json").write_text(json.dumps(dict.fromkeys(MOMENTS) | moments))
    (folder / "plots/accuracy.csv").write_text("\n".join(["step", *map(str, configs)]))
    (folder / "params.yaml").write_text("circuits: {layouts: 1, sequences: 6, seed: 0}\n")
    last = folder / "checkpoints" / checkpoint_name(max(configs))
    if final is not None:
        save(last, final, configs[max(configs)])
    stage.main(folder / "checkpoints", last, folder, folder / "params.yaml")
    return json.loads((folder / "metrics/circuits.json").read_text())


def test_a_run_that_learned_nothing_gives_tables_metrics_and_fewer_figures(tmp_path: Path, tiny_config: Config) -> None:
    metrics = run_stage(tmp_path, {0: tiny_config, 100: tiny_config}, {})
    assert all(value is None or np.isfinite(value) for value in metrics.values())
    assert metrics["one_adder_cosine_1var"] is not None
    accuracy, task = read_table(tmp_path / "data/circuits/accuracy_by_side.parquet")
    assert (len(accuracy), task) == (0, tiny_config.task)
    assert [stem for stem, _ in draw.figures(tmp_path)] == [
        "circuits_attention_final",
        "circuits_position_identity",
        "circuits_cosines",
        "circuits_score_decomposition",
    ]


def test_every_moment_that_was_reached_is_measured_and_drawn_with_several_heads(
    tmp_path: Path, tiny_config: Config
) -> None:
    config, task = with_heads(tiny_config, 4), tiny_config.task
    moments = {"spike_before": 100, "spike": 200, "addition": 0, "assignment": 300}
    run_stage(tmp_path, dict.fromkeys((0, 100, 200, 300, 400), config), moments)
    tables = {name: read_table(tmp_path / f"data/circuits/{name}.parquet")[0].to_pandas() for name in draw.TABLES}
    at = {step: Circuits.of(initialise(config, step)) for step in (100, 200, 300, 400)}
    for moment, step in (("spike_before", 100), ("spike", 200), ("assignment", 300), ("final", 400)):
        found = {name: table[table.moment == moment] for name, table in tables.items() if "moment" in table}
        expected = {
            "attention": attention_table(at[step], task, examples(task, seed=0)),
            "position": circuit_table(position_circuit(at[step], config), [*range(task.prefix)]),
            "identity": circuit_table(identity_circuit(at[step], config), [*task.names]),
            "scores": score_decomposition(at[step], task, 6, generator(0, 0)),
        }
        assert found.keys() == expected.keys()
        for name, table in expected.items():
            found_here = found[name].drop(columns="moment").reset_index(drop=True)
            pd.testing.assert_frame_equal(found_here, table.reset_index(drop=True), check_dtype=False)
    for name in ("accuracy_by_side", "scores_from_equals"):
        assert set(tables[name].step) == {300, 400}
    for step, part in tables["scores_from_equals"].groupby("step"):
        np.testing.assert_array_equal(part.score, refinement.scores_from_equals(at[step], task))

    figures = dict(draw.figures(tmp_path))
    assert figures.keys() == {
        f"circuits_{name}"
        for name in (
            "attention_spike_before",
            "attention_spike",
            "attention_final",
            "position_identity",
            "position_identity_spike",
            "cosines",
            "accuracy_by_side",
            "scores_from_equals",
            "score_decomposition",
        )
    }
    before, after, final = "before the spike, step 100", "after the spike, step 200", "at the end, step 400"
    for moment, words, step in (("spike_before", before, 100), ("spike", after, 200), ("final", final, 400)):
        figure = figures[f"circuits_attention_{moment}"]
        assert figure.get_suptitle() == f"attention {words}"
        table = attention_table(at[step], task, examples(task, seed=0))
        from_equals = table[(table.sequence == 0) & (table.layer == 1) & (table.query_token == "=")]
        assert figure.axes[0].images[0].get_array()[-1].tolist() == from_equals.weight.tolist()
    for name, moments_shown in (("", {final: 400}), ("_spike", {before: 100, after: 200})):
        axes = figures[f"circuits_position_identity{name}"].axes[1 : 2 * len(moments_shown) : 2]
        for axis, (words, step) in zip(axes, moments_shown.items(), strict=True):
            assert axis.get_title() == f"variable identity\n{words}"
            V = identity_circuit(at[step], config)
            np.testing.assert_allclose(axis.images[0].get_array(), V - V.mean(1, keepdim=True), atol=1e-6)
    rows = [axis.get_ylabel() for axis in figures["circuits_score_decomposition"].axes if "query" in axis.get_ylabel()]
    assert rows == ["at assignment, step 300\nquery's part", f"{final}\nquery's part"]


def test_metrics_are_those_of_the_final_model_whatever_came_before(tmp_path: Path, tiny_config: Config) -> None:
    weights, config = hand_built(tiny_config.task)
    moments = {"spike": 100, "assignment": 0, "refinement": 100}
    metrics = []
    for name, steps, reached in (("alone", [200], {}), ("after", [0, 100, 200], moments)):
        (tmp_path / name).mkdir()
        metrics.append(run_stage(tmp_path / name, dict.fromkeys(steps, config), reached, final=weights))
    assert metrics[0] == metrics[1]
    assert metrics[1]["lowest_accuracy_trained_position"] == metrics[1]["lowest_accuracy_held_out_position"] == 1


def test_each_metric_is_its_own_mean_margin_or_lowest_accuracy(tiny_config: Config) -> None:
    columns = ["cosine_1var", "mismatched_1var", "cosine_2var", "mismatched_2var"]
    adder = pd.DataFrame([(0.9, 0.1, 0.7, 0.3), (0.8, 0.2, 0.5, 0.6)], columns=columns)
    sums = pd.DataFrame({"cosine": [0.95, 0.85], "shuffled": [0.45, 0.05]})
    accuracy = np.array([[0.50, 0.60, 0.70, 0.10], [0.20, 0.80, 0.90, 0.95]])  # d never left, a never right
    rows = [
        ("1var", 0, "trained", "layer 1", "layer 1", 5.0),
        ("1var", 0, "trained", "layer 1", "position", 0.25),
        ("1var", 0, "best wrong", "layer 1", "layer 1", 2.0),
        ("1var", 0, "best wrong", "position", "layer 1", 0.75),
        ("1var", 0, "constant", "layer 1", "layer 1", 31.0),
        ("1var", 1, "held out", "layer 1", "layer 1", 9.0),
        ("1var", 1, "held out", "embedding", "embedding", 0.5),
        ("1var", 1, "best wrong", "layer 1", "layer 1", 1.0),
        ("1var", 1, "best wrong", "position", "position", 1.75),
        ("2var", 0, "trained", "layer 1", "layer 1", 64.0),
        ("2var", 1, "held out", "layer 1", "layer 1", 128.0),
    ]
    parts = pd.DataFrame(rows, columns=["form", "held_out", "position", "query_part", "key_part", "score"])
    assert summary(tiny_config.task, adder, sums, 0.77, parts, accuracy) == pytest.approx(
        {
            "one_adder_cosine_1var": 0.85,
            "one_adder_cosine_2var": 0.6,
            "one_adder_cosine_mismatched": 0.3,
            "additivity_cosine": 0.9,
            "additivity_cosine_shuffled": 0.25,
            "additivity_r2": 0.77,
            "lowest_accuracy_trained_position": 0.5,
            "lowest_accuracy_held_out_position": 0.1,
            "score_margin_trained_position": 2.5,
            "score_margin_held_out_position": 6.75,
            "score_margin_trained_position_layer1": 3,
            "score_margin_held_out_position_layer1": 8,
        }
    )


def test_a_task_without_held_out_positions_has_null_where_they_would_stand(tmp_path: Path) -> None:
    task = Task(N=31, variables=3, context=9, left_only=0, right_only=0)
    config = Config(task, ModelConfig(d_model=8, d_head=8, n_heads=1, d_mlp=8))
    metrics = run_stage(tmp_path, {0: config}, {"assignment": 0})
    missing = {name for name, value in metrics.items() if value is None}
    assert missing == {
        "lowest_accuracy_held_out_position",
        "score_margin_held_out_position",
        "score_margin_held_out_position_layer1",
    }
    assert len([*draw.figures(tmp_path)]) == 6


def test_a_margin_compares_a_value_with_the_best_wrong_position_of_the_same_sequences() -> None:
    rows = [
        ("1var", 0, "trained", 2.0),
        ("1var", 0, "trained", 1.0),
        ("1var", 0, BEST_WRONG, 0.5),
        ("1var", 1, "held out", -1.0),
        ("1var", 1, BEST_WRONG, 4.0),
        ("2var", 0, "trained", 99.0),
    ]
    parts = pd.DataFrame(rows, columns=["form", "held_out", "position", "score"])
    assert score_margin(parts, "trained") == 2.5
    assert score_margin(parts, "held out") == -5
    assert score_margin(parts[parts.held_out == 0], "held out") is None


def test_a_moment_without_its_checkpoint_is_named(tmp_path: Path, tiny_config: Config) -> None:
    save(tmp_path / checkpoint_name(0), initialise(tiny_config, 0), tiny_config)
    moments = dict.fromkeys(MOMENTS) | {"spike": 300}
    with pytest.raises(InputError, match=r"no checkpoint of step 300 \(spike\)"):
        moment_files(tmp_path, tmp_path / checkpoint_name(0), moments)


def test_the_same_parameters_give_the_same_bytes(tmp_path: Path, tiny_config: Config) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        run_stage(tmp_path / name, {0: tiny_config, 100: tiny_config}, {"assignment": 0})
    files = sorted(file.relative_to(tmp_path / "one") for file in (tmp_path / "one/data").rglob("*.parquet"))
    assert len(files) == 8
    for file in [*files, Path("metrics/circuits.json")]:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
