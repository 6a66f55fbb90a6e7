"""Training state that survives a kill."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from platformdirs import user_cache_path

from stages.core.state import State, claim, key_of, state_root

ROOT = Path(__file__).parents[1]
CONTENT = {"step": 3, "log": [{"step": 3, "loss": 0.5}], "weights": {"W_E": torch.arange(6.0).reshape(2, 3)}}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All states of a test are below a folder of its own."""
    monkeypatch.setenv("ASSIGN_AND_ADD_STATE", str(tmp_path / "states"))
    return tmp_path / "states"


def same(a: dict, b: dict) -> bool:
    plain = {k: v for k, v in a.items() if k != "weights"} == {k: v for k, v in b.items() if k != "weights"}
    return plain and torch.equal(a["weights"]["W_E"], b["weights"]["W_E"])


# --- keys -----------------------------------------------------------------------------------------------------------


def test_the_key_changes_with_every_fact_and_with_the_content_of_every_file(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"data"), two.write_bytes(b"code")
    facts = {"train": {"r": 1.0, "seed": 42}, "threads": 2}
    key = key_of(facts, [one, two])
    others = [
        key_of({"train": {"r": 1.5, "seed": 42}, "threads": 2}, [one, two]),
        key_of({"train": {"r": 1.0, "seed": 43}, "threads": 2}, [one, two]),
        key_of(facts | {"threads": 1}, [one, two]),
        key_of(facts | {"more": None}, [one, two]),
        key_of(facts, [two, one]),
        key_of(facts, [one]),
    ]
    two.write_bytes(b"code.")
    others.append(key_of(facts, [one, two]))
    two.write_bytes(b"code"), one.write_bytes(b"datb")
    others.append(key_of(facts, [one, two]))
    assert len({key, *others}) == 9


def test_the_key_does_not_change_with_the_order_of_facts_or_the_place_of_files(tmp_path):
    (tmp_path / "one").write_bytes(b"data"), (tmp_path / "copy").write_bytes(b"data")
    assert key_of({"a": 1, "b": 2}, [tmp_path / "one"]) == key_of({"b": 2, "a": 1}, [tmp_path / "copy"])


def test_states_are_in_the_users_cache_unless_the_environment_says_otherwise(root, monkeypatch):
    assert state_root() == root
    monkeypatch.setenv("ASSIGN_AND_ADD_STATE", "")
    assert state_root() == user_cache_path("assign-and-add")


# --- one state ------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path):
    state = State(tmp_path)
    assert state.load() is None
    state.save({**CONTENT, "step": 1})
    state.save(CONTENT)
    assert same(State(tmp_path).load(), CONTENT)
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]


def test_a_save_that_was_cut_off_leaves_the_one_before(tmp_path):
    State(tmp_path).save(CONTENT)
    (tmp_path / "state.partial").write_bytes(b"half of a sta")
    assert same(State(tmp_path).load(), CONTENT)


@pytest.mark.parametrize("damage", ["empty", "short", "truncated", "bit", "checksum", "longer"])
def test_a_damaged_state_is_named_set_aside_and_the_run_starts_over(root, capsys, damage):
    with claim("key") as state:
        state.save(CONTENT)
        (state.folder / "checkpoint").write_text("kept for whoever wants to look")
    file = root / "key-0/state.pt"
    data = bytearray(file.read_bytes())
    if damage == "bit":
        data[len(data) // 2] ^= 1
    if damage == "checksum":
        data[0] ^= 1
    damaged = {"empty": b"", "short": data[:20], "truncated": data[:-1], "longer": data + b"x"}.get(damage, data)
    file.write_bytes(damaged)
    with claim("key") as state:
        assert state.load() is None
        said = capsys.readouterr().err
        assert "training state damaged" in said and said.count("\n") == 1
        [aside] = [folder for folder in root.iterdir() if (folder / "checkpoint").exists()]
        assert str(aside) in said and aside != state.folder
        assert (aside / "state.pt").read_bytes() == bytes(damaged)
        assert list(state.folder.iterdir()) == []
        state.save(CONTENT)
    with claim("key") as state:  # what is set aside does not stand in the way of the next runs
        assert same(state.load(), CONTENT)
        assert (aside / "state.pt").exists()


def test_only_the_last_damaged_state_is_kept(root):
    for content in (b"first", b"second"):
        with claim("key") as state:
            (state.folder / "state.pt").write_bytes(content)
            assert state.load() is None
    assert [file.read_bytes() for file in root.glob("*/state.pt")] == [b"second"]


# --- claims ---------------------------------------------------------------------------------------------------------


def test_a_run_takes_up_what_an_earlier_one_of_its_key_left(root):
    with claim("key") as state:
        assert state.load() is None
        state.save(CONTENT)
    with claim("other") as state:
        assert state.load() is None
    with claim("key") as state:
        assert same(state.load(), CONTENT)


def test_a_finished_run_leaves_no_state(root):
    with claim("key") as state:
        state.save(CONTENT)
        state.remove()
    assert [path for path in root.iterdir() if path.is_dir()] == []
    with claim("key") as state:
        assert state.load() is None


def test_two_runs_of_one_key_at_once_have_two_folders():
    with claim("key") as first, claim("key") as second:
        first.save({**CONTENT, "step": 1})
        assert first.folder != second.folder and second.load() is None
        second.save({**CONTENT, "step": 2})
        assert first.load()["step"] == 1
        first.remove()
        assert second.load()["step"] == 2


def test_a_folder_with_a_saved_state_comes_before_an_empty_one():
    with claim("key") as first, claim("key") as second:
        second.save(CONTENT)
        assert first.load() is None
    with claim("key") as state:
        assert state.folder == second.folder and same(state.load(), CONTENT)
        with claim("key") as other:  # the saved one is taken: the other run starts afresh
            assert other.folder == first.folder and other.load() is None


def test_a_run_that_fails_keeps_its_state_and_gives_it_free():
    with pytest.raises(RuntimeError, match="out of memory"), claim("key") as state:
        state.save(CONTENT)
        raise RuntimeError("out of memory")
    with claim("key") as again:
        assert again.folder == state.folder and same(again.load(), CONTENT)


def test_a_killed_process_gives_its_state_free():
    code = """
import time
from stages.core.state import claim
with claim("key") as state:
    state.save({"step": 7})
    print("saved", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "saved\n"
        with claim("key") as other:  # while the process lives, its state is its own
            assert other.load() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with claim("key") as state:
        assert state.load() == {"step": 7}
