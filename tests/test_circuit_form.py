"""The circuit form against the TransformerLens bridge: the same numbers by another way."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.core.bridge import from_state_dict, to_bridge
from stages.core.circuit_form import Circuits, Forward, forward, mlp2
from stages.core.layouts import Problems, lay_out
from stages.core.task import Operands, Task
from stages.core.weights import Config, ModelConfig, Weights, initialise

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def drawn_batch(task: Task, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Problems of all forms, trained and held out, in real layouts: tokens [size, T] and answers [size]."""
    rng = np.random.default_rng(seed)
    operands = Operands.of(task)
    n1, n2 = rng.integers(task.N, size=(2, size))
    problems = Problems(n1, n2, operands[rng.integers(len(operands), size=size)])
    tokens = lay_out(task, problems, rng, training=True)
    return torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy((n1 + n2) % task.N)


def scaled(weights: Weights, factor: float) -> Weights:
    """Larger weights: attention after initialisation is so even that a wrong pattern would hardly show."""
    return {name: factor * w for name, w in weights.items()}


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


def both(weights: Weights, config: Config, tokens: Tensor, answers: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Relative difference between circuit form and bridge of every activation, the logits and every gradient."""
    from transformer_lens.utilities.tl_checkpoint_conversion import convert_tl_checkpoint

    own = {name: w.to(dtype, copy=True).requires_grad_() for name, w in weights.items()}
    result = forward(Circuits.of(own), tokens)
    torch.nn.functional.cross_entropy(result.logits, answers).backward()

    bridge = to_bridge(weights, config, dtype)
    logits, cache = bridge.run_with_cache(tokens)
    torch.nn.functional.cross_entropy(logits[:, -1], answers).backward()
    parameters = bridge.state_dict(keep_vars=True)
    gradients = convert_tl_checkpoint({name: w.grad for name, w in own.items()}, bridge.cfg)

    expected = {
        "pattern1": cache["blocks.0.attn.hook_pattern"].transpose(0, 1),  # [B, H, T, T] → [H, B, T, T]
        "pattern2": cache["blocks.1.attn.hook_pattern"][:, :, -1].transpose(0, 1),  # [B, G, T, T] → [G, B, T]
        "resid_mid": cache["blocks.1.hook_resid_mid"][:, -1],
        "logits": logits[:, -1],
    }
    assert all(getattr(result, name).shape == e.shape and e.dtype == dtype for name, e in expected.items())
    assert gradients.keys() == {name for name, parameter in parameters.items() if parameter.requires_grad}
    return {name: relative(getattr(result, name), e) for name, e in expected.items()} | {
        name: relative(gradient, parameters[name].grad) for name, gradient in gradients.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n_heads", "d_head"), [(1, 128), (4, 48)])
@pytest.mark.parametrize("factor", [1, 2.5])
def test_logits_activations_and_every_gradient_equal_the_bridges(
    task: Task, n_heads: int, d_head: int, factor: float, dtype: torch.dtype
) -> None:
    config = Config(task, ModelConfig(d_model=128, d_head=d_head, n_heads=n_heads, d_mlp=512))
    weights = scaled(initialise(config, seed=n_heads), factor)
    differences = both(weights, config, *drawn_batch(task, 128, seed=7), dtype)
    assert max(differences.values()) < TOLERANCE[dtype], differences


@pytest.mark.parametrize("step", [5401, 39901])
def test_published_weights_give_the_bridges_logits_and_gradients(reference, step: int) -> None:
    file = reference / f"checkpoint_step_{step}.pth"
    weights, config = from_state_dict(torch.load(file, weights_only=True), left_only=2, right_only=2)
    differences = both(weights, config, *drawn_batch(config.task, 128, seed=step), torch.float64)
    assert max(differences.values()) < TOLERANCE[torch.float64], differences


@st.composite
def small_configs(draw: st.DrawFn) -> Config:
    """Tasks of any kind, with models of any proportions."""
    variables = draw(st.integers(2, 6))
    task = Task(
        N=draw(st.integers(2, 9)), variables=variables, context=draw(st.integers(8, 15)), left_only=0, right_only=0
    )
    sizes = {name: draw(st.integers(1, 9)) for name in ("d_model", "d_head", "n_heads", "d_mlp")}
    return Config(task, ModelConfig(**sizes))


@settings(max_examples=25, deadline=None)
@given(config=small_configs(), size=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_any_sizes_give_the_bridges_logits(config: Config, size: int, seed: int) -> None:
    weights = initialise(config, seed)
    tokens, _ = drawn_batch(config.task, size, seed)
    result = forward(Circuits.of({name: w.double() for name, w in weights.items()}), tokens)
    with torch.no_grad():
        logits = to_bridge(weights, config, torch.float64)(tokens)[:, -1]
    torch.testing.assert_close(result.logits, logits, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("N", [2, 7])
def test_tiny_models_with_several_heads_have_the_bridges_gradients(tiny_config: Config, N: int) -> None:
    config = Config(tiny_config.task.model_copy(update={"N": N}), tiny_config.model)
    weights = scaled(initialise(config, seed=3), 3)
    differences = both(weights, config, *drawn_batch(config.task, 64, seed=3), torch.float64)
    assert max(differences.values()) < TOLERANCE[torch.float64], differences


def run(config: Config, tokens: Tensor) -> Forward:
    """A model with clear preferences, in float64."""
    weights = scaled(initialise(config, seed=11), 3)
    return forward(Circuits.of({name: w.double() for name, w in weights.items()}), tokens)


def test_attention_sums_to_one_and_never_looks_ahead(tiny_config: Config) -> None:
    result = run(tiny_config, drawn_batch(tiny_config.task, 32, seed=0)[0])
    for pattern in (result.pattern1, result.pattern2):
        torch.testing.assert_close(pattern.sum(-1), torch.ones(pattern.shape[:-1], dtype=torch.float64))
    assert not result.pattern1.triu(1).any()
    assert (result.pattern1 > 0).sum() == 2 * 32 * 10 * 11 / 2  # heads, sequences, and every pair of a query and a key


def test_a_sequence_gets_the_same_logits_in_any_batch(tiny_config: Config) -> None:
    tokens, _ = drawn_batch(tiny_config.task, 32, seed=1)
    torch.testing.assert_close(run(tiny_config, tokens[5:6]).logits[0], run(tiny_config, tokens).logits[5])


def test_the_mlp_leaves_the_residual_out(tiny_config: Config) -> None:
    weights = initialise(tiny_config, seed=5)
    circuits = Circuits.of(weights)
    result = forward(circuits, drawn_batch(tiny_config.task, 8, seed=5)[0])
    without = result.resid_mid @ weights["unembed.W_U"]
    added = mlp2(circuits, result.resid_mid) @ weights["unembed.W_U"]
    torch.testing.assert_close(result.logits, without + added)
    assert added.abs().max() > 0
