"""Progress measures and phases: exact values on built weights and curves, and the published ones."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg

from stages import progress
from stages.core import phases
from stages.core.circuit_form import Circuits, forward
from stages.core.layouts import value_positions, values
from stages.core.params import InputError
from stages.core.task import Task
from stages.core.weights import Config, ModelConfig, Weights, checkpoint_name, initialise, save
from stages.draw import progress as draw
from stages.progress import ProgressParams

SIZES = {"sequences": 30, "probe_fit": 100, "probe_test": 20, "seed": 3}
MEASURES = {
    "ov2_mlp2_accuracy",
    "qk1_num_to_prev_var",
    "qk2_ov1_var_identity",
    "qk2_ov1_diagonal_margin",
    "attn1_equals_to_operands",
    "attn1_num_to_prev",
    "attn2_equals_to_values",
    "attn1_equals_to_operands_2var",
    "attn1_num_to_prev_2var",
    "attn2_equals_to_values_2var",
    "probe1_var_from_num",
}
MOMENTS = ("addition", "assignment", "refinement", "spike_before", "spike", "grokking_delay")


# Phases


@pytest.mark.parametrize(
    ("steps", "reached", "expected"),
    [
        # Every 100 steps: six checkpoints span 500 steps.
        (range(0, 1000, 100), "0011111111", 200),
        (range(0, 1000, 100), "0000111111", 400),
        (range(0, 1000, 100), "0000011111", None),  # 400 steps to the end are not 500
        (range(0, 1000, 100), "1111111111", 0),
        (range(0, 1000, 100), "0000000000", None),
        (range(0, 1200, 100), "111110111111", 600),  # a dip at 500 spoils every window that holds it
        (range(0, 1200, 100), "111111011111", 0),  # a dip after the window does not matter
        (range(0, 1200, 100), "101010101010", None),
        # Three checkpoints are needed, however far apart they are.
        ([0, 1000, 2000, 3000], "0111", 1000),
        ([0, 1000, 2000, 3000], "0011", None),
        ([0, 1000, 2000, 3000], "1101", None),
        ([0, 600], "11", None),
        ([0], "1", None),
        ([], "", None),
        # 250 apart: three checkpoints span exactly 500 steps; 249 apart: four are needed.
        ([0, 250, 500], "111", 0),
        ([0, 249, 498], "111", None),
        ([0, 249, 498, 747], "1111", 0),
        ([0, 249, 498, 747], "1110", None),
        # Dense, then sparse: the window ends at the first checkpoint 500 steps on, wherever that is.
        ([0, 10, 20, 5000, 6000], "11101", None),
        ([0, 10, 20, 5000, 6000], "11110", 0),
        # The last interval of a run may be short.
        ([0, 400, 800, 850], "0111", None),
        ([0, 400, 800, 900], "0111", 400),
    ],
)
def test_something_is_reached_where_a_window_of_500_steps_and_3_checkpoints_starts(steps, reached, expected):
    assert phases.first_lasting(np.array(list(steps)), np.array([c == "1" for c in reached], bool)) == expected


@given(st.lists(st.tuples(st.integers(1, 700), st.booleans()), max_size=12))
def test_the_first_lasting_checkpoint_is_the_first_that_starts_any_long_enough_window(rows):
    steps = np.cumsum([gap for gap, _ in rows], dtype=int)
    reached = np.array([r for _, r in rows], bool)
    windows = [
        steps[i]
        for i in range(len(steps))
        for j in range(i + 2, len(steps))
        if steps[j] - steps[i] >= 500 and reached[i : j + 1].all()
    ]
    assert phases.first_lasting(steps, reached) == min(windows, default=None)


def curves(**columns: list[float]) -> pd.DataFrame:
    """Accuracy curves with a checkpoint every 250 steps."""
    table = pd.DataFrame(columns)
    table.insert(0, "step", np.arange(len(table)) * 250)
    return table


def test_each_phase_is_reached_at_its_own_thresholds_and_not_below():
    table = curves(
        **{
            "0var_add_restricted": [0.8999, 0.9, 0.9, 0.9, 1, 1, 1, 1],
            "1var_add_restricted": [0, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
            "2var_add_restricted": [0, 0.7999, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8],
            "1var_var_restricted": [0, 0, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95],
            "2var_var_restricted_1": [0, 0, 0, 0, 0.95, 0.95, 0.95, 0.95],
            "2var_var_restricted_2": [0, 0, 0, 0.95, 0.9499, 0.95, 0.95, 0.95],
        }
    )
    assert phases.phases(table) == {"addition": 250, "assignment": 500, "refinement": 1250}


@pytest.mark.parametrize("column", ["2var_var_restricted_2", "1var_add_restricted", "0var_add_restricted"])
def test_a_phase_that_needs_an_absent_or_empty_split_is_null_and_the_others_are_not(column):
    table = curves(**{name: [1.0] * 4 for thresholds in phases.PHASES.values() for name in thresholds})
    whole = phases.phases(table)
    assert set(whole.values()) == {0}
    wanted = {phase: None if column in phases.PHASES[phase] else 0 for phase in whole}
    assert phases.phases(table.drop(columns=column)) == wanted
    assert phases.phases(table.assign(**{column: np.nan})) == wanted


@pytest.mark.parametrize(
    ("accuracy", "addition", "expected"),
    [
        ([0, 0.6, 0.6, 0.75, 0.8], 250, (500, 750)),  # the larger rise before addition does not count
        ([0, 0.6, 0.6, 0.75, 0.8], 0, (0, 250)),
        ([0.5, 0.6, 0.7, 0.7], 0, (0, 250)),  # 0.1, not a hair less, and the first of equals
        ([0.5, 0.5999, 0.6], 0, (None, None)),
        ([0.9, 0.5, 0.1], 0, (None, None)),  # falls are no rises
        ([0.1, 0.9], 250, (None, None)),  # nothing after addition
        ([0.1, 0.9], None, (None, None)),
        ([np.nan, np.nan], 0, (None, None)),
    ],
)
def test_the_spike_is_the_largest_rise_from_addition_on_if_it_is_at_least_a_tenth(accuracy, addition, expected):
    assert phases.spike(curves(**{"1var_add_restricted": accuracy}), addition) == expected


def test_without_the_split_there_is_no_spike():
    assert phases.spike(curves(other=[0, 1]), 0) == (None, None)


def test_the_grokking_delay_runs_from_99_percent_on_trained_pairs_to_addition():
    table = curves(**{"0var_train": [0, 0.99, 0.98, 1, 1, 1, 1], "0var_add_restricted": [0, 0, 0, 0, 0.9, 0.9, 0.9]})
    assert phases.moments(table) == dict.fromkeys(MOMENTS) | {"addition": 1000, "grokking_delay": 750}
    assert phases.moments(table.drop(columns="0var_train"))["grokking_delay"] is None
    assert phases.moments(table.assign(**{"0var_train": 0.98}))["grokking_delay"] is None
    assert phases.moments(table[["step", "0var_train"]])["grokking_delay"] is None


# Sequences


def test_batches_hold_a_third_of_each_form_over_all_variables_and_two_variables_apart(task: Task):
    batches = progress.draw_batches(task, ProgressParams(sequences=512, probe_fit=1024, probe_test=256, seed=0))
    for tokens, size in ((batches.mixed, 512), (batches.probe_fit, 1024), (batches.probe_test, 256)):
        left, right = tokens[:, -3] >= task.first_variable, tokens[:, -2] >= task.first_variable
        counts = sorted([(~left & ~right).sum(), (left & ~right).sum(), (~left & right).sum()])
        assert sum(counts) == len(tokens) == size
        assert counts[-1] - counts[0] <= 1
        for side, column in ((left, -3), (right, -2)):
            assert set(tokens[side, column]) == set(range(task.first_variable, task.vocabulary))
    couples = batches.two_variables[:, -3:-1]
    assert len(couples) == 512
    assert (couples >= task.first_variable).all()
    assert len(np.unique(couples, axis=0)) > 120  # of 132: about 3 fail to turn up in 512 uniform draws
    assert (couples[:, 0] != couples[:, 1]).all()
    assert len(np.unique(values(task, batches.mixed)[:, 0])) == 59


def test_batches_are_a_function_of_the_seed_and_differ_from_each_other(task: Task):
    p = ProgressParams(sequences=100, probe_fit=100, probe_test=100, seed=5)
    once, again, other = (progress.draw_batches(task, q) for q in (p, p, p.model_copy(update={"seed": 6})))
    for name in ("mixed", "two_variables", "probe_fit", "probe_test"):
        assert np.array_equal(getattr(once, name), getattr(again, name))
        assert not np.array_equal(getattr(once, name), getattr(other, name))
    assert not np.array_equal(once.mixed, once.probe_fit)
    assert not np.array_equal(once.probe_fit, once.probe_test)


# Measures on weights that are built by hand


def zeros(config: Config) -> Weights:
    """Weights that are all zero."""
    return {name: torch.zeros(shape) for name, shape in config.shapes().items()}


@pytest.fixture
def built() -> Config:
    """Two heads, and as many dimensions as positions."""
    task = Task(N=3, variables=4, context=10, left_only=1, right_only=1)
    return Config(task, ModelConfig(d_model=10, d_head=10, n_heads=2, d_mlp=6))


def position_scores(config: Config, wanted: torch.Tensor) -> Circuits:
    """A model with P QK1 Pᵀ = wanted [T, T], half of it from each of the two heads."""
    weights = zeros(config)
    weights["pos_embed.W_pos"] = torch.eye(10)
    weights["blocks.0.attn.W_Q"] = torch.stack([wanted / 2, wanted / 2])
    weights["blocks.0.attn.W_K"] = torch.eye(10).expand(2, 10, 10)
    return Circuits.of(weights)


def test_the_position_circuit_counts_queries_that_prefer_the_position_before(built: Config):
    """The prefix has 6 positions, so that there are 5 queries."""
    previous, two_back = torch.eye(10).roll(-1, 1), torch.eye(10).roll(-2, 1)  # 1 at [q, q-1] and at [q, q-2]
    first = torch.zeros(10, 10)
    first[:, 0] = 1
    assert progress.previous_position(position_scores(built, previous), built.task) == 1
    # Two back is left out, so a preference for it costs nothing where the position before comes second.
    assert progress.previous_position(position_scores(built, previous + 5 * two_back), built.task) == 1
    # The position itself and later ones are no candidates.
    later = torch.ones(10, 10).triu()
    assert progress.previous_position(position_scores(built, previous + 5 * later), built.task) == 1
    # Always the first: right for query 1, which has no other, and for query 2, where it is left out.
    assert progress.previous_position(position_scores(built, first), built.task) == pytest.approx(2 / 5)


def test_variable_identity_is_read_off_the_diagonal_of_the_sum_over_heads(built: Config):
    weights = zeros(built)
    weights["embed.W_E"][6:, :4] = torch.eye(4)  # variables
    weights["blocks.0.attn.W_V"] = torch.eye(10).repeat(2, 1, 1)
    weights["blocks.0.attn.W_O"] = torch.eye(10).repeat(2, 1, 1) / 2  # so that OV1 is the identity
    scores = torch.tensor([[5.0, 1, 0, 0], [0, 2, 3, 0], [0, 0, 4, 4], [-1, -2, -3, 0]])
    weights["blocks.1.attn.W_Q"][:, :4, :4] = torch.stack([scores - 7, torch.full((4, 4), 7.0)])
    weights["blocks.1.attn.W_K"] = torch.eye(10).repeat(2, 1, 1)
    share, margin = progress.variable_identity(weights, built.task)
    assert share == 2 / 4  # row 2 has a tie, which is no maximum on the diagonal alone
    assert margin == pytest.approx((4 - 1 + 0 + 1) / 4)


def adder(config: Config) -> Weights:
    """A model whose OV2 and MLP2 add modulo 3: one neuron for each unordered pair, doubles louder than others."""
    weights = zeros(config)
    weights["embed.W_E"][:3, :3] = torch.eye(3)
    weights["embed.W_E"][:3, 3] = 0.5  # adds up to 1 over the two numbers: the threshold of the neurons
    weights["blocks.1.attn.W_V"] = torch.eye(10).repeat(2, 1, 1)
    weights["blocks.1.attn.W_O"] = torch.eye(10).repeat(2, 1, 1) / 2
    weights["unembed.W_U"][:3] = torch.eye(3)
    pairs = [(0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2)]
    for neuron, (a, b) in enumerate(pairs):
        for number in {a, b}:
            weights["blocks.1.mlp.W_in"][number, neuron] = 1
        weights["blocks.1.mlp.W_in"][3, neuron] = -1
        weights["blocks.1.mlp.W_out"][neuron, (a + b) % 3] = 10 if a == b else 1
    return weights


@pytest.mark.parametrize("at_a_time", [1, 4, 4096])
def test_a_module_that_adds_is_found_to_add_however_pairs_are_batched(built: Config, monkeypatch, at_a_time):
    monkeypatch.setattr(progress, "PAIRS_AT_A_TIME", at_a_time)
    weights = adder(built)
    assert progress.adder_accuracy(Circuits.of(weights), built.task) == 1
    weights["blocks.1.mlp.W_out"][3] = 0  # 0+1 and 1+0 are lost
    assert progress.adder_accuracy(Circuits.of(weights), built.task) == pytest.approx(7 / 9)


def test_the_largest_weights_must_be_at_the_positions_and_above_all_others():
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.3, 0.5, 0.2], [0.5, 0.2, 0.3], [0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    first_two = torch.tensor([[0, 1]]).expand(5, 2)
    assert progress.share_largest(weights, first_two) == pytest.approx(2 / 5)  # the last two rows are ties
    assert progress.share_largest(weights, first_two.flip(1)) == pytest.approx(2 / 5)
    assert progress.share_largest(weights, first_two[:, :1]) == pytest.approx(4 / 5)


def random_model(config: Config, scale: float) -> Weights:
    """Random weights large enough for attention to choose."""
    return {name: w * scale for name, w in initialise(config, seed=1).items()}


def test_the_attention_measures_are_what_counting_sequence_by_sequence_gives(tiny_config: Config):
    task, circuits = tiny_config.task, Circuits.of(random_model(tiny_config, 2.0))
    tokens = progress.draw_batches(task, ProgressParams(**SIZES | {"sequences": 400})).mixed
    positions = value_positions(task, tokens)
    result = forward(circuits, torch.from_numpy(tokens.astype(np.int64)))
    pattern1, pattern2 = result.pattern1.sum(0).numpy(), result.pattern2.sum(0).numpy()
    operands = looks = at_values = previous = 0
    for i, sequence in enumerate(tokens):
        operands += set(np.argsort(pattern1[i, -1])[-2:]) == {7, 8}
        at_values += set(np.argsort(pattern2[i])[-2:]) == set(positions[i])
        for q, token in enumerate(sequence[:6]):
            if token < task.N:
                looks += 1
                previous += np.argmax(pattern1[i, q]) == q - 1
    assert min(operands, at_values, previous) > 0
    assert progress.attention(circuits, task, tokens, positions) == pytest.approx(
        {
            "attn1_equals_to_operands": operands / 400,
            "attn1_num_to_prev": previous / looks,
            "attn2_equals_to_values": at_values / 400,
        }
    )


def test_the_residual_stream_after_layer_1_is_that_of_attention_by_its_definition(tiny_config: Config):
    task = tiny_config.task
    weights = {name: w.double() for name, w in random_model(tiny_config, 1.5).items()}
    circuits = Circuits.of(weights)
    tokens = progress.draw_batches(task, ProgressParams(**SIZES)).mixed
    ids = torch.from_numpy(tokens.astype(np.int64))
    x = weights["embed.W_E"][ids] + weights["pos_embed.W_pos"]  # [B, T, d]
    q, k, v = (torch.einsum("btd,hde->bhte", x, weights[f"blocks.0.attn.W_{name}"]) for name in "QKV")
    scores = torch.einsum("bhqe,bhke->bhqk", q, k) / tiny_config.model.d_head**0.5
    pattern = scores.masked_fill(torch.ones(10, 10, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    resid = x + torch.einsum("bhqk,bhke,hed->bqd", pattern, v, weights["blocks.0.attn.W_O"])
    torch.testing.assert_close(progress.resid_post1(circuits, ids, forward(circuits, ids)), resid)

    x_probe, variables = progress.at_numbers(circuits, task, tokens)
    places = [(i, j) for i, row in enumerate(tokens) for j in range(6) if row[j] < task.N]
    np.testing.assert_allclose(x_probe, np.array([resid[i, j].numpy() for i, j in places]))
    assert variables.tolist() == [tokens[i, j - 1] - task.first_variable for i, j in places]
    assert set(variables) == set(range(task.variables))


def test_a_probe_finds_what_is_linear_is_at_chance_on_noise_and_is_nan_if_it_did_not_converge():
    rng = np.random.default_rng(0)
    y_fit, y_test = rng.integers(4, size=2000), rng.integers(4, size=2000)
    noise_fit, noise_test = rng.standard_normal((2, 2000, 6))
    signal = rng.standard_normal((4, 6)) * 100
    x_fit, x_test = noise_fit + signal[y_fit], noise_test + signal[y_test]
    assert progress.probe_accuracy(x_fit, y_fit, x_test, y_test) == 1
    assert progress.probe_accuracy(noise_fit, y_fit, noise_test, y_test) == pytest.approx(0.25, abs=0.04)
    assert np.isnan(progress.probe_accuracy(x_fit, y_fit, x_test, y_test, most_iterations=2))


# The published run


def published(reference: Path, config: Config) -> dict[int, Weights]:
    """The published checkpoints by step."""
    states = {int(re.findall(r"\d+", file.name)[0]): file for file in reference.glob("checkpoint_step_*.pth")}
    loaded = {step: torch.load(file, weights_only=True) for step, file in sorted(states.items())}
    return {step: {name: state[name] for name in config.shapes()} for step, state in loaded.items()}


def test_measures_1_to_6_equal_the_published_ones_to_the_last_digit(reference: Path, config: Config):
    expected = pd.read_csv(reference / "measures.csv", index_col="step")
    sequences = np.load(reference / "batches.npz")
    tokens, positions = sequences["measures_tokens"], sequences["measures_value_positions"].astype(np.int64)
    assert np.array_equal(np.sort(positions), np.sort(value_positions(config.task, tokens)))
    for step, weights in published(reference, config).items():
        circuits = Circuits.of(weights)
        found = {
            "ov2_mlp2_accuracy": progress.adder_accuracy(circuits, config.task),
            "qk1_num_to_prev_var": progress.previous_position(circuits, config.task),
            "qk2_ov1_var_identity": progress.variable_identity(weights, config.task)[0],
            **progress.attention(circuits, config.task, tokens, positions),
        }
        assert {name: round(value, 4) for name, value in found.items()} == expected.loc[step, list(found)].to_dict()


def test_the_published_identity_margin_jumps_at_the_spike(reference: Path, config: Config):
    weights = published(reference, config)
    margins = {step: progress.variable_identity(weights[step], config.task)[1] for step in (5301, 5401)}
    assert {step: round(margin, 3) for step, margin in margins.items()} == {5301: 8.836, 5401: 22.227}


def test_the_published_spike_lies_between_5301_and_5401(reference: Path):
    accuracy = pd.read_csv(reference / "measures.csv")
    assert phases.moments(accuracy) == {
        "addition": 3001,
        "assignment": 5401,
        "refinement": None,  # of the eight only two, at 16001 and 39901, come after it
        "spike_before": 5301,
        "spike": 5401,
        "grokking_delay": 2000,
    }


def test_the_published_final_weights_measure_as_trained_on_sequences_drawn_here(reference: Path, config: Config):
    batches = progress.draw_batches(config.task, ProgressParams(sequences=300, probe_fit=300, probe_test=100, seed=0))
    measures = progress.measure(published(reference, config)[39901], config.task, batches)
    assert measures.keys() == MEASURES
    assert measures["qk2_ov1_diagonal_margin"] > 50
    assert all(measures[name] >= 0.98 for name in MEASURES - {"qk2_ov1_diagonal_margin"})


# The stage


def write_run(root: Path, config: Config, steps: list[int]) -> Path:
    """Checkpoints of an untrained model, an accuracy.csv that belongs to them, and a parameter file."""
    (root / "checkpoints").mkdir(parents=True)
    (root / "plots").mkdir()
    for seed, step in enumerate(steps):
        save(root / "checkpoints" / checkpoint_name(step), initialise(config, seed), config)
    pd.DataFrame({"step": steps, "0var_train": 0.1, "0var_add_restricted": 0.0}).to_csv(
        root / "plots/accuracy.csv", index=False
    )
    lines = [f"  {name}: {value}" for name, value in SIZES.items()]
    (root / "params.yaml").write_text("\n".join(["progress:", *lines]) + "\n")
    return root


def run(root: Path) -> None:
    progress.main(checkpoints=root / "checkpoints", out=root, params_file=root / "params.yaml")


SMALLEST = Config(
    Task(N=2, variables=2, context=8, left_only=0, right_only=0), ModelConfig(d_model=4, d_head=2, n_heads=3, d_mlp=1)
)
UNEVEN = Config(
    Task(N=12, variables=26, context=31, left_only=3, right_only=0),
    ModelConfig(d_model=8, d_head=4, n_heads=4, d_mlp=8),
)


@pytest.mark.parametrize("config", [SMALLEST, UNEVEN], ids=["smallest", "uneven"])
def test_an_untrained_model_of_any_size_gives_finite_measures_and_null_phases(tmp_path: Path, config: Config):
    root = write_run(tmp_path, config, [0, 100, 150])
    run(root)
    metrics = json.loads((root / "metrics/progress.json").read_text())
    assert metrics.keys() == {*MOMENTS, *MEASURES}
    assert [metrics[name] for name in MOMENTS] == [None] * 6
    table = pd.read_csv(root / "plots/progress.csv")
    assert table.step.tolist() == [0, 100, 150]
    assert set(table) == {"step", *MEASURES}
    assert np.isfinite(table.to_numpy()).all()
    for name in MEASURES:
        assert metrics[name] == pytest.approx(table[name].iloc[-1], rel=1e-5)
        assert name == "qk2_ov1_diagonal_margin" or table[name].between(0, 1).all()
    assert [stem for stem, _ in drawn(root)] == ["accuracy_phases", "progress"]


def test_each_checkpoint_is_measured_on_sequences_of_its_own_task(tmp_path: Path, tiny_config: Config):
    """Also where a folder holds checkpoints of several tasks."""
    root = write_run(tmp_path, tiny_config, [0, 1])
    save(root / "checkpoints" / checkpoint_name(1), initialise(SMALLEST, 0), SMALLEST)
    run(root)
    p = ProgressParams(**SIZES)
    table = pd.read_csv(root / "plots/progress.csv", index_col="step")
    for step, config in ((0, tiny_config), (1, SMALLEST)):
        alone = progress.measure(initialise(config, 0), config.task, progress.draw_batches(config.task, p))
        assert table.loc[step].to_dict() == pytest.approx(alone, rel=1e-5)


def test_accuracies_that_are_missing_or_of_other_steps_are_refused(tmp_path: Path, tiny_config: Config):
    root = write_run(tmp_path, tiny_config, [0, 100])
    accuracy = root / "plots/accuracy.csv"
    accuracy.write_text("step,0var_train\n0,0.1\n")
    with pytest.raises(InputError, match=r"accuracy\.csv is not of the same steps as the checkpoints"):
        run(root)
    accuracy.write_text("")
    with pytest.raises(InputError, match=r"accuracy\.csv cannot be read"):
        run(root)
    accuracy.unlink()
    with pytest.raises(InputError, match="dvc repro evaluate"):
        run(root)
    assert not (root / "metrics").exists()


# Figures


def drawn(root: Path) -> list:
    return list(draw.figures(root))


def labels(figure) -> dict[str, tuple[float, float]]:
    """The labels of phases and spike, with the step and the height in points that they stand at."""
    return {text.get_text(): (text.xy[0], text.xyann[1]) for text in figure.axes[0].texts}


def test_the_figures_name_every_moment_that_was_reached_and_no_two_labels_touch():
    table = pd.DataFrame({"step": np.arange(0, 10001, 500), "1var_train": 0.5, "2var_train": 0.5, "0var_train": 1.0})
    moments = {"addition": 500, "assignment": 4000, "refinement": 9500, "spike_before": 3500, "spike": 4000}
    figure = draw.accuracy(table, moments)
    found = labels(figure)
    assert {name: step for name, (step, _) in found.items()} == {
        "addition 500": 500,
        "assignment 4,000": 4000,
        "spike 4,000": 4000,
        "refinement 9,500": 9500,
    }
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in figure.axes[0].texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
    for axis in figure.axes:
        marked = sorted(line.get_xdata()[0] for line in axis.lines if line.get_color() == "0.45")
        assert marked == [500, 4000, 9500]


def test_the_progress_figure_draws_every_measure_and_works_without_any_moment():
    table = pd.DataFrame({"step": [0, 100, 200], **{name: np.linspace(0, 1, 3) for name in MEASURES}})
    figure = draw.progress(table, dict.fromkeys(MOMENTS))
    curves = [line for axis in figure.axes for line in axis.lines if len(line.get_xdata()) == 3]
    assert len(curves) == len(MEASURES)
    assert labels(figure) == {}
