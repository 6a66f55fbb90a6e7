"""Initialisation, and weights in files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.core.params import InputError
from stages.core.weights import Config, check_config, checkpoint_name, initialise, load, save

# In the order of initialisation; layer 1's MLP is drawn in its place and thrown away.
DRAWN = {
    "embed.W_E": (74, 128),
    "pos_embed.W_pos": (16, 128),
    "blocks.0.attn.W_Q": (1, 128, 128),
    "blocks.0.attn.W_O": (1, 128, 128),
    "blocks.0.attn.W_K": (1, 128, 128),
    "blocks.0.attn.W_V": (1, 128, 128),
    "blocks.0.mlp.W_in": (128, 512),
    "blocks.0.mlp.W_out": (512, 128),
    "blocks.1.attn.W_Q": (1, 128, 128),
    "blocks.1.attn.W_O": (1, 128, 128),
    "blocks.1.attn.W_K": (1, 128, 128),
    "blocks.1.attn.W_V": (1, 128, 128),
    "blocks.1.mlp.W_in": (128, 512),
    "blocks.1.mlp.W_out": (512, 128),
    "unembed.W_U": (128, 59),
}
THROWN_AWAY = ("blocks.0.mlp.W_in", "blocks.0.mlp.W_out")


def test_weights_are_drawn_in_the_published_order_from_the_seed_alone(config: Config) -> None:
    found = initialise(config, seed=42)
    torch.manual_seed(42)
    expected = {name: torch.nn.init.normal_(torch.empty(shape), std=0.8 / 128**0.5) for name, shape in DRAWN.items()}
    assert list(found) == [name for name in DRAWN if name not in THROWN_AWAY]
    assert all(torch.equal(w, expected[name]) for name, w in found.items())
    assert sum(w.numel() for w in found.values()) == 281_216


def test_initialisation_leaves_the_global_generator_alone(tiny_config: Config) -> None:
    before = torch.get_rng_state()
    initialise(tiny_config, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_gives_the_same_bits_and_another_seed_others(tiny_config: Config) -> None:
    first, again, other = (initialise(tiny_config, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_the_published_first_checkpoint_is_one_step_from_initialisation(reference: Path, config: Config) -> None:
    published = torch.load(reference / "checkpoint_step_1.pth", weights_only=True)
    for name, w in initialise(config, seed=42).items():
        assert (w - published[name]).abs().max() <= 0.0011, name
        assert not torch.equal(w, published[name])
    assert not any(published[name].any() for name in THROWN_AWAY)


@pytest.fixture
def saved(tmp_path: Path, tiny_config: Config) -> Path:
    """A weights file of the tiny model."""
    file = tmp_path / "model.safetensors"
    save(file, initialise(tiny_config, 0), tiny_config)
    return file


def test_weights_come_back_from_a_file_bit_for_bit(saved: Path, tiny_config: Config) -> None:
    weights, config = load(saved)
    assert config == tiny_config
    assert list(weights) == list(tiny_config.shapes())
    assert all(torch.equal(w, weights[name]) for name, w in initialise(tiny_config, 0).items())


def test_weights_saved_twice_are_the_same_bytes(saved: Path, tmp_path: Path, tiny_config: Config) -> None:
    again = tmp_path / "again.safetensors"
    save(again, {name: w.double().requires_grad_() for name, w in initialise(tiny_config, 0).items()}, tiny_config)
    assert again.read_bytes() == saved.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again.safetensors", "model.safetensors"]


def test_a_save_that_breaks_off_leaves_the_old_file(
    saved: Path, tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError("No space left on device")

    before = saved.read_bytes()
    monkeypatch.setattr(Path, "write_bytes", break_off)
    with pytest.raises(OSError):
        save(saved, initialise(tiny_config, 1), tiny_config)
    assert saved.read_bytes() == before


def test_checkpoint_names_sort_like_their_steps() -> None:
    names = [checkpoint_name(step) for step in (0, 900, 1000, 25_000, 10_000_000)]
    assert names == sorted(names)
    assert names[1] == "step_00000900.safetensors"


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_named_in_one_sentence(saved: Path, kept: float) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(InputError, match=r"^\S*model\.safetensors is damaged or no safetensors file") as error:
        load(saved)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.safetensors does not exist: make it with `dvc repro`"):
        load(tmp_path / "none.safetensors")


def changed(file: Path, change: dict[str, Tensor | None], config: str | None = None) -> None:
    """Write the file again with other weights (None leaves one out) or another config."""
    tensors = load_file(file) | change
    if config is None:
        config = json.dumps({"task": load(file)[1].task.model_dump(), "model": load(file)[1].model.model_dump()})
    save_file({name: w for name, w in tensors.items() if w is not None}, file, {"config": config})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"embed.W_E": torch.ones(14, 15)}, r"embed\.W_E has the shape \(14, 15\), the parameters say \(14, 16\)$"),
        ({"unembed.W_U": None}, r"weight unembed\.W_U is missing$"),
        ({"blocks.0.mlp.W_in": torch.ones(16, 32)}, r"weight blocks\.0\.mlp\.W_in is unknown to this model$"),
    ],
)
def test_weights_that_are_not_what_the_file_says_are_refused(saved: Path, change: dict, sentence: str) -> None:
    changed(saved, change)
    with pytest.raises(InputError, match=sentence):
        load(saved)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("{", r"has a config that cannot be read"),
        ("[]", r"has a config that cannot be read"),
        ('{"task": {}}', r"has a config that cannot be read \(task\.N is missing: must be a whole number from 2"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(saved: Path, config: str, sentence: str) -> None:
    changed(saved, {}, config)
    with pytest.raises(InputError, match=sentence) as error:
        load(saved)
    assert "\n" not in str(error.value)


def test_a_safetensors_file_from_elsewhere_is_refused(tmp_path: Path) -> None:
    save_file({"embed.W_E": torch.ones(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"was not written by this project$"):
        load(tmp_path / "other.safetensors")


DIFFERENT = {
    "task": {"N": 11, "variables": 5, "context": 12, "left_only": 0, "right_only": 2},
    "model": {"d_model": 8, "d_head": 4, "n_heads": 1, "d_mlp": 64},
}


@pytest.mark.parametrize(("section", "key"), [(section, key) for section in DIFFERENT for key in DIFFERENT[section]])
def test_weights_of_other_parameters_are_refused_by_the_parameter(tiny_config: Config, section: str, key: str) -> None:
    check_config(tiny_config, tiny_config, "model.safetensors")
    value = DIFFERENT[section][key]
    sections = {"task": tiny_config.task, "model": tiny_config.model}
    sections[section] = sections[section].model_copy(update={key: value})
    old = getattr(getattr(tiny_config, section), key)
    sentence = (
        f"model.safetensors was made with {section}.{key} = {old}, but params.yaml says {section}.{key} = {value}: "
        "run `dvc repro`, or set the parameter back"
    )
    with pytest.raises(InputError) as error:
        check_config(tiny_config, Config(**sections), "model.safetensors")
    assert str(error.value) == sentence
