"""Fourier fits of functions of pairs, the waves of a model, and its losses with and without the key frequencies."""

import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import fourier, generate
from stages.core import layouts, weights
from stages.core.circuit_form import Circuits, forward
from stages.core.params import InputError
from stages.core.task import Operands, Task, read_table, trained_pairs
from stages.core.weights import Config, ModelConfig
from stages.draw import fourier as draw
from stages.draw import style
from stages.parts import fourier_basis, logit_waves
from stages.parts.fourier_basis import BY_DIFFERENCE, BY_SUM, PairWaves

SIZES = (2, 3, 5, 12, 59)  # prime, composite, even, and small enough for K = 1


@st.composite
def waves_of_pairs(drawn: st.DrawFn) -> dict:
    """N, k, and a wave of either operand; at k = N/2 only the phases that exist there."""
    N = drawn(st.integers(5, 200))
    k = drawn(st.integers(1, N // 2))
    phase = st.sampled_from([0, np.pi]) if 2 * k == N else st.floats(-3.14, 3.14)
    amplitude = st.floats(0.1, 10)
    wave = {"A": drawn(amplitude), "B": drawn(amplitude), "alpha": drawn(phase), "beta": drawn(phase)}
    return {"N": N, "k": k, "mean": drawn(st.floats(-5, 5)), **wave}


def function_of_pairs(N: int, k: int, mean: float, A: float, B: float, alpha: float, beta: float) -> np.ndarray:
    """[N, N, 1]."""
    angle = 2 * np.pi * k * np.arange(N) / N
    return (mean + A * np.cos(angle + alpha)[:, None] + B * np.cos(angle + beta))[..., None]


def turn(angle: float) -> float:
    """An angle between -π and π."""
    return np.angle(np.exp(1j * angle))


@given(st.integers(2, 200))
def test_the_basis_is_orthonormal_for_every_N(N: int) -> None:
    B = fourier_basis.basis(N)
    np.testing.assert_allclose(B.T @ B, np.eye(N), atol=1e-12)
    assert np.bincount(fourier_basis.frequencies(N)).tolist() == [1] + [2] * ((N - 1) // 2) + [1] * (N % 2 == 0)


@settings(deadline=None)
@given(waves_of_pairs())
def test_the_fit_returns_a_known_frequency_with_its_amplitudes_and_phases(known: dict) -> None:
    values = function_of_pairs(**known)
    fit, k = PairWaves.of(values), known["k"]
    assert fit.best_k == [k]
    row = fit.table().iloc[k - 1]
    assert row["index"] == 0 and row.k == k
    assert row.explained_variance == pytest.approx(1, abs=1e-9)
    assert row.amplitude_n1 == pytest.approx(known["A"], abs=1e-6)
    assert row.amplitude_n2 == pytest.approx(known["B"], abs=1e-6)
    assert turn(row.phase_n1 - known["alpha"]) == pytest.approx(0, abs=1e-6)
    assert turn(row.phase_n2 - known["beta"]) == pytest.approx(0, abs=1e-6)
    assert np.delete(fit.explained_variance, k - 1).sum() < 1e-12
    np.testing.assert_allclose(fourier_basis.fitted(values, np.array([k])), values, atol=1e-9)


@pytest.mark.parametrize("N", SIZES)
def test_the_fit_is_the_least_squares_fit(N: int) -> None:
    values = np.random.default_rng(N).normal(size=(N, N, 3))
    found = PairWaves.of(values).explained_variance
    n, m = (side.ravel() for side in np.indices((N, N)))
    for k in range(1, N // 2 + 1):
        columns = [wave(2 * np.pi * k * side / N) for wave in (np.cos, np.sin) for side in (n, m)]
        X, y = np.stack([np.ones(N * N), *columns], 1), values.reshape(N * N, 3)
        fitted = X @ np.linalg.lstsq(X, y, rcond=1e-9)[0]
        explained = ((fitted - y.mean(0)) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)
        np.testing.assert_allclose(found[k - 1], explained, atol=1e-9)
        np.testing.assert_allclose(fourier_basis.fitted(values, np.full(3, k)).reshape(N * N, 3), fitted, atol=1e-9)


@pytest.mark.parametrize("N", [5, 12, 59])
def test_a_neuron_of_pure_noise_has_an_explained_variance_near_4_over_N_squared(N: int) -> None:
    explained = PairWaves.of(np.random.default_rng(0).normal(size=(N, N, 2000))).explained_variance.mean(1)
    waves = np.where(2 * np.arange(1, N // 2 + 1) == N, 2, 4)  # of the N² - 1 directions that a centred function has
    np.testing.assert_allclose(explained, waves / (N**2 - 1), rtol=0.1)


def test_what_does_not_vary_has_no_frequency() -> None:
    fit = PairWaves.of(np.stack([np.full((6, 6), 3.0), np.eye(6)], axis=2))
    assert fit.best_k[0] == 0
    assert np.isnan(fit.share[..., 0]).all()
    assert not np.isnan(fit.share[..., 1]).any()


@pytest.mark.parametrize("N", SIZES)
def test_the_four_waves_at_k_span_the_products_of_both_operands_waves_at_k(N: int) -> None:
    values = np.random.default_rng(N).normal(size=(N, N, 4))
    share, basis = PairWaves.of(values).share, fourier_basis.basis(N)
    spectrum = np.einsum("na,nmj,mb->abj", basis, values, basis) ** 2
    spectrum[0, 0] = 0
    for k in range(1, N // 2 + 1):
        at = np.flatnonzero(np.isin(fourier_basis.frequencies(N), [0, k]))
        products = spectrum[np.ix_(at, at)].sum((0, 1)) / spectrum.sum((0, 1))
        np.testing.assert_allclose(share[:, k - 1].sum(0), products, atol=1e-12)


@pytest.mark.parametrize("N", SIZES)
def test_a_function_of_the_sum_or_difference_is_known_as_one(N: int) -> None:
    rng, (n, m) = np.random.default_rng(N), np.indices((N, N))
    g = rng.normal(size=(N, 1))
    np.testing.assert_allclose(fourier_basis.mean_by_sum(g[(n + m) % N]), g, atol=1e-12)
    np.testing.assert_allclose(fourier_basis.mean_by_sum(g[(n - m) % N], -1), g, atol=1e-12)
    np.testing.assert_allclose(PairWaves.of(g[(n + m) % N]).share[BY_SUM].sum(), 1)
    below_half = PairWaves.of(g[(n - m) % N]).share[BY_DIFFERENCE]
    at_half = PairWaves.of(g[(n - m) % N]).share[BY_SUM, -1] if N % 2 == 0 else 0  # there, sum and difference are one
    np.testing.assert_allclose(below_half.sum() + at_half, 1)
    np.testing.assert_allclose(fourier_basis.keep(g, np.arange(1, N // 2 + 1)), g - g.mean(), atol=1e-12)


def test_numbers_on_a_circle_are_found_on_it_in_their_order() -> None:
    N, k, rng = 15, 4, np.random.default_rng(0)
    directions = np.linalg.qr(rng.normal(size=(8, 3)))[0].T
    angle = 2 * np.pi * np.outer(np.arange(N), [k, 2]) / N
    W_E = 2 * (np.cos(angle[:, :1]) * directions[0] + np.sin(angle[:, :1]) * directions[1])
    W_E += np.cos(angle[:, 1:]) * directions[2] + rng.normal(size=8)  # another frequency, and a mean
    points = fourier_basis.plane_table(W_E, np.array([k]))
    assert points.n.tolist() == list(range(N)) and set(points.k) == {k}
    np.testing.assert_allclose(
        points[["x", "y"]], 2 * np.stack([np.cos(angle[:, 0]), np.sin(angle[:, 0])], 1), atol=1e-9
    )


def test_the_plane_of_half_of_N_is_a_line() -> None:
    points = fourier_basis.plane(np.outer((-1.0) ** np.arange(6), [3, 4]), 3)
    np.testing.assert_allclose(points, np.outer([5, -5] * 3, [1, 0]), atol=1e-12)


def test_a_circle_is_less_exact_with_unequal_waves_and_other_frequencies() -> None:
    N, k, a, b, c = 15, 4, 2.0, 1.5, 0.5
    directions = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 2)))[0].T
    angle = 2 * np.pi * np.outer(np.arange(N), [k, 2]) / N
    waves = np.stack([a * np.cos(angle[:, 0]) + c * np.cos(angle[:, 1]), b * np.sin(angle[:, 0])], 1)
    table = fourier_basis.circle_table(waves @ directions + 3, np.random.default_rng(1))
    assert len(table) == 7
    assert table.circle_r2[k - 1] == pytest.approx((a + b) ** 2 / (2 * (a**2 + b**2 + c**2)))
    expected = np.zeros(7)
    expected[[1, k - 1]] = np.array([c**2, a**2 + b**2]) / (a**2 + b**2 + c**2)
    np.testing.assert_allclose(table.circle_share, expected, atol=1e-12)
    other = fourier_basis.circle_r2(np.random.default_rng(1).normal(size=(N, 8)))
    np.testing.assert_allclose(table.circle_r2_random, other)


def test_the_circle_of_half_of_N_is_two_points() -> None:
    angle = 2 * np.pi * np.arange(6) / 6
    both = np.outer((-1.0) ** np.arange(6) + 0.5 * np.cos(angle), [3, 4])
    assert fourier_basis.circle_r2(both)[2] == pytest.approx(1 / (1 + 0.5**2 / 2))
    assert np.isnan(fourier_basis.circle_r2(np.zeros((6, 2)))).all()


def test_random_vectors_in_many_dimensions_lie_near_circles() -> None:
    found = fourier_basis.circle_r2(np.random.default_rng(0).normal(size=(59, 128)))
    assert found.mean() == pytest.approx(128 / (128 + 59), abs=0.03)


def test_norms_along_the_basis_keep_the_sum_of_squares() -> None:
    W = np.random.default_rng(0).normal(size=(12, 5))
    table = fourier_basis.norm_table({"W": W})
    assert (table.W**2).sum() == pytest.approx((W**2).sum())
    assert table.W[0] == pytest.approx(np.linalg.norm(W.mean(0)) * 12**0.5)
    assert table.wave.tolist()[:3] == ["constant", "cos", "sin"] and table.wave.tolist()[-1] == "cos"


def test_shuffled_phases_agree_as_they_do_on_average_over_all_shuffles() -> None:
    rng = np.random.default_rng(0)
    k = pd.Series([1, 1, 1, 2, 2])
    phase, error = (pd.Series(rng.uniform(-3, 3, 5)) for _ in range(2))
    found, shuffled = fourier_basis.phase_agreement(k, phase, error)
    assert found == pytest.approx(np.cos(error).mean())
    expected, cosines = phase - error, []
    for first, second in itertools.product(itertools.permutations(range(3)), itertools.permutations(range(3, 5))):
        cosines.append(np.cos(phase[[*first, *second]].to_numpy() - expected).mean())
    assert shuffled == pytest.approx(np.mean(cosines))


def ideal_logits(N: int, frequencies: list[int], scale: float) -> np.ndarray:
    """Σ_k scale · cos(2πk(n + m - c)/N), largest for the right answer: [N, N, N]."""
    n, m, c = np.indices((N, N, N))
    return scale * sum(np.cos(2 * np.pi * k * ((n + m - c) % N) / N) for k in frequencies)


@pytest.mark.parametrize(("N", "key"), [(59, [3, 20]), (12, [1, 6]), (5, [2])])
def test_losses_of_logits_made_of_key_frequencies(N: int, key: list[int]) -> None:
    logits = ideal_logits(N, key, 5)
    trained = np.random.default_rng(0).random((N, N)) < 0.7
    found = logit_waves.losses(logits, trained, np.array(key))
    right = logits[0, 0] - logits[0, 0].max()
    assert found["restricted_loss"] == pytest.approx(np.log(np.exp(right).sum()), rel=1e-9)  # c = 0 is right
    assert found["restricted_loss"] == pytest.approx(found["held_out_loss"], rel=1e-9)
    for name in ("excluded_loss", "non_key_loss"):
        assert found[name] == pytest.approx(np.log(N), rel=1e-9)
    assert found["trained_loss"] == pytest.approx(found["held_out_loss"], rel=1e-9)


@pytest.mark.parametrize(("N", "key"), [(7, [1, 3]), (12, [2, 6])])
def test_losses_equal_those_of_logits_projected_wave_by_wave(N: int, key: list[int]) -> None:
    rng, (n, m) = np.random.default_rng(N), np.indices((N, N))
    logits, trained = rng.normal(size=(N, N, N)), rng.random((N, N)) < 0.6
    kept, other = np.zeros_like(logits), np.zeros_like(logits)
    for k, wave in itertools.product(range(1, N // 2 + 1), (np.cos, np.sin)):
        w = wave(2 * np.pi * k * (n + m) / N)
        if (w**2).sum() > 1e-9:  # no sine at N/2
            part = kept if k in key else other
            part += w[..., None] * np.einsum("nm,nmc->c", w, logits) / (w**2).sum()

    def loss(z: np.ndarray, pairs: np.ndarray) -> float:
        p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
        return -np.log(p[n, m, (n + m) % N])[pairs].mean()

    found = logit_waves.losses(logits, trained, np.array(key))
    assert found["restricted_loss"] == pytest.approx(loss(logits.mean((0, 1)) + kept, ~trained))
    assert found["non_key_loss"] == pytest.approx(loss(logits.mean((0, 1)) + other, ~trained))
    assert found["excluded_loss"] == pytest.approx(loss(logits - kept, trained))
    assert found["held_out_loss"] == pytest.approx(loss(logits, ~trained))
    assert found["trained_loss"] == pytest.approx(loss(logits, trained))


def test_shares_of_logits_ignore_what_changes_no_probability() -> None:
    logits = ideal_logits(12, [2, 5, 6], 1)
    shares = logit_waves.logit_shares(logits + np.random.default_rng(0).normal(size=(12, 12, 1)))
    np.testing.assert_allclose(shares, np.array([0, 1, 0, 0, 1, 2]) / 4, atol=1e-12)  # cos² has the mean 1/2, at N/2 1


@pytest.mark.parametrize("form", ["0var", "1var", "2var"])
def test_every_pair_stands_once_and_in_order_in_the_sequences_of_a_form(form: str, task: Task) -> None:
    rng = np.random.default_rng(0)
    tokens = fourier.core_only(task) if form == "0var" else fourier.with_variables(task, form, rng)
    tokens = tokens.numpy()
    assert tokens.shape == (59**2, 16)
    values = layouts.values(task, tokens)
    assert (values == np.stack(np.divmod(np.arange(59**2), 59), 1)).all()
    left, right = (np.maximum(tokens[:, side] - task.first_variable, -1) for side in (-3, -2))
    trained = Operands.of(task).trained
    trained = trained[trained.form == int(form[0])]
    couples = set(zip(trained.left.tolist(), trained.right.tolist(), strict=True))
    assert set(zip(left.tolist(), right.tolist(), strict=True)) == couples
    assert (tokens[:, :12] == task.padding).all() == (form == "0var")


def test_a_neuron_that_speaks_for_the_sum_has_no_phase_error() -> None:
    N, rng = 13, np.random.default_rng(0)
    k, alpha, beta = rng.integers(1, 7, 6), rng.uniform(-3, 3, 6), rng.uniform(-3, 3, 6)
    waves = zip(k, alpha, beta, strict=True)
    pre = np.concatenate([function_of_pairs(N, kj, 0.5, 1, 1, a, b) for kj, a, b in waves], axis=2)
    output = np.cos(2 * np.pi * k * np.arange(N)[:, None] / N + alpha + beta)
    pre[..., -1] -= 5  # never fires
    by_form = {"0var": pre, "1var": 2 * pre + 1, "2var": -pre}
    table = fourier.describe(by_form, {form: PairWaves.of(values) for form, values in by_form.items()}, output)
    assert table.live.tolist() == [True] * 5 + [False]
    for column in ("k", "k_1var", "k_2var", "output_k"):
        assert table[column].tolist() == k.tolist()
    np.testing.assert_allclose(table.phase_error, 0, atol=1e-9)
    np.testing.assert_allclose(table[["explained_variance", "output_share", "correlation_1var"]], 1, atol=1e-9)
    np.testing.assert_allclose(table.correlation_2var, -1, atol=1e-9)
    assert np.isnan(table.activation_share.iloc[-1])
    live = table[table.live]
    assert (live.activation_share < 1).all() and (live.activation_share > live.activation_sum_share + 0.5).all()
    assert (live.activation_sum_share > 0.03).all()


def test_a_neuron_that_speaks_at_another_frequency_than_it_reads_is_told_apart() -> None:
    N, (first, second) = 13, (2 * np.pi * k * np.arange(13)[:, None] / 13 for k in (2, 5))
    pre = function_of_pairs(N, 2, 0, 1, 1, 0.4, 0.7)
    table = fourier.describe(
        dict.fromkeys(("0var", "1var", "2var"), pre),
        dict.fromkeys(("0var", "1var", "2var"), PairWaves.of(pre)),
        0.5 * np.cos(first + 1.3) + np.cos(second),
    ).iloc[0]
    assert (table.k, table.output_k) == (2, 5)
    assert table.output_share == pytest.approx(0.25 / 1.25)
    assert table.output_phase == pytest.approx(1.3)
    assert table.phase_error == pytest.approx(1.3 - 1.1)


def example_neurons() -> pd.DataFrame:
    """Seven neurons, one of them silent; the shares of live ones with some property are all different."""
    table = pd.DataFrame({"neuron": range(7), "live": [True] * 6 + [False], "k": [1, 1, 2, 2, 2, 3, 3]})
    table["explained_variance"] = [0.9, 0.1, 0.6, 0.7, 0.86, 0.2, 0.99]
    table["k_1var"] = [1, 1, 2, 2, 2, 1, 3]
    table["k_2var"] = [1, 1, 2, 2, 3, 1, 3]
    table["output_k"] = [1, 2, 1, 1, 1, 1, 3]
    table["output_phase"] = [0.3, -2.5, 1.1, 3.0, -0.4, 2.2, 0]
    table["phase_error"] = [0.1, -1.4, 0.5, -0.2, 2.8, -2.0, 3.1]
    return table


def test_the_metrics_are_those_of_the_tables() -> None:
    neurons = example_neurons()
    frequencies = pd.DataFrame({"k": [1, 2, 3], "key": [True, False, True], "logit_share": [0.5, 0.004, 0.2]})
    frequencies["circle_share"] = [0.31, 0.12, 0.45]
    frequencies["circle_r2"] = [0.95, 0.2, 0.97]
    frequencies["circle_r2_random"] = [0.61, 0.1, 0.66]
    last = {"step": 10, "restricted_loss": 1.5, "non_key_loss": 2.5, "excluded_loss": 3.5, "held_out_loss": 4.5}
    found = fourier.summary(neurons, frequencies, pd.Series(last | {"trained_loss": 5.5}))
    live = neurons[:6]
    agreement = fourier_basis.phase_agreement(live.k, live.output_phase, live.phase_error)
    assert found == pytest.approx(
        {
            "live_neurons": 6,
            "key_frequency_count": 2,
            "key_logit_share": 0.7,
            "best_explained_variance": 0.9,
            "median_explained_variance": 0.65,
            "share_above_085": 2 / 6,
            "same_k_1var": 5 / 6,
            "same_k_2var": 4 / 6,
            "output_same_k": 1 / 6,
            "phase_cosine": agreement[0],
            "phase_cosine_shuffled": agreement[1],
            "circle_r2": 0.96,
            "circle_r2_random": 0.635,
            "embedding_energy_at_key": 0.76,
            "restricted_loss": 1.5,
            "non_key_loss": 2.5,
            "excluded_loss": 3.5,
            "held_out_loss": 4.5,
        }
    )


def test_neurons_are_the_same_however_many_are_held_at_once(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = Circuits.of(weights.initialise(tiny_config, 0))
    resid, _ = fourier.run_model(c, fourier.core_only(tiny_config.task))
    inputs = dict.fromkeys(("0var", "1var", "2var"), resid), c.W_in, (c.W_out @ c.W_U).T.double().numpy()
    whole = fourier.neuron_tables(*inputs)
    monkeypatch.setattr(fourier, "VALUES_AT_ONCE", 5 * 49)
    for table, expected in zip(fourier.neuron_tables(*inputs), whole, strict=True):
        pd.testing.assert_frame_equal(table, expected)
    assert whole[0].neuron.tolist() == list(range(32))
    assert (whole[0].k_1var == whole[0].k).all()


def test_the_published_weights_have_the_published_waves(reference: Path, config: Config) -> None:
    state = torch.load(reference / "checkpoint_step_39901.pth", weights_only=True)
    c = Circuits.of({name: state[name] for name in config.shapes()})
    resid, logits = fourier.run_model(c, fourier.core_only(config.task))
    output = (c.W_out @ c.W_U).T.double().numpy()
    neurons, fits = fourier.neuron_tables(dict.fromkeys(("0var", "1var", "2var"), resid), c.W_in, output)
    frequencies = fourier.frequency_table(logit_waves.logit_shares(logits), 0.01, neurons, fits)
    assert neurons.live.sum() == 478
    at_11 = frequencies.set_index("k").loc[11]
    assert at_11.best_neuron == 70
    assert round(at_11.explained_variance, 4) == 0.9619
    assert frequencies.k[frequencies.key].tolist() == [1, 2, 4, 5, 11, 15, 19, 20, 22, 27]
    assert frequencies.neurons.sum() == 478
    trained = trained_pairs(59, 0.7, 42).reshape(59, 59)
    found = logit_waves.losses(logits, trained, frequencies.k[frequencies.key].to_numpy())
    assert found["restricted_loss"] < 1e-9 < found["trained_loss"] < 1e-4 < found["held_out_loss"] < 0.1
    assert found["excluded_loss"] > np.log(59)


def prepare(root: Path, N: int, f: float = 0.7, model: ModelConfig | None = None) -> Path:
    """Pairs, untrained weights as model and two checkpoints, and parameters below `root`."""
    task = Task(N=N, variables=4, context=10, left_only=1, right_only=1)
    config = Config(task, model or ModelConfig(d_model=12, d_head=6, n_heads=2, d_mlp=10))
    (root / "models/checkpoints").mkdir(parents=True)
    trained = generate.trained_pairs(N, f, 0)
    generate.write_table(root / "data/pairs.parquet", [generate.pair_table(N, trained)], task)
    for step in (0, 10):
        name = weights.checkpoint_name(step)
        weights.save(root / "models/checkpoints" / name, weights.initialise(config, step), config)
    weights.save(root / "models/model.safetensors", weights.initialise(config, 10), config)
    (root / "params.yaml").write_text("fourier: {key_share: 0.01, seed: 0}\n")
    return root


def run_stage(root: Path) -> dict:
    """The stage on what `prepare` made; its metrics."""
    model, folder = root / "models/model.safetensors", root / "models/checkpoints"
    fourier.main(model, folder, root / "data", root, root / "params.yaml")
    return json.loads((root / "metrics/fourier.json").read_text())


def test_losses_are_over_the_pairs_of_the_table_at_every_step(tmp_path: Path) -> None:
    metrics = run_stage(prepare(tmp_path, 5, f=0.5))
    pairs = read_table(tmp_path / "data/pairs.parquet")[0].to_pandas()
    swapped = pairs.merge(pairs, left_on=["n1", "n2"], right_on=["n2", "n1"])
    assert (swapped.trained_x != swapped.trained_y).any()  # else pairs and swapped pairs could not be told apart
    curves = pd.read_csv(tmp_path / "plots/fourier.csv", index_col="step")
    for step in (0, 10):
        w, config = weights.load(tmp_path / "models/checkpoints" / weights.checkpoint_name(step))
        for name, rows in (("held_out_loss", pairs[~pairs.trained]), ("trained_loss", pairs[pairs.trained])):
            tokens = np.full((len(rows), 10), config.task.padding)
            tokens[:, -4:] = [config.task.plus, -1, -1, config.task.equals]
            tokens[:, -3:-1] = rows[["n1", "n2"]]
            logits = forward(Circuits.of(w), torch.from_numpy(tokens)).logits
            expected = torch.nn.functional.cross_entropy(logits, torch.tensor(rows.answer.to_numpy(), dtype=torch.long))
            assert curves[name][step] == pytest.approx(expected.item(), rel=1e-5)
    for name in ("restricted_loss", "non_key_loss", "excluded_loss", "held_out_loss"):
        assert metrics[name] == pytest.approx(curves[name][10], rel=1e-5)
        assert curves[name][10] != curves[name][0]


def test_the_frequencies_are_those_of_the_models_numbers_and_logits(tmp_path: Path) -> None:
    prepare(tmp_path, 8)
    w, config = weights.load(tmp_path / "models/model.safetensors")
    _, logits = fourier.run_model(Circuits.of(w), fourier.core_only(config.task))
    shares = logit_waves.logit_shares(logits)
    limit = sum(sorted(shares)[1:3]) / 2  # makes two of the four frequencies key
    (tmp_path / "params.yaml").write_text(f"fourier: {{key_share: {limit}, seed: 0}}\n")
    metrics = run_stage(tmp_path)
    frequencies = read_table(tmp_path / "data/fourier/frequencies.parquet")[0].to_pandas()
    np.testing.assert_allclose(frequencies.logit_share, shares)
    assert frequencies.key.tolist() == (shares >= limit).tolist()
    assert metrics["key_frequency_count"] == 2
    W_E = w["embed.W_E"][:8].double().numpy()
    np.testing.assert_allclose(frequencies.circle_r2, fourier_basis.circle_r2(W_E))
    planes = read_table(tmp_path / "data/fourier/planes.parquet")[0].to_pandas()
    assert set(planes.k) == set(frequencies.k[frequencies.key])
    for k, points in planes.groupby("k"):
        np.testing.assert_allclose(points[["x", "y"]], fourier_basis.plane(W_E, k))
    assert {"fourier_planes", "fourier_neurons"} <= set(draw_all(tmp_path))


def test_both_phases_of_a_neuron_are_drawn_within_a_turn_and_the_line_over_them() -> None:
    table = example_neurons()
    axis = draw.phases(table).axes[0]
    live = table[table.live].sort_values("explained_variance")
    (points,), (line,) = axis.collections, axis.lines
    x, y = points.get_offsets().T
    np.testing.assert_allclose(y, live.output_phase)
    assert (abs(x) <= np.pi).all()
    np.testing.assert_allclose(np.exp(1j * (y - x)), np.exp(1j * live.phase_error))
    assert (abs(y - x) > np.pi).any()  # an error across the turn
    np.testing.assert_allclose(points.get_array(), live.explained_variance)
    assert line.get_xdata().tolist() == line.get_ydata().tolist() == [-np.pi, np.pi]
    assert line.zorder > points.zorder


@pytest.mark.parametrize(("N", "k", "labels"), [(13, 5, 13), (26, 3, 13), (12, 4, 3), (12, 6, 2)])
def test_the_figure_of_planes_ties_every_number_to_its_place(N: int, k: int, labels: int) -> None:
    rng = np.random.default_rng(0)
    angle = 2 * np.pi * k * np.arange(N) / N
    exact = 0.8 * np.stack([np.cos(angle), np.sin(angle)], 1)
    shift = rng.normal(size=(N, 2))
    radial = (shift * exact).sum(1) @ np.ones(N) / (exact**2).sum()
    shift -= radial * exact  # leaves the circle that fits best where it was
    table = pd.DataFrame({"k": k, "n": np.arange(N)})
    table["x"], table["y"] = (exact + 0.1 * shift).T
    unasked = table.assign(k=k + 1, x=9, y=9)
    figure = draw.planes(pd.concat([unasked, table]), pd.DataFrame({"k": [k], "circle_r2": [0.987]}))
    axis = figure.axes[0]
    ties, dots = axis.collections
    n = dots.get_array().astype(int)
    assert sorted(n) == list(range(N))
    np.testing.assert_allclose(dots.get_offsets(), table[["x", "y"]].to_numpy()[n])
    np.testing.assert_allclose(ties.get_segments(), np.stack([table[["x", "y"]].to_numpy(), exact], 1)[n], atol=1e-12)
    assert len(axis.texts) == labels
    for text in axis.texts:
        np.testing.assert_allclose(text.get_position(), 1.4 * exact[int(text.get_text())], atol=1e-12)
    assert len({tuple(np.round(text.get_position(), 9)) for text in axis.texts}) == labels
    assert axis.get_title() == f"k = {k} (R² 0.987)"


def test_every_line_of_the_figure_of_losses_is_the_one_that_it_is_called() -> None:
    names = {
        "restricted, held-out pairs": "restricted_loss",
        "only waves of n + m that are not key, held-out pairs": "non_key_loss",
        "all of the logits, held-out pairs": "held_out_loss",
        "excluded, trained pairs": "excluded_loss",
        "all of the logits, trained pairs": "trained_loss",
    }
    table = pd.DataFrame(
        {"step": [0, 5, 10]} | {name: [i, i + 0.5, i + 0.7] for i, name in enumerate(names.values(), 1)}
    )
    lines = {line.get_label(): line for line in draw.losses(table).axes[0].lines}
    assert set(lines) == set(names)
    for label, line in lines.items():
        assert line.get_xdata().tolist() == [0, 5, 10]
        assert line.get_ydata().tolist() == table[names[label]].tolist()


def test_the_figure_of_a_neuron_shows_it_on_the_left_and_its_fit_on_the_right() -> None:
    maps = fourier_basis.map_table(np.random.default_rng(0).normal(size=(5, 5, 2)), np.array([1, 2]))
    row = pd.Series({"k": 2, "best_neuron": 7, "explained_variance": 0.5})
    wanted = maps[maps.k == 2]
    axes = draw.best_neuron(maps, row).axes
    for axis, column in zip(axes, ("value", "fit"), strict=False):
        image = axis.images[0].get_array()
        assert all(image[r.n1, r.n2] == getattr(r, column) for r in wanted.itertuples())


def test_bars_of_the_figure_of_spectra_stand_at_their_frequencies() -> None:
    W = np.random.default_rng(0).normal(size=(6, 4))
    table = fourier_basis.norm_table({"W_E": W, "W_out_W_U": W[::-1, :2] * 3})
    frequencies = pd.DataFrame({"k": [1, 2, 3], "key": [False, True, False]})
    for axis, name in zip(draw.spectra(table, frequencies).axes, ("W_E", "W_out_W_U"), strict=True):
        for bars in axis.containers:
            rows = table[table.wave == bars.get_label()]
            assert [round(bar.get_x() + bar.get_width() / 2) for bar in bars] == rows.k.tolist()
            assert [bar.get_height() for bar in bars] == rows[name].tolist()
        assert [line.get_xdata()[0] for line in axis.lines] == [2]


def draw_all(root: Path) -> list[str]:
    """Every figure of the stage, drawn and saved; their names."""
    names = []
    for name, figure in draw.figures(root):
        style.save(figure, root / f"{name}.png")
        names.append(name)
    return names


@pytest.mark.parametrize("N", [2, 5, 8, 15, 200])
def test_the_stage_and_its_figures_work_for_an_untrained_model_of_any_N(tmp_path: Path, N: int) -> None:
    metrics = run_stage(prepare(tmp_path, N))
    assert all(value is None or np.isfinite(value) for value in metrics.values())
    assert 0 < metrics["live_neurons"] <= 10
    fits = read_table(tmp_path / "data/fourier/fits.parquet")[0].to_pandas()
    assert len(fits) == 10 * (N // 2)
    curves = pd.read_csv(tmp_path / "plots/fourier.csv")
    assert curves.step.tolist() == [0, 10]
    assert curves.trained_loss.between(0.5 * np.log(N), 3 * np.log(N)).all()
    names = draw_all(tmp_path)
    assert {"fourier_spectra", "fourier_loss"} <= set(names)
    assert len(names) == len(set(names))
    keys = metrics["key_frequency_count"]
    assert ("fourier_planes" in names) == (keys > 0)


def test_where_every_pair_is_trained_there_is_no_restricted_loss(tmp_path: Path) -> None:
    metrics = run_stage(prepare(tmp_path, 5, f=1))
    assert metrics["restricted_loss"] is None
    assert metrics["excluded_loss"] > 0


def test_a_model_none_of_whose_neurons_fires_is_described(tmp_path: Path) -> None:
    prepare(tmp_path, 6)
    file = tmp_path / "models/model.safetensors"
    w, config = weights.load(file)
    weights.save(file, w | {"blocks.1.mlp.W_in": torch.zeros(12, 10)}, config)
    metrics = run_stage(tmp_path)
    assert metrics["live_neurons"] == 0
    assert metrics["best_explained_variance"] is None
    assert {"fourier_best_neuron", "fourier_neurons"}.isdisjoint(draw_all(tmp_path))


def test_pairs_and_checkpoints_of_another_task_are_refused(tmp_path: Path) -> None:
    first, second = prepare(tmp_path / "a", 5), prepare(tmp_path / "b", 7)
    model, folder = first / "models/model.safetensors", first / "models/checkpoints"
    with pytest.raises(InputError, match=r"pairs\.parquet was made for"):
        fourier.main(model, folder, second / "data", first, first / "params.yaml")
    with pytest.raises(InputError, match="step 0 was made for another task"):
        fourier.main(model, second / "models/checkpoints", first / "data", first, first / "params.yaml")
