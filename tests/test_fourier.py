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
from stages.core.circuit_form import Circuits
from stages.core.params import InputError
from stages.core.task import Operands, Task, read_table, trained_pairs
from stages.core.weights import Config, ModelConfig
from stages.draw import fourier as draw
from stages.draw import style
from stages.parts import fourier_basis
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
    found = fourier.losses(logits, trained, np.array(key))
    right = logits[0, 0] - logits[0, 0].max()
    assert found["restricted_loss"] == pytest.approx(np.log(np.exp(right).sum()), rel=1e-9)  # c = 0 is right
    assert found["restricted_loss"] == pytest.approx(found["held_out_loss"], rel=1e-9)
    assert found["excluded_loss"] == pytest.approx(np.log(N), rel=1e-9)
    assert found["trained_loss"] == pytest.approx(found["held_out_loss"], rel=1e-9)


@pytest.mark.parametrize(("N", "key"), [(7, [1, 3]), (12, [2, 6])])
def test_losses_equal_those_of_logits_projected_wave_by_wave(N: int, key: list[int]) -> None:
    rng, (n, m) = np.random.default_rng(N), np.indices((N, N))
    logits, trained = rng.normal(size=(N, N, N)), rng.random((N, N)) < 0.6
    kept = np.zeros_like(logits)
    for k, wave in itertools.product(key, (np.cos, np.sin)):
        w = wave(2 * np.pi * k * (n + m) / N)
        if (w**2).sum() > 1e-9:  # no sine at N/2
            kept += w[..., None] * np.einsum("nm,nmc->c", w, logits) / (w**2).sum()

    def loss(z: np.ndarray, pairs: np.ndarray) -> float:
        p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
        return -np.log(p[n, m, (n + m) % N])[pairs].mean()

    found = fourier.losses(logits, trained, np.array(key))
    assert found["restricted_loss"] == pytest.approx(loss(logits.mean((0, 1)) + kept, ~trained))
    assert found["excluded_loss"] == pytest.approx(loss(logits - kept, trained))


def test_shares_of_logits_ignore_what_changes_no_probability() -> None:
    logits = ideal_logits(12, [2, 5, 6], 1)
    shares = fourier.logit_shares(logits + np.random.default_rng(0).normal(size=(12, 12, 1)))
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
    for column in ("k", "k_1var", "k_2var"):
        assert table[column].tolist() == k.tolist()
    np.testing.assert_allclose(table.phase_error, 0, atol=1e-9)
    np.testing.assert_allclose(table[["explained_variance", "output_share", "correlation_1var"]], 1, atol=1e-9)
    np.testing.assert_allclose(table.correlation_2var, -1, atol=1e-9)
    assert np.isnan(table.activation_share.iloc[-1])
    live = table[table.live]
    assert (live.activation_share < 1).all() and (live.activation_share > live.activation_sum_share + 0.5).all()
    assert (live.activation_sum_share > 0.03).all()


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
    frequencies = fourier.frequency_table(fourier.logit_shares(logits), 0.01, neurons, fits)
    assert neurons.live.sum() == 478
    at_11 = frequencies.set_index("k").loc[11]
    assert at_11.best_neuron == 70
    assert round(at_11.explained_variance, 4) == 0.9619
    assert frequencies.k[frequencies.key].tolist() == [1, 2, 4, 5, 11, 15, 19, 20, 22, 27]
    assert frequencies.neurons.sum() == 478
    trained = trained_pairs(59, 0.7, 42).reshape(59, 59)
    found = fourier.losses(logits, trained, frequencies.k[frequencies.key].to_numpy())
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
    assert metrics["live_neurons"] + metrics["silent_neurons"] == 10
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
