"""DVC's own way to many experiments: its queue, its workers, and what it shows of them."""

import csv
import io
import json
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.processes import kill, left
from tests.test_pipeline import STATE, Clone

VALUES = ("0.05", "0.2", "0.5")
SILENT = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
PATIENCE = 180  # seconds for three experiments by two workers on a busy machine


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """A clone, its pipeline cut after the judging, in which two workers have emptied a queue of three values of r."""
    clone = Clone(tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("state"))
    clone.cut()
    clone.commit("cut")
    try:
        clone.queued = clone.run("dvc", "exp", "run", "--queue", "-S", f"train.r={','.join(VALUES)}")
        # Not by `run`, which would wait for the workers, because they inherit what it reads from.
        subprocess.run(["dvc", "queue", "start", "-j", "2"], cwd=clone.folder, env=clone.env, check=True, **SILENT)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            clone.status = clone.run("dvc", "queue", "status")
            if "Queued" not in clone.status and "Running" not in clone.status:
                break
            time.sleep(2)
        yield clone
    finally:
        clone.run("dvc", "queue", "stop", "--kill", check=False)
        kill(left({STATE: clone.env[STATE]}))


def shown(clone: Clone) -> dict[str, dict[str, str]]:
    """The rows of `dvc exp show` that are experiments, by their r."""
    rows = csv.DictReader(io.StringIO(clone.run("dvc", "exp", "show", "--csv")))
    return {row["train.r"]: row for row in rows if row["typ"].startswith("branch")}


def test_two_workers_empty_a_queue_of_three_values(clone: Clone) -> None:
    assert clone.queued.count("Queued experiment") == 3
    assert clone.status.count("Success") == 3, clone.status


def test_the_experiments_of_a_queue_are_shown_with_their_values_and_results(clone: Clone) -> None:
    rows = shown(clone)
    assert set(rows) == set(VALUES)
    for row in rows.values():
        metrics = json.loads(clone.at(row["Experiment"], "metrics/evaluate.json"))
        assert float(row["2var_exact"]) == metrics["2var_exact"]


def test_plots_diff_draws_the_curves_of_queued_experiments(clone: Clone) -> None:
    names = {row["Experiment"] for row in shown(clone).values()}
    (chart,) = clone.json("dvc", "plots", "diff", *names, "--json")["data"]["Accuracy, two variables"]
    points = chart["content"]["data"]["values"]
    assert {point["rev"] for point in points} == names
    curves = {name: [p["dvc_inferred_y_value"] for p in points if p["rev"] == name] for name in names}
    assert len({tuple(curve) for curve in curves.values()}) == 3  # each r has its own


def test_applying_a_queued_experiment_brings_its_parameters_and_results(clone: Clone) -> None:
    name = shown(clone)["0.05"]["Experiment"]
    clone.run("dvc", "exp", "apply", name)
    try:
        assert "r: 0.05" in (clone.folder / "params.yaml").read_text()
        here = (clone.folder / "metrics/evaluate.json").read_text()
        assert json.loads(here) == json.loads(clone.at(name, "metrics/evaluate.json"))
        assert (clone.folder / "models/model.safetensors").exists()
    finally:
        clone.run("git", "checkout", "-q", "--", ".")
