"""Training: what is drawn, what is learned from, and that a killed run ends in the same bytes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.core import state
from stages.core.circuit_form import Circuits, forward
from stages.core.params import InputError
from stages.core.task import Operands
from stages.core.weights import initialise, load
from stages.train import BLOCK, TrainParams, batches, checkpoint_steps, loss_and_accuracy, training_data
from tests.conftest import ROOT

TRAIN = {
    "r": 1.0,
    "r_mode": "frequency",
    "weight_0var": 1.0,
    "weight_1var": 1.0,
    "steps": 300,
    "batch_size": 64,
    "lr": 1e-3,
    "weight_decay": 0.02,
    "seed": 1,
    "data_seed": 0,
    "checkpoint_every": 20,
    "device": "cpu",
}
PARAMS = """\
task: {N: 7, variables: 4, context: 10, left_only: 1, right_only: 1}
generate: {f: 0.7, eval_size: 20, exact_limit: 1000, seed: 42}
model: {d_model: 16, d_head: 8, n_heads: 2, d_mlp: 32}
train: TRAIN
"""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with generated data of a tiny task and its parameters."""
    (tmp_path / "params.yaml").write_text(PARAMS.replace("TRAIN", json.dumps(TRAIN)))
    stage("generate", tmp_path, "--out", tmp_path / "data").check_returncode()
    return tmp_path


def stage(name: str, folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    """Run a stage of this working tree with the parameters and the state of a folder."""
    return subprocess.run(command(name, folder, *options), **surroundings(folder), capture_output=True, text=True)


def command(name: str, folder: Path, *options: object) -> list[str]:
    return [sys.executable, "-m", f"stages.{name}", "--params", str(folder / "params.yaml"), *map(str, options)]


def surroundings(folder: Path) -> dict[str, object]:
    return {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1", "ASSIGN_AND_ADD_STATE": str(folder / "state")}}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def test_checkpoints_are_at_zero_every_interval_and_the_last_step() -> None:
    assert checkpoint_steps(250, 100) == [0, 100, 200, 250]
    assert checkpoint_steps(200, 100) == [0, 100, 200]
    assert checkpoint_steps(5, 100) == [0, 5]


def test_the_batches_from_a_step_on_are_those_of_a_run_that_got_there(tiny_config) -> None:
    p = TrainParams(**TRAIN)
    draw = training_data(tiny_config.task, np.array([[1, 2], [3, 4], [5, 6]]), p)
    whole = batches(tiny_config.task, draw, p, 0)
    expected = [next(whole) for _ in range(2 * BLOCK + 3)]
    for start in (1, BLOCK - 1, BLOCK, BLOCK + 5, 2 * BLOCK + 2):
        tokens, answers = next(batches(tiny_config.task, draw, p, start))
        assert torch.equal(tokens, expected[start][0]) and torch.equal(answers, expected[start][1])
    assert len({tokens.numpy().tobytes() for tokens, _ in expected}) == len(expected)


def test_another_data_seed_gives_other_examples(tiny_config) -> None:
    draws = []
    for data_seed in (0, 1):
        p = TrainParams(**TRAIN | {"data_seed": data_seed})
        draw = training_data(tiny_config.task, np.array([[1, 2], [3, 4]]), p)
        draws.append(next(batches(tiny_config.task, draw, p, 0))[0])
    assert not torch.equal(*draws)


def test_subset_mode_draws_two_variable_examples_from_the_kept_pairs_alone(task) -> None:
    pairs = np.argwhere(np.ones((59, 59)))
    p = TrainParams(**TRAIN | {"r": 0.05, "r_mode": "subset", "batch_size": 20_000})
    draw = training_data(task, pairs, p)
    assert abs((np.diff(draw.pair_edges_2var, prepend=0) > 0).mean() - (1 - 0.95**10)) < 0.03
    kept = {tuple(pair) for pair in pairs[np.diff(draw.pair_edges_2var, prepend=0) > 0]}
    tokens, _ = next(batches(task, draw, p, 0))
    two = tokens[(tokens[:, 13] >= task.first_variable) & (tokens[:, 14] >= task.first_variable)]
    from stages.core.layouts import values

    seen = {tuple(v) for v in values(task, two.numpy())}
    assert seen and seen <= kept


def test_subset_mode_with_r_one_draws_what_frequency_mode_draws(task) -> None:
    pairs = np.argwhere(np.eye(59) == 0)
    drawn = []
    for mode in ("frequency", "subset"):
        p = TrainParams(**TRAIN | {"r_mode": mode})
        drawn.append(next(batches(task, training_data(task, pairs, p), p, 0))[0])
    assert torch.equal(*drawn)


def test_a_subset_that_keeps_nothing_is_refused_when_nothing_else_is_trained(tiny_config) -> None:
    p = TrainParams(**TRAIN | {"r": 1e-12, "r_mode": "subset", "weight_0var": 0, "weight_1var": 0})
    with pytest.raises(InputError, match=r"train\.r = 1e-12"):
        training_data(tiny_config.task, np.array([[1, 2]]), p)


def test_the_loss_is_the_cross_entropy_of_the_answer_at_the_last_position(tiny_config) -> None:
    p = TrainParams(**TRAIN)
    draw = training_data(tiny_config.task, np.array([[1, 2], [3, 4]]), p)
    tokens, answers = next(batches(tiny_config.task, draw, p, 0))
    weights = initialise(tiny_config, 0)
    loss, accuracy = loss_and_accuracy(weights, tokens, answers)
    logits = forward(Circuits.of(weights), tokens).logits
    by_hand = -(logits.log_softmax(-1)[torch.arange(len(tokens)), answers]).mean()
    assert float(loss) == pytest.approx(float(by_hand), rel=1e-6)
    assert float(accuracy) == pytest.approx(float((logits.argmax(-1) == answers).float().mean()))


def test_a_run_learns_writes_everything_and_forgets_its_state(workplace: Path) -> None:
    done = stage("train", workplace, "--data", workplace / "data", "--out", workplace)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress bar where there is no terminal
    steps = [int(f.stem.removeprefix("step_")) for f in sorted((workplace / "models/checkpoints").iterdir())]
    assert steps == checkpoint_steps(300, 20)
    final, config = load(workplace / "models/model.safetensors")
    last, _ = load(workplace / "models/checkpoints/step_00000300.safetensors")
    assert all(torch.equal(final[name], last[name]) for name in config.shapes())
    first, _ = load(workplace / "models/checkpoints/step_00000000.safetensors")
    assert all(torch.equal(first[name], w) for name, w in initialise(config, 1).items())
    curve = np.loadtxt(workplace / "plots/train/plots/metrics/loss.tsv", skiprows=1)
    assert curve[:, 0].tolist() == steps[1:]
    assert curve[-1, 1] < curve[0, 1]
    assert json.loads((workplace / "metrics/train.json").read_text())["step"] == 300
    assert not list((workplace / "state").glob("*/state.pt"))


@pytest.mark.parametrize("kills", [1, 3])
def test_a_killed_run_started_again_gives_the_bytes_of_one_never_killed(workplace: Path, kills: int) -> None:
    options = ("--data", workplace / "data", "--out")
    assert stage("train", workplace, *options, workplace / "whole").returncode == 0
    rng = np.random.default_rng(kills)
    interrupted = 0
    for _ in range(kills):
        run = subprocess.Popen(command("train", workplace, *options, workplace / "killed"), **surroundings(workplace))
        target = int(rng.integers(1, 8)) + interrupted * 2
        while run.poll() is None and len(list((workplace / "state").glob("*/checkpoints/*.safetensors"))) < target:
            time.sleep(0.005)
        time.sleep(float(rng.random()) * 0.05)
        run.send_signal(signal.SIGKILL)
        run.wait()
        interrupted += run.returncode == -signal.SIGKILL
    assert interrupted == kills
    done = stage("train", workplace, *options, workplace / "killed")
    assert done.returncode == 0
    assert "going on from step" in done.stderr
    assert contents(workplace / "killed") == contents(workplace / "whole")


def test_a_damaged_state_is_named_and_set_aside_and_the_run_starts_over(workplace: Path) -> None:
    options = ("--data", workplace / "data", "--out")
    assert stage("train", workplace, *options, workplace / "whole").returncode == 0
    run = subprocess.Popen(command("train", workplace, *options, workplace / "killed"), **surroundings(workplace))
    while run.poll() is None and not list((workplace / "state").glob("*/state.pt")):
        time.sleep(0.005)
    run.kill()
    run.wait()
    (saved,) = (workplace / "state").glob("*/state.pt")
    saved.write_bytes(saved.read_bytes()[:-100])
    done = stage("train", workplace, *options, workplace / "killed")
    assert done.returncode == 0
    assert "training state damaged" in done.stderr and "damaged-" in done.stderr
    assert contents(workplace / "killed") == contents(workplace / "whole")


def test_the_state_belongs_to_parameters_data_and_code(workplace: Path, tiny_config) -> None:
    from stages.train import state_key

    p, data, cpu = TrainParams(**TRAIN), [workplace / "data/pairs.parquet"], torch.device("cpu")
    key = state_key(tiny_config, p, data, cpu)
    assert key == state_key(tiny_config, p, data, cpu)
    assert key != state_key(tiny_config, TrainParams(**TRAIN | {"lr": 0.002}), data, cpu)
    assert key != state_key(tiny_config, p, [workplace / "data/operands.parquet"], cpu)
    assert key != state_key(tiny_config, p, data, torch.device("cuda"))


def test_two_runs_at_once_do_not_touch_each_others_state(workplace: Path) -> None:
    options = ("--data", workplace / "data", "--out")
    runs = [
        subprocess.Popen(command("train", workplace, *options, workplace / name), **surroundings(workplace))
        for name in ("one", "two")
    ]
    assert [run.wait() for run in runs] == [0, 0]
    assert contents(workplace / "one") == contents(workplace / "two")


def test_a_loss_that_is_not_finite_ends_the_run_with_one_line(workplace: Path) -> None:
    params = workplace / "params.yaml"
    params.write_text(params.read_text().replace('"lr": 0.001', '"lr": 1e30'))
    done = stage("train", workplace, "--data", workplace / "data", "--out", workplace)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1 and "train.lr = 1e+30" in done.stderr
    assert not (workplace / "models").exists()


def test_training_shows_no_problem_that_is_held_out(task) -> None:
    operands = Operands.of(task).trained
    assert not ((operands.left >= 10) | ((operands.right >= 0) & (operands.right < 2))).any()


def test_state_folder_follows_the_environment(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASSIGN_AND_ADD_STATE", str(tmp_path / "here"))
    assert state.state_root() == tmp_path / "here"
