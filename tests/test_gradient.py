"""The gradient on layer 2's query-key matrix: closed form against automatic differentiation, and the real thing."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages import generate, gradient
from stages.core import weights as files
from stages.core.circuit_form import Circuits, forward
from stages.core.layouts import value_positions
from stages.core.params import InputError
from stages.core.task import FORMS, Operands, Task, read_table, trained_pairs
from stages.core.text import to_tokens
from stages.core.weights import Config, ModelConfig, initialise
from stages.draw import gradient as draw
from stages.draw import style
from stages.parts.assumptions import assumptions, use_of_positions, variable_images
from stages.parts.idealised import ideal_circuits, product_adder, routed, use_under_product_adder

SECTIONS = """
task: {N: 7, variables: 4, context: 10, left_only: 1, right_only: 1}
generate: {f: 0.7, eval_size: 5, exact_limit: 100, seed: 0}
model: {d_model: 16, d_head: 8, n_heads: 2, d_mlp: 32}
gradient: {sequences: 64, adder_scale: 40, seed: 0}
"""


def all_pairs(N: int) -> np.ndarray:
    return np.stack(np.divmod(np.arange(N * N), N), axis=1)


def draw_batches(task: Task, size: int, seed: int = 0) -> dict[str, gradient.Batch]:
    rng = np.random.default_rng(seed)
    return {form: gradient.training_batch(task, all_pairs(task.N), form, size, rng) for form in FORMS[1:]}


def random_circuits(config: Config, seed: int = 0) -> Circuits:
    """A model with random weights, large enough that attention is not uniform and neurons fire."""
    return Circuits.of({name: 3 * w.double() for name, w in initialise(config, seed).items()})


@settings(deadline=None, max_examples=25)
@given(
    N=st.integers(2, 60),
    variables=st.integers(2, 13),
    context=st.integers(8, 24),
    adder_scale=st.floats(0.01, 300),
    kappa=st.floats(0.05, 1),
    seed=st.integers(0, 100),
)
def test_autograd_and_the_closed_form_agree_on_the_idealised_model(
    N: int, variables: int, context: int, adder_scale: float, kappa: float, seed: int
) -> None:
    task = Task(N=N, variables=variables, context=context, left_only=0, right_only=0)
    blocks, error = gradient.ideal_blocks(task, draw_batches(task, 32, seed), kappa, adder_scale)
    assert blocks["both"].shape == (2, variables, variables)
    assert error < 1e-6


def test_the_product_adder_is_the_double_sum() -> None:
    N, h = 6, torch.rand(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(3, N, dtype=torch.float64)
    for n, m in itertools.product(range(N), repeat=2):
        expected[:, (n + m) % N] += 5 * h[:, n] * h[:, m]
    torch.testing.assert_close(product_adder(h, 5), expected)


def test_the_idealised_model_reads_the_share_of_each_number(task: Task) -> None:
    text = "c=17, b=42, b+17"
    tokens = torch.from_numpy(to_tokens(task, text).astype(np.int64)).unsqueeze(0)
    h = forward(ideal_circuits(task), tokens).logits
    assert h[0, 17] == pytest.approx(2 / 16)
    assert h[0, 42] == pytest.approx(1 / 16)
    assert h.sum().item() == pytest.approx(3 / 16)


@pytest.mark.parametrize("text", ["a=0, b=0, c=0, a+c", "b=0, a=0, c=0, d=0, 0+b"])
def test_for_a_small_adder_only_the_values_are_of_use_on_average_over_all_numbers(text: str) -> None:
    """Step 5, exactly: all numbers of one layout are enumerated, the adder's scale is small."""
    N, scale = 5, 1e-7
    task = Task(N=N, variables=4, context=12, left_only=0, right_only=0)
    layout = to_tokens(task, text).astype(np.int64)
    numbers = np.flatnonzero(layout < N)
    tokens = np.repeat(layout[None], N ** len(numbers), axis=0)
    tokens[:, numbers] = list(itertools.product(range(N), repeat=len(numbers)))
    places = value_positions(task, tokens)
    answers = np.take_along_axis(tokens, places, axis=1).sum(1) % N

    use = use_under_product_adder(task, torch.from_numpy(tokens), torch.from_numpy(answers), scale).mean(0) / scale
    expected = torch.zeros(task.context, dtype=torch.float64)
    expected[places[0]] = 2 / task.context * (1 - 1 / N)
    torch.testing.assert_close(use, expected, atol=1e-6, rtol=0)


def test_on_the_idealised_model_the_prediction_holds(task: Task) -> None:
    blocks, _ = gradient.ideal_blocks(task, draw_batches(task, 4096), 128**-0.5, 40)
    for two in blocks.values():
        block = two.mean(0)
        measures = gradient.block_measures(two, block)
        assert measures["diagonal_share"] == 1
        assert measures["cosine_identity"] > 0.95
    one_variable = blocks["1var"].mean(0)
    assert (one_variable[~torch.eye(task.variables, dtype=torch.bool)] < 0).all()


def resid_post1(circuits: Circuits, tokens: Tensor) -> Tensor:
    """The residual stream after layer 1, written out: [B, T, d]."""
    V = len(circuits.X) - tokens.shape[1]
    x = circuits.X[tokens] + circuits.X[V:]
    for pattern1, XOV in zip(forward(circuits, tokens).pattern1, circuits.XOV1, strict=True):
        x = x + pattern1 @ (XOV[tokens] + XOV[V:])
    return x


def test_step_2_gives_the_gradient_of_any_model_with_several_heads(tiny_config: Config) -> None:
    circuits, kappa = random_circuits(tiny_config), 8**-0.5
    for batch in draw_batches(tiny_config.task, 40).values():
        x, use = resid_post1(circuits, batch[0]), use_of_positions(circuits, *batch)
        expected = kappa / use.numel() * torch.einsum("bj,bd,bje->de", use, x[:, -1], x)
        torch.testing.assert_close(gradient.negative_gradient(circuits, batch, kappa), expected)


def test_the_gradient_is_that_of_the_unscaled_product_of_weights(tiny_config: Config) -> None:
    """With W_K the identity and W_Q zero, the gradient on W_Q is the one on W_Q W_Kᵀ."""
    config = Config(tiny_config.task, ModelConfig(d_model=8, d_head=8, n_heads=2, d_mlp=32))
    weights = {name: w.double() for name, w in initialise(config, 0).items()}
    weights["blocks.1.attn.W_K"] = torch.eye(8, dtype=torch.float64).repeat(2, 1, 1)
    weights["blocks.1.attn.W_Q"] = torch.zeros(2, 8, 8, dtype=torch.float64, requires_grad=True)
    tokens, answers = batch = draw_batches(config.task, 30)["2var"]
    logits = forward(Circuits.of(weights), tokens).logits
    torch.nn.functional.cross_entropy(logits, answers).backward()
    found = gradient.negative_gradient(Circuits.of(weights), batch, 8**-0.5)
    torch.testing.assert_close(found, -weights["blocks.1.attn.W_Q"].grad.sum(0))


def test_routing_by_hand_looks_at_the_operands_and_one_position_back(tiny_config: Config) -> None:
    task = tiny_config.task
    tokens = draw_batches(task, 50)["2var"][0]
    circuits = routed(random_circuits(tiny_config), task)
    pattern1 = forward(circuits, tokens).pattern1
    expected = torch.zeros(task.context, dtype=torch.float64)
    expected[[-3, -2]] = 0.5
    torch.testing.assert_close(pattern1[:, :, -1], expected.expand(2, 50, -1), atol=0, rtol=0)
    for q in range(1, task.prefix):
        assert (pattern1[:, :, q, q - 1] == 1).all()
    met = assumptions(circuits, task, tokens, torch.zeros(tokens.shape, dtype=torch.float64))
    assert (met["attn1_equals_to_operands"], met["attn1_num_to_prev"]) == (1, 1)
    assert (met["attn1_left_variable"], met["attn1_right_variable"]) == (0.5, 0.5)


def test_the_idealised_model_meets_the_assumptions_and_an_untrained_one_does_not(tiny_config: Config) -> None:
    task = tiny_config.task
    batch = draw_batches(task, 200)["2var"]
    use = use_under_product_adder(task, *batch, 1.0)
    ideal = assumptions(ideal_circuits(task), task, batch[0], use)
    assert (ideal["variables_cosine_max"], ideal["attn1_equals_to_operands"]) == (0, 1)
    assert ideal["use_of_values"] > ideal["use_of_distractors"]
    untrained = assumptions(random_circuits(tiny_config), task, batch[0], use)
    assert untrained["variables_cosine_max"] > 0.1
    assert untrained["attn1_equals_to_operands"] < 0.9
    assert untrained["adder_accuracy"] < 0.5


def test_use_is_averaged_over_the_prefixs_values_and_over_its_other_numbers() -> None:
    task = Task(N=7, variables=4, context=10, left_only=0, right_only=0)
    two_values = to_tokens(task, "b=3, a=5, c=1, a+c")  # the numbers stand at 1, 3 and 5
    one_value = to_tokens(task, "d=2, c=6, b=0, 4+d")  # and 4 in the core is no number of the prefix
    tokens = torch.from_numpy(np.stack([two_values, one_value]).astype(np.int64))
    use = torch.arange(20, dtype=torch.float64).reshape(2, 10) ** 2
    met = assumptions(ideal_circuits(task), task, tokens, use)
    assert met["use_of_values"] == pytest.approx((3**2 + 5**2 + 11**2) / 3)
    assert met["use_of_distractors"] == pytest.approx((1**2 + 13**2 + 15**2) / 3)


def test_adder_accuracy_counts_the_sums_that_layer_2_gets_right_without_a_residual() -> None:
    """A module whose output is always 0 is right for one pair in N."""
    task = Task(N=5, variables=2, context=8, left_only=0, right_only=0)
    circuits = ideal_circuits(task)
    d = circuits.X.shape[1]
    always_0 = torch.zeros(d, task.N, dtype=torch.float64)
    always_0[:, 0] = 1
    ones = torch.ones(d, 1, dtype=torch.float64)
    tokens = draw_batches(task, 4)["1var"][0]
    constant = replace(circuits, W_in=ones, W_out=ones.T, W_U=always_0)
    assert assumptions(constant, task, tokens, torch.zeros(tokens.shape))["adder_accuracy"] == pytest.approx(1 / 5)


def test_measures_of_known_blocks() -> None:
    eye, rows = torch.eye(4, dtype=torch.float64), torch.arange(4.0, dtype=torch.float64).unsqueeze(1)
    measures = gradient.block_measures(torch.stack([eye, eye]) + rows, eye)
    assert (measures["diagonal_share"], measures["diagonal_margin"]) == (1, 1)
    assert measures["cosine_identity"] == pytest.approx(1)
    assert measures["cosine_halves"] == pytest.approx(1)
    opposite = gradient.block_measures(torch.stack([-eye, -eye]), eye)
    assert (opposite["diagonal_share"], opposite["diagonal_margin"]) == (0, -1)
    assert (opposite["cosine_identity"], opposite["cosine_final"]) == (pytest.approx(-1), pytest.approx(-1))
    shifted = gradient.block_measures(torch.stack([eye.roll(1, 0), eye.roll(1, 0)]), eye)
    assert shifted["diagonal_share"] == 0
    assert shifted["cosine_identity"] == pytest.approx(-1 / 3)
    assert shifted["cosine_final"] == 0
    assert np.isnan(gradient.cosine(eye, torch.zeros_like(eye)))


def test_the_batch_holds_nothing_but_trained_pairs_and_couples(task: Task) -> None:
    trained = trained_pairs(task.N, 0.7, 42).reshape(task.N, task.N)
    for form in FORMS[1:]:
        rng = np.random.default_rng(0)
        tokens, answers = gradient.training_batch(task, np.argwhere(trained), form, 3000, rng)
        values = np.take_along_axis(tokens.numpy(), value_positions(task, tokens.numpy()), axis=1)
        assert trained[values[:, 0], values[:, 1]].all()
        assert (values.sum(1) % task.N == answers.numpy()).all()
        operands = tokens[:, -3:-1] - task.first_variable
        seen = {tuple(max(-1, v) for v in couple) for couple in operands.tolist()}
        couples = Operands.of(task).trained
        assert seen == {
            (left, right)
            for f, left, right in zip(couples.form, couples.left, couples.right, strict=True)
            if FORMS[f] == form
        }


@pytest.mark.parametrize(("form", "share"), [("1var", 1 / 6), ("2var", 2 / 6)])
def test_the_batch_has_as_many_assignments_as_training_has(task: Task, form: str, share: float) -> None:
    """With M = 6, max(2, uniform on 1..6) is 2 for one sequence in three, where evaluation has one in five."""
    tokens, _ = gradient.training_batch(task, all_pairs(task.N), form, 6000, np.random.default_rng(0))
    assigned = (tokens[:, : task.prefix] >= task.first_variable).sum(1)
    assert (assigned == FORMS.index(form)).double().mean().item() == pytest.approx(share, abs=0.025)


@pytest.mark.parametrize(("step", "own"), [(1001, -1), (3001, -1), (5401, 1)])
def test_published_weights_align_late_but_early_where_the_assumptions_are_put_in(
    step: int, own: int, reference: Path, config: Config
) -> None:
    """The block is against the identity before layer 1 routes; with routing and V orthonormal it is with it."""
    found = torch.load(reference / f"checkpoint_step_{step}.pth", weights_only=True)
    weights = {name: found[name] for name in config.shapes()}
    batches = draw_batches(config.task, 1024)
    blocks = {
        (marks["layer1"], marks["V"], marks["form"]): gradient.block_measures(two, two.mean(0))
        for marks, two, _ in gradient.checkpoint_blocks(weights, config.task, batches, 128**-0.5)
    }
    assert own * blocks["own", "own", "both"]["cosine_identity"] > 0.05
    helped = blocks["routed", "orthonormal", "both"]
    assert helped["cosine_identity"] > 0.9
    assert helped["diagonal_share"] == 1


@pytest.fixture
def run(tmp_path: Path, tiny_config: Config) -> Path:
    """The folder of a tiny untrained run: parameters, data, two checkpoints and no phase reached."""
    (tmp_path / "params.yaml").write_text(SECTIONS)
    (tmp_path / "checkpoints").mkdir()
    for step in (0, 100):
        path = tmp_path / "checkpoints" / files.checkpoint_name(step)
        files.save(path, initialise(tiny_config, seed=step), tiny_config)
    generate.main(tmp_path / "data", tmp_path / "params.yaml")
    write_moments(tmp_path)
    return tmp_path


def write_moments(root: Path, **reached: int) -> None:
    moments = dict.fromkeys(("addition", "assignment", "refinement", "spike_before", "spike"))
    (root / "metrics").mkdir(exist_ok=True)
    (root / "metrics/progress.json").write_text(json.dumps(moments | reached))


def run_stage(root: Path) -> dict[str, float | None]:
    gradient.main(root / "checkpoints", root / "data", root, root / "params.yaml")
    return json.loads((root / "metrics/gradient.json").read_text())


def test_a_run_that_reached_no_phase_gives_nulls_there_and_everything_else(run: Path, tiny_config: Config) -> None:
    metrics = run_stage(run)
    assert {name for name, value in metrics.items() if value is None} == {
        name for name in metrics if "addition" in name or "spike" in name
    }
    assert metrics["ideal_error"] < 1e-6
    table = pd.read_csv(run / "plots/gradient.csv")
    assert table.columns[0] == "step"
    assert len(table) == 2 * 4 * 3 + 3  # checkpoints × (layer 1, V) × forms, and the idealised model
    blocks = read_table(run / "data/gradient/blocks.parquet", tiny_config.task)[0].to_pandas()
    assert len(blocks) == len(table) * 4 * 4
    [(stem, figure)] = draw.figures(run)
    style.save(figure, run / f"{stem}.png")


def test_every_moment_is_measured_on_its_own_checkpoint(run: Path, tiny_config: Config) -> None:
    """The weights of the last checkpoint are those of the spike, so that these two agree, and no two others."""
    moments = {"initialisation": 0, "addition": 50, "spike_before": 60, "spike": 70, "final": 100}
    for step in (50, 60, 70):
        path = run / "checkpoints" / files.checkpoint_name(step)
        files.save(path, initialise(tiny_config, seed=100 if step == 70 else step), tiny_config)
    write_moments(run, addition=50, spike_before=60, spike=70)
    metrics = run_stage(run)

    table = pd.read_csv(run / "plots/gradient.csv")
    blocks = read_table(run / "data/gradient/blocks.parquet", tiny_config.task)[0].to_pandas()
    for rows in (table, blocks):
        found = rows[rows.moment != "ideal"].groupby("moment").step.unique()
        assert {moment: steps.tolist() for moment, steps in found.items()} == {m: [s] for m, s in moments.items()}
    marks = ["layer1", "V", "form"]
    measures = {moment: rows.set_index(marks).iloc[:, 2:] for moment, rows in table.groupby("moment")}
    pd.testing.assert_frame_equal(measures["final"], measures["spike"])
    cosines = [metrics[f"cosine_identity_{moment}"] for moment in moments]
    assert len(set(cosines)) == 4 and cosines[3] == cosines[4]


def test_the_stage_draws_from_the_pairs_of_the_training_split(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    draw_batch = gradient.training_batch

    def spy(task: Task, pairs: np.ndarray, *rest: object) -> gradient.Batch:
        given.append({tuple(pair) for pair in pairs.tolist()})
        return draw_batch(task, pairs, *rest)

    monkeypatch.setattr(gradient, "training_batch", spy)
    run_stage(run)
    table = read_table(run / "data/pairs.parquet")[0].to_pandas()
    trained = {(n1, n2) for n1, n2, is_trained in zip(table.n1, table.n2, table.trained, strict=True) if is_trained}
    assert trained != {(n2, n1) for n1, n2 in trained}
    assert given == [trained, trained]


def test_metrics_are_taken_from_their_rows() -> None:
    moments = ("initialisation", "addition", "spike_before", "spike", "final", "ideal")
    keys = list(itertools.product(moments, ("own", "routed"), ("own", "orthonormal"), ("1var", "2var", "both")))
    table = pd.DataFrame(keys, columns=["moment", "layer1", "V", "form"])
    table["cosine_identity"] = np.arange(len(keys)) / 100
    table["diagonal_share"] = np.arange(len(keys)) / 100 + 50

    def at(*key: str) -> float:
        return keys.index((*key, "both")) / 100

    own, ideal = ("own", "own"), ("routed", "orthonormal")
    assert gradient.summary(table, 0.5) == {
        "cosine_identity_initialisation": at("initialisation", *own),
        "cosine_identity_addition": at("addition", *own),
        "cosine_identity_spike_before": at("spike_before", *own),
        "cosine_identity_spike": at("spike", *own),
        "cosine_identity_final": at("final", *own),
        "cosine_identity_addition_orthonormal": at("addition", "own", "orthonormal"),
        "cosine_identity_spike_before_orthonormal": at("spike_before", "own", "orthonormal"),
        "cosine_identity_addition_routed_orthonormal": at("addition", *ideal),
        "cosine_identity_spike_before_routed_orthonormal": at("spike_before", *ideal),
        "cosine_identity_ideal": at("ideal", *ideal),
        "ideal_error": 0.5,
        "diagonal_share_addition": at("addition", *own) + 50,
        "diagonal_share_spike_before": at("spike_before", *own) + 50,
        "diagonal_share_spike": at("spike", *own) + 50,
        "diagonal_share_final": at("final", *own) + 50,
    }


def test_the_figure_draws_each_block_with_its_own_cosine_and_largest_entry() -> None:
    rng, letters = np.random.default_rng(0), list("abc")
    moments = {"initialisation": 0, "addition": 10, "final": 30}
    drawn = [(*given, moment) for given in draw.GIVEN for moment in moments]
    values = {key: rng.normal(size=(3, 3)) / 10**i for i, key in enumerate([*drawn, draw.IDEAL, "learned"])}

    def rows(values: np.ndarray) -> pd.DataFrame:
        return pd.DataFrame({"query": np.repeat(letters, 3), "key": letters * 3, "value": values.ravel()})

    marks = ["layer1", "V", "moment"]
    blocks = pd.concat(
        [
            rows(sign * block).assign(form=form, step=moments.get(key[2]), **dict(zip(marks, key, strict=True)))
            for key, block in values.items()
            if key != "learned"
            for form, sign in (("1var", 5), ("both", 1))
        ]
    )
    measures = pd.DataFrame([(*key, "both") for key in drawn], columns=[*marks, "form"])
    measures["cosine_identity"] = np.arange(len(drawn)) / 100
    measures = pd.concat([measures.assign(form="1var", cosine_identity=-1.0), measures])

    axes = np.reshape(draw.blocks_beside_identity(blocks, rows(values["learned"]), measures).axes, (4, 4))
    for i, key in enumerate(drawn):
        ax = axes[divmod(i, 3)]
        np.testing.assert_allclose(ax.images[0].get_array(), values[key])
        largest = np.abs(values[key]).max()
        assert ax.images[0].get_clim() == (-largest, largest)
        digit, power = f"{largest:.0e}".split("e")
        power = str(int(power)).replace("-", "\N{MINUS SIGN}")
        assert ax.get_xlabel() == f"cosine {i / 100:.2f}\nlargest ${digit}\\cdot10^{{{power}}}$"
    assert [ax.get_title().split("\n")[1] for ax in axes[0, :3]] == ["step 0", "step 10", "step 30"]
    assert [ax.get_ylabel() for ax in axes[:, 0]] == list(draw.GIVEN.values())
    np.testing.assert_allclose(axes[0, 3].images[0].get_array(), values["learned"])
    np.testing.assert_allclose(axes[3, 3].images[0].get_array(), values[draw.IDEAL])


def test_the_final_block_is_that_of_the_last_checkpoint_unscaled(run: Path, tiny_config: Config) -> None:
    run_stage(run)
    w, _ = files.load(run / "checkpoints" / files.checkpoint_name(100))
    variables = w["embed.W_E"][tiny_config.task.first_variable :]
    V = sum(variables @ w["blocks.0.attn.W_V"][h] @ w["blocks.0.attn.W_O"][h] for h in (0, 1))
    QK2 = sum(w["blocks.1.attn.W_Q"][h] @ w["blocks.1.attn.W_K"][h].T for h in (0, 1))
    identity = read_table(run / "data/gradient/identity.parquet", tiny_config.task)[0].to_pandas()
    np.testing.assert_allclose(identity["value"].to_numpy().reshape(4, 4), V @ QK2 @ V.T, rtol=1e-4)
    assert identity["query"].tolist()[:5] == ["a", "a", "a", "a", "b"]
    assert identity["key"].tolist()[:5] == ["a", "b", "c", "d", "a"]


def test_running_it_twice_gives_the_same_bytes(run: Path) -> None:
    results = []
    for _ in range(2):
        run_stage(run)
        results.append([(run / name).read_bytes() for name in ("plots/gradient.csv", "metrics/gradient.json")])
    assert results[0] == results[1]


def test_a_phase_whose_checkpoint_is_not_there_is_named(run: Path) -> None:
    write_moments(run, addition=50)
    with pytest.raises(InputError, match="no checkpoint of step 50"):
        run_stage(run)


def test_images_of_variables_are_summed_over_heads(tiny_config: Config) -> None:
    circuits, first = random_circuits(tiny_config), tiny_config.task.first_variable
    V = variable_images(circuits, tiny_config.task)
    torch.testing.assert_close(V[1], circuits.XOV1[0, first + 1] + circuits.XOV1[1, first + 1])
