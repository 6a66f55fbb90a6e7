"""The tool that makes this project's weights out of TransformerLens 2.x state dicts."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from stages.core import checkpoints
from stages.core.circuit_form import Circuits, forward
from stages.core.params import InputError
from stages.core.weights import Config, initialise, load
from stages.import_weights import import_file, import_folder, main

SPLITS = ("0var_train", "1var_add_restricted", "2var_var_restricted_2")


@pytest.fixture
def published(tmp_path: Path, tiny_config: Config) -> Path:
    """A folder like the published one: three checkpoints, and another file."""
    folder = tmp_path / "published"
    folder.mkdir()
    for step in (1, 901, 1001):
        torch.save(initialise(tiny_config, step), folder / f"checkpoint_step_{step}.pth")
    (folder / "log.json").write_text(json.dumps({}))
    return folder


def everything(folder: Path) -> list[str]:
    """What is in a folder, hidden and temporary files too."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def test_a_file_becomes_a_safetensors_file(published: Path, tmp_path: Path, tiny_config: Config) -> None:
    out = tmp_path / "models/model.safetensors"
    import_file(published / "checkpoint_step_901.pth", out, left_only=1, right_only=1)
    weights, config = load(out)
    assert config == tiny_config
    assert all(torch.equal(weights[name], w) for name, w in initialise(tiny_config, 901).items())
    assert everything(out.parent) == ["model.safetensors"]


def test_a_folder_becomes_checkpoints_in_the_order_of_steps(
    published: Path, tmp_path: Path, tiny_config: Config
) -> None:
    out = tmp_path / "imported"
    assert import_folder(published, out, left_only=1, right_only=1) == 3
    assert everything(tmp_path) == sorted(
        ["imported", "published", *(f"published/{name}" for name in everything(published))]
        + [f"imported/step_{step:08d}.safetensors" for step in (1, 901, 1001)]
    )
    loaded = list(checkpoints.load_all(out))
    assert [step for step, _, _ in loaded] == [1, 901, 1001]
    for step, weights, config in loaded:
        assert config == tiny_config
        assert torch.equal(weights["unembed.W_U"], initialise(tiny_config, step)["unembed.W_U"])


def test_the_command_takes_files_and_folders_and_the_published_held_out_positions(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(published, tmp_path / "all", left_only=2, right_only=0)
    main(published / "checkpoint_step_1.pth", tmp_path / "one.safetensors", left_only=2, right_only=0)
    assert capsys.readouterr().out.splitlines() == [
        f"imported 3 checkpoints into {tmp_path / 'all'}",
        f"imported {published / 'checkpoint_step_1.pth'} as {tmp_path / 'one.safetensors'}",
    ]
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "all/step_00000001.safetensors").read_bytes()
    assert load(tmp_path / "one.safetensors")[1].task.left_only == 2


def damage_half(file: Path) -> None:
    """Keep the first half."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def damage_all(file: Path) -> None:
    """No pickle at all."""
    file.write_text("step,loss\n1,2\n")


def damage_empty(file: Path) -> None:
    """No bytes."""
    file.write_bytes(b"")


def put_code_in(file: Path) -> None:
    """A pickle that leaves a trace when it is read as pickles are."""
    file.write_bytes(pickle.dumps(Trap(str(file.parent / "trace")), protocol=2))


def put_zipped_code_in(file: Path) -> None:
    """The same in torch's own format, beside a weight."""
    torch.save({"embed.W_E": torch.ones(14, 16), "trap": Trap(str(file.parent / "trace"))}, file)


class Trap:
    """Unpickles by making a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("damage", [damage_half, damage_all, damage_empty, put_code_in, put_zipped_code_in])
def test_one_bad_file_is_named_runs_no_code_and_leaves_nothing_behind(
    published: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    bad = published / "checkpoint_step_1001.pth"
    damage(bad)
    before = everything(tmp_path)
    sentence = (
        r"^\S*checkpoint_step_1001\.pth is damaged, or holds more than tensors \(code in a pickle is never run\)$"
    )
    with pytest.raises(InputError, match=sentence):
        import_folder(published, tmp_path / "out", left_only=1, right_only=1)
    with pytest.raises(InputError, match=sentence):
        import_file(bad, tmp_path / "out.safetensors", left_only=1, right_only=1)
    assert everything(tmp_path) == before


def test_a_trap_would_have_run(tmp_path: Path) -> None:
    put_code_in(tmp_path / "file")
    pickle.loads((tmp_path / "file").read_bytes())
    assert (tmp_path / "trace").is_dir()


def test_checkpoints_of_two_sizes_are_refused(published: Path, tmp_path: Path, tiny_config: Config) -> None:
    other = Config(tiny_config.task, tiny_config.model.model_copy(update={"d_mlp": 8}))
    torch.save(initialise(other, 0), published / "checkpoint_step_950.pth")
    with pytest.raises(InputError, match=r"step_950\.pth is of other sizes than \S*step_1\.pth$"):
        import_folder(published, tmp_path / "out", left_only=1, right_only=1)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_state_dicts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/model.pth").touch()
    with pytest.raises(InputError, match=r"in holds no checkpoint_step_\*\.pth$"):
        import_folder(tmp_path / "in", tmp_path / "out", left_only=1, right_only=1)


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.pth does not exist$"):
        main(tmp_path / "nowhere.pth", tmp_path / "out.safetensors")


def test_what_is_there_is_not_mixed_with_what_is_imported(published: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "step_00000100.safetensors").touch()
    with pytest.raises(InputError, match=r"out holds something already"):
        import_folder(published, out, left_only=1, right_only=1)
    with pytest.raises(InputError, match=r"out is a folder: name the file"):
        import_file(published / "checkpoint_step_1.pth", out, left_only=1, right_only=1)
    assert everything(out) == ["step_00000100.safetensors"]


def test_the_published_checkpoints_keep_their_accuracies(reference: Path, tmp_path: Path) -> None:
    assert import_folder(reference, tmp_path / "published", left_only=2, right_only=2) == 8
    batches = np.load(reference / "batches.npz")
    measures = pd.read_csv(reference / "measures.csv", index_col="step")
    steps = []
    for step, weights, _ in checkpoints.load_all(tmp_path / "published"):
        steps.append(step)
        circuits = Circuits.of(weights)
        for split in SPLITS:
            tokens, answers = (torch.from_numpy(batches[f"{split}_{part}"]).long() for part in ("tokens", "answers"))
            right = forward(circuits, tokens).logits.argmax(-1) == answers
            assert round(right.double().mean().item(), 4) == measures.loc[step, split], (step, split)
    assert steps == list(measures.index)
