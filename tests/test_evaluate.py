"""Judging checkpoints: exact accuracies on published weights, and what the files hold."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from stages import evaluate, generate
from stages.core.circuit_form import Circuits, forward
from stages.core.params import InputError
from stages.core.task import SPLITS, read_table, write_table
from stages.core.weights import checkpoint_name, initialise, save
from tests.conftest import ROOT

PUBLISHED = [
    "0var_train",
    "0var_add_restricted",
    "1var_train",
    "1var_add_restricted",
    "1var_var_restricted",
    "2var_train",
    "2var_add_restricted",
    "2var_var_restricted_1",
    "2var_var_restricted_2",
]


@pytest.fixture
def tiny_data(tmp_path: Path, tiny_config) -> Path:
    """Generated data of the tiny task."""
    params = tmp_path / "params.yaml"
    sections = {
        "task": tiny_config.task.model_dump(),
        "model": tiny_config.model.model_dump(),
        "generate": {"f": 0.7, "eval_size": 30, "exact_limit": 1000, "seed": 3},
    }
    params.write_text(json.dumps(sections))
    generate.main(out=tmp_path / "data", params_file=params)
    return tmp_path / "data"


def write_checkpoints(folder: Path, config, steps: range) -> None:
    folder.mkdir()
    for step in steps:
        save(folder / checkpoint_name(step), initialise(config, step), config)


def test_the_published_checkpoints_have_the_published_accuracies(tmp_path: Path, reference: Path, task) -> None:
    from stages import import_weights

    batches = np.load(reference / "batches.npz")
    import_weights.main(reference, out=tmp_path / "checkpoints")
    tables = []
    for name in PUBLISHED:
        tokens = batches[f"{name}_tokens"].astype(np.int16)
        column = pa.FixedSizeListArray.from_arrays(pa.array(tokens.ravel()), task.context)
        answers = batches[f"{name}_answers"].astype(np.int16)
        tables.append(pa.table({"split": [name] * len(tokens), "tokens": column, "answer": answers}))
    write_table(tmp_path / "data/eval.parquet", tables, task)
    write_table(tmp_path / "data/exact.parquet", [tables[0].slice(0, 0)], task)
    evaluate.main(checkpoints=tmp_path / "checkpoints", data=tmp_path / "data", out=tmp_path)
    ours = pd.read_csv(tmp_path / "plots/accuracy.csv", index_col="step")
    theirs = pd.read_csv(reference / "measures.csv", index_col="step")
    assert ours.index.tolist() == theirs.index.tolist()
    for name in PUBLISHED:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-9, err_msg=name)
    metrics = json.loads((tmp_path / "metrics/evaluate.json").read_text())
    assert metrics["1var_train"] == theirs["1var_train"].iloc[-1]
    assert metrics["0var_exact"] is None and metrics["1var_both_restricted"] is None and metrics["2var_exact"] is None


def test_accuracy_and_loss_are_those_of_the_logits(tiny_data: Path, tiny_config) -> None:
    splits, task = evaluate.load_sequences(tiny_data)
    assert task == tiny_config.task
    circuits = Circuits.of(initialise(tiny_config, 0))
    for tokens, answers in splits.values():
        logits = forward(circuits, tokens).logits
        loss = torch.nn.functional.cross_entropy(logits, answers)
        accuracy, nats = evaluate.judge(circuits, tokens, answers)
        assert accuracy == (logits.argmax(-1) == answers).double().mean()
        assert nats == pytest.approx(float(loss), rel=1e-5)


def test_judging_in_batches_is_judging_at_once(monkeypatch, tiny_data: Path, tiny_config) -> None:
    splits, _ = evaluate.load_sequences(tiny_data)
    circuits = Circuits.of(initialise(tiny_config, 0))
    whole = evaluate.judge_splits(circuits, splits)
    monkeypatch.setattr(evaluate, "BATCH", 7)
    for name, (accuracy, loss) in evaluate.judge_splits(circuits, splits).items():
        assert accuracy == whole[name][0]
        assert loss == pytest.approx(whole[name][1], rel=1e-6)


def test_every_checkpoint_is_a_row_and_every_split_a_column(tmp_path: Path, tiny_data: Path, tiny_config) -> None:
    write_checkpoints(tmp_path / "some", tiny_config, range(0, 1200, 100))
    evaluate.main(tmp_path / "some", tiny_data, tmp_path, tmp_path / "params.yaml")
    for name in ("accuracy", "loss"):
        table = pd.read_csv(tmp_path / f"plots/{name}.csv")
        assert table.columns.tolist() == ["step", *(split.name for split in SPLITS), "0var_exact"]
        assert table.step.tolist() == list(range(0, 1200, 100))
    accuracy = pd.read_csv(tmp_path / "plots/accuracy.csv", index_col="step")
    metrics = json.loads((tmp_path / "metrics/evaluate.json").read_text())
    assert metrics["2var_train"] == pytest.approx(accuracy["2var_train"].iloc[-1], abs=1e-6)
    for name, mean in metrics["mean_last_ten"].items():
        assert mean == pytest.approx(accuracy[name].iloc[-10:].mean(), abs=1e-5)
    assert 0 <= metrics["2var_exact"] <= 1
    assert all(math.isfinite(value) for value in metrics["mean_last_ten"].values())


def test_a_split_that_is_empty_is_absent_from_curves_and_null_in_metrics(tmp_path: Path, tiny_config) -> None:
    params = tmp_path / "params.yaml"
    task = tiny_config.task.model_copy(update={"left_only": 0, "right_only": 0})
    sections = {"task": task.model_dump(), "generate": {"f": 1.0, "eval_size": 9, "exact_limit": 99, "seed": 3}}
    params.write_text(json.dumps(sections))
    generate.main(out=tmp_path / "data", params_file=params)
    config = type(tiny_config)(task, tiny_config.model)
    write_checkpoints(tmp_path / "some", config, range(2))
    evaluate.main(tmp_path / "some", tmp_path / "data", tmp_path)
    columns = pd.read_csv(tmp_path / "plots/accuracy.csv").columns
    assert columns.tolist() == ["step", "0var_train", "1var_train", "2var_train"]
    metrics = json.loads((tmp_path / "metrics/evaluate.json").read_text())
    assert {name for name, value in metrics.items() if value is None} == {
        *(split.name for split in SPLITS if not split.name.endswith("train")),
        "0var_exact",
        "2var_exact",
    }


def test_sequences_of_another_task_are_refused(tmp_path: Path, tiny_data: Path, tiny_config) -> None:
    other = type(tiny_config)(tiny_config.task.model_copy(update={"N": 8}), tiny_config.model)
    write_checkpoints(tmp_path / "some", other, range(1))
    with pytest.raises(InputError, match=r"task\.N = 7"):
        evaluate.main(tmp_path / "some", tiny_data, tmp_path)
    assert not (tmp_path / "metrics").exists()


def test_the_pipelines_own_weights_must_have_the_sizes_of_the_parameters(monkeypatch, tmp_path, tiny_config) -> None:
    from stages.core.checkpoints import CHECKPOINTS, load_checked

    monkeypatch.chdir(tmp_path)
    CHECKPOINTS.mkdir(parents=True)
    file = CHECKPOINTS / checkpoint_name(0)
    save(file, initialise(tiny_config, 0), tiny_config)
    sections = {"task": tiny_config.task.model_dump(), "model": tiny_config.model.model_dump() | {"d_mlp": 64}}
    Path("params.yaml").write_text(json.dumps(sections))
    with pytest.raises(InputError, match=r"model\.d_mlp = 32, but params\.yaml says model\.d_mlp = 64"):
        load_checked(file)
    elsewhere = file.rename(tmp_path / file.name)
    assert load_checked(elsewhere)[1] == tiny_config


def test_a_folder_without_checkpoints_says_how_to_get_them(tmp_path: Path, tiny_data: Path) -> None:
    with pytest.raises(InputError, match=r"dvc repro train"):
        evaluate.main(tmp_path / "nothing", tiny_data, tmp_path)


def test_a_truncated_checkpoint_ends_the_stage_with_one_line_and_no_output(tmp_path, tiny_data, tiny_config) -> None:
    write_checkpoints(tmp_path / "some", tiny_config, range(2))
    file = tmp_path / "some" / checkpoint_name(1)
    file.write_bytes(file.read_bytes()[:-50])
    command = [sys.executable, "-m", "stages.evaluate", "--checkpoints", tmp_path / "some"]
    done = subprocess.run(
        [*command, "--data", tiny_data, "--out", tmp_path / "out"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {file} is damaged") and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_data_of_two_tasks_do_not_mix(tiny_data: Path, tiny_config) -> None:
    table, task = read_table(tiny_data / "exact.parquet")
    write_table(tiny_data / "exact.parquet", [table], task.model_copy(update={"left_only": 0}))
    with pytest.raises(InputError, match=r"task\.left_only = 0"):
        evaluate.load_sequences(tiny_data)


@pytest.mark.parametrize("content", ["[]", "{}", "3", "null", '{"addition": "x"}', "{", "\xff"])
def test_moments_that_no_progress_stage_wrote_are_refused_in_a_sentence(tmp_path: Path, content: str) -> None:
    from stages.core.checkpoints import read_moments

    file = tmp_path / "progress.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=r"dvc repro progress"):
        read_moments(file)
    with pytest.raises(InputError, match=r"cannot be read"):
        read_moments(tmp_path)


def test_checkpoints_from_elsewhere_are_judged_with_their_own_last_model(monkeypatch, tmp_path, tiny_config) -> None:
    from stages.core.checkpoints import CHECKPOINTS, MODEL, final_model

    monkeypatch.chdir(tmp_path)
    write_checkpoints(tmp_path / "some", tiny_config, range(3))
    assert final_model(None, CHECKPOINTS) == final_model(None, CHECKPOINTS.absolute()) == MODEL
    assert final_model(None, tmp_path / "some").name == checkpoint_name(2)
    assert final_model(Path("other"), tmp_path / "some") == Path("other")
