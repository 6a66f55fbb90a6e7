"""The TransformerLens bridge, and which foreign state dicts are taken."""

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stages.core.bridge import FIRST_MLP, from_state_dict, to_bridge, zeros
from stages.core.params import InputError
from stages.core.weights import Config, Weights, initialise


def foreign(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """A state dict as TransformerLens 2.x saves it: weights, zeros, and each layer's buffers."""
    T = config.task.context
    buffers = {f"blocks.{layer}.attn.mask": torch.ones(T, T).tril().bool() for layer in (0, 1)}
    buffers |= {f"blocks.{layer}.attn.IGNORE": torch.tensor(-torch.inf) for layer in (0, 1)}
    return initialise(config, seed) | zeros(config) | buffers


def taken(state_dict: Any, config: Config) -> tuple[Weights, Config]:
    """Import with the held-out positions of `config`."""
    return from_state_dict(state_dict, config.task.left_only, config.task.right_only, "model.pth")


def test_a_bridge_needs_no_network(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"tried to reach {args}")

    for function in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, function, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    to_bridge(initialise(tiny_config, 0), tiny_config)


def test_a_bridge_is_the_model_that_the_configuration_says(tiny_config: Config) -> None:
    cfg = to_bridge(initialise(tiny_config, 0), tiny_config).cfg
    assert (cfg.n_layers, cfg.n_ctx, cfg.d_vocab, cfg.d_vocab_out) == (2, 10, 14, 7)
    assert (cfg.d_model, cfg.d_head, cfg.n_heads, cfg.d_mlp) == (16, 8, 2, 32)
    assert (cfg.normalization_type, cfg.act_fn, cfg.attention_dir) == (None, "relu", "causal")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bridge_holds_copies_of_the_weights_and_frozen_zeros(tiny_config: Config, dtype: torch.dtype) -> None:
    weights = initialise(tiny_config, 0)
    bridge = to_bridge(weights, tiny_config, dtype)
    torch.testing.assert_close(bridge.blocks[1].attn.W_Q, weights["blocks.1.attn.W_Q"].to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(bridge.unembed.W_U, weights["unembed.W_U"].to(dtype), rtol=0, atol=0)
    weights["embed.W_E"].zero_()
    assert bridge.embed.W_E.any()

    parameters = bridge.state_dict(keep_vars=True).values()
    assert {p.dtype for p in parameters} == {dtype}
    trained = [p for p in parameters if p.requires_grad]
    assert sum(p.numel() for p in trained) == sum(w.numel() for w in weights.values())
    assert not any(p.any() for p in parameters if not p.requires_grad)


def test_training_a_bridge_leaves_its_zeros(tiny_config: Config) -> None:
    bridge = to_bridge(initialise(tiny_config, 0), tiny_config)
    optimiser = torch.optim.AdamW(p for p in bridge.parameters() if p.requires_grad)
    bridge(torch.zeros(3, 10, dtype=torch.int64))[:, -1].square().sum().backward()
    optimiser.step()
    after = bridge.state_dict()
    assert not any(after[name].any() for name in after if name.endswith("bias") or name.startswith("blocks.0.mlp"))


def test_published_weights_in_a_bridge_have_the_published_accuracy(reference: Path) -> None:
    state_dict = torch.load(reference / "checkpoint_step_14501.pth", weights_only=True)
    bridge = to_bridge(*from_state_dict(state_dict, left_only=2, right_only=2))
    batches = np.load(reference / "batches.npz")
    tokens, answers = (torch.from_numpy(batches[f"1var_var_restricted_{x}"]).long() for x in ("tokens", "answers"))
    with torch.no_grad():
        right = bridge(tokens)[:, -1].argmax(-1) == answers
    assert round(right.double().mean().item(), 4) == 0.759


def test_a_foreign_state_dict_gives_weights_and_sizes_back(tiny_config: Config) -> None:
    state_dict = foreign(tiny_config)
    weights, config = taken(state_dict, tiny_config)
    assert config == tiny_config
    assert list(weights) == list(config.shapes())
    assert all(torch.equal(w, state_dict[name]) for name, w in weights.items())


def test_zeros_and_buffers_may_be_absent_and_half_precision_is_widened(tiny_config: Config) -> None:
    state_dict = {name: w.half() for name, w in initialise(tiny_config, 0).items()}
    weights, config = taken(state_dict, tiny_config)
    assert config == tiny_config
    assert {w.dtype for w in weights.values()} == {torch.float32}


@pytest.mark.parametrize("silent", FIRST_MLP)
def test_a_first_mlp_of_which_one_matrix_is_zero_counts_as_none(tiny_config: Config, silent: str) -> None:
    state_dict = foreign(tiny_config)
    other = next(name for name in FIRST_MLP if name != silent)
    state_dict[other] = torch.ones_like(state_dict[other])
    weights, _ = taken(state_dict, tiny_config)
    assert weights.keys() == tiny_config.shapes().keys()


def test_a_first_mlp_that_acts_is_refused(tiny_config: Config) -> None:
    state_dict = foreign(tiny_config)
    for name in FIRST_MLP:
        state_dict[name][0, 0] = 1e-6
    with pytest.raises(InputError, match=r"model\.pth: blocks\.0\.mlp\.W_in and .* not zero; .* layer 1 has no MLP$"):
        taken(state_dict, tiny_config)


REFUSED = {
    "norm": ({"blocks.0.ln1.w": torch.ones(16)}, r"blocks\.0\.ln1\.w; this project's model has no normalisation$"),
    "final norm": ({"ln_final.b": torch.zeros(16)}, r"ln_final\.b; this project's model has no normalisation$"),
    "bias": ({"blocks.1.mlp.b_in": torch.ones(32)}, r"b_in is not zero; this project's model has no biases$"),
    "NaN bias": ({"unembed.b_U": torch.full((7,), torch.nan)}, r"b_U is not zero; this project's model has no biases$"),
    "first MLP's bias": ({"blocks.0.mlp.b_out": torch.ones(16)}, r"b_out is not zero; .* no biases$"),
    "three layers": ({"blocks.2.attn.W_Q": torch.zeros(2, 16, 8)}, r"blocks\.2\.attn\.W_Q; .* has 2 layers$"),
    "gated MLP": ({"blocks.1.mlp.W_gate": torch.ones(16, 32)}, r"W_gate, for which this project's model has no place$"),
    "rotary": (
        {"blocks.0.attn.rotary_sin": torch.ones(10, 8)},
        r"rotary_sin, for which this project's model has no place$",
    ),
    "local attention": ({"blocks.1.attn.mask": torch.eye(10).bool()}, r"blocks\.1\.attn\.mask is not causal"),
    "no matrix": ({"embed.W_E": torch.ones(16)}, r"do not have the dimensions"),
    "other width": ({"blocks.1.attn.W_O": torch.ones(2, 8, 15)}, r"W_O has the shape \(2, 8, 15\), .*\(2, 8, 16\)$"),
    "too few tokens": ({"embed.W_E": torch.ones(11, 16)}, r"task\.variables = 1: must be .* from 2 to 26$"),
    "a nested state dict": ({"model": {}}, r"is no state dict: it must map names to tensors$"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_represented_is_refused_with_a_sentence(tiny_config: Config, case: str) -> None:
    changes, sentence = REFUSED[case]
    with pytest.raises(InputError, match=sentence) as error:
        taken(foreign(tiny_config) | changes, tiny_config)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("model.pth")


@pytest.mark.parametrize(
    "name", ["embed.W_E", "pos_embed.W_pos", "blocks.0.attn.W_Q", "blocks.1.attn.W_V", "blocks.1.mlp.W_in"]
)
def test_a_state_dict_that_lacks_a_weight_is_refused_by_its_name(tiny_config: Config, name: str) -> None:
    state_dict = foreign(tiny_config)
    del state_dict[name]
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        taken(state_dict, tiny_config)


@pytest.mark.parametrize("value", [None, torch.ones(3), [torch.ones(3)], {}, {3: torch.ones(3)}])
def test_something_else_than_a_state_dict_is_refused(tiny_config: Config, value: Any) -> None:
    with pytest.raises(InputError, match=r"^model\.pth"):
        taken(value, tiny_config)
