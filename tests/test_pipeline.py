"""The graph of dvc.yaml: it says all that the stages depend on, and dvc runs it as its users expect."""

import ast
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from ruamel.yaml import YAML

from tests.conftest import ROOT

STAGES = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]
STATE = "ASSIGN_AND_ADD_STATE"  # the variable that names the folder of training states
TRAINING = {"params", "task", "layouts", "weights", "circuit_form", "state"}


def imported(file: Path) -> set[Path]:
    """The modules of this project that a file imports itself."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "stages":
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "stages"]
        else:
            continue
        found |= {path for name in names if (path := ROOT / f"{name.replace('.', '/')}.py").exists()}
    return found


def imports_of(file: Path) -> set[Path]:
    """All modules of this project that a file needs, itself among them."""
    found, todo = set(), {file}
    while todo:
        found |= todo
        todo = {module for new in todo for module in imported(new)} - found
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_declares_every_module_that_it_imports(stage: str) -> None:
    declared = {ROOT / dep for dep in STAGES[stage]["deps"] if dep.endswith(".py")}
    assert declared == imports_of(ROOT / f"stages/{stage}.py")


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_declares_exactly_the_parameters_that_it_reads(stage: str) -> None:
    read = set()
    for file in imports_of(ROOT / f"stages/{stage}.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("params.read", "read") and len(node.args) == 3:
                read.add(ast.literal_eval(node.args[1]))
    assert set(STAGES[stage].get("params", [])) == read


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_a_script_of_its_name(stage: str) -> None:
    assert STAGES[stage]["cmd"] == f"python -m stages.{stage}"
    assert (ROOT / f"stages/{stage}.py").exists()


def test_training_imports_only_the_first_six_of_core() -> None:
    modules = imports_of(ROOT / "stages/train.py") - {ROOT / "stages/train.py"}
    assert modules == {ROOT / f"stages/core/{name}.py" for name in TRAINING}


def test_nothing_switches_the_run_cache_off() -> None:
    for name, stage in STAGES.items():
        assert not stage.get("always_changed"), name
        assert all(isinstance(out, str) for out in stage.get("outs", [])), name
        for entry in [*stage.get("metrics", []), *stage.get("plots", [])]:
            ((path, options),) = entry.items()
            assert options["cache"] is False and "persist" not in options, path


def test_every_stage_has_its_section_and_every_section_its_owner() -> None:
    sections = set(YAML(typ="safe").load((ROOT / "params.yaml").read_text()))
    assert {name for stage in STAGES.values() for name in stage.get("params", [])} <= sections
    for name in sections:
        owner = {"task": "core/task", "model": "core/weights"}.get(name, name)
        assert f"ection ``{name}``" in (ROOT / f"stages/{owner}.py").read_text(), name


def test_matplotlib_is_imported_by_draw_alone() -> None:
    for file in (ROOT / "stages").rglob("*.py"):
        if file.parent.name != "draw":
            assert "matplotlib" not in {n.split(".")[0] for n in all_imports(file)}, file


def all_imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@contextmanager
def edited(file: Path) -> Iterator[dict]:
    """What a YAML file holds, written back with what was changed."""
    yaml = YAML()
    content = yaml.load(file)
    yield content
    yaml.dump(content, file)


class Clone:
    """A Git repository with this working tree in it, and a task small enough to run whole."""

    TINY: ClassVar = {
        "task": {"N": 7, "variables": 4, "context": 10, "left_only": 1, "right_only": 1},
        "generate": {"eval_size": 60, "exact_limit": 500},
        "model": {"d_model": 16, "d_head": 16, "d_mlp": 32},
        "train": {"steps": 300, "batch_size": 64, "checkpoint_every": 50},
    }

    def __init__(self, folder: Path, state: Path) -> None:
        self.folder = folder
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.env = {**os.environ, "PATH": path, STATE: str(state), "OMP_NUM_THREADS": "1"}
        for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
            self.env[name] = "tests@localhost"
        listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            generated = name == "dvc.lock" or re.match(r"(data|models|metrics|plots)/.*[^/.]", name)
            if (ROOT / name).is_file() and not (generated and not name.endswith(".gitignore")):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        with edited(folder / "params.yaml") as params:
            for section, values in self.TINY.items():
                params[section].update(values)
        self.run("git", "init", "-q", "-b", "main")
        self.commit("start")

    def run(self, *command: str, check: bool = True) -> str:
        """What a command prints; it must succeed."""
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True)
        if check:
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def json(self, *command: str) -> dict:
        """What a command prints on standard output, as JSON."""
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def commit(self, message: str) -> None:
        self.run("git", "add", "-A")
        self.run("git", "commit", "-qm", message)

    def cut(self) -> None:
        """Leave of the pipeline what ends with the judging, and of the charts those of accuracy."""
        with edited(self.folder / "dvc.yaml") as graph:
            graph["stages"] = {name: graph["stages"][name] for name in ("generate", "train", "evaluate")}
            graph["plots"] = [plot for plot in graph["plots"] if "Accuracy" in next(iter(plot))]

    def at(self, experiment: str, file: str) -> str:
        """A file as an experiment left it."""
        ref = self.run("git", "for-each-ref", "--format=%(refname)", f"refs/exps/*/*/{experiment}").strip()
        return self.run("git", "show", f"{ref}:{file}")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone in which `dvc repro` has run, committed; then the experiments ``less`` (r) and ``fewer`` (f)."""
    clone = Clone(tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("state"))
    before = (clone.folder / "dvc.yaml").read_text()
    clone.first = clone.run("dvc", "repro")
    assert (clone.folder / "dvc.yaml").read_text() == before
    clone.commit("results")
    clone.again = clone.run("dvc", "repro")
    clone.less = clone.run("dvc", "exp", "run", "-n", "less", "-S", "train.r=0.2")
    clone.fewer = clone.run("dvc", "exp", "run", "-n", "fewer", "-S", "train.r=1.0", "-S", "generate.f=0.5")
    return clone


def ran(output: str) -> set[str]:
    """The stages that dvc says it ran."""
    return set(re.findall(r"Running stage '(\w+)'", output))


def test_repro_runs_every_stage_and_leaves_what_dvc_yaml_declares(clone: Clone) -> None:
    assert ran(clone.first) == set(STAGES)
    for stage in STAGES.values():
        for out in [*stage.get("outs", []), *stage.get("metrics", []), *stage.get("plots", [])]:
            path = out if isinstance(out, str) else next(iter(out))
            assert (clone.folder / path).exists(), path


def test_repro_again_does_nothing(clone: Clone) -> None:
    assert not ran(clone.again)
    assert "up to date" in clone.again


def test_only_small_files_of_results_are_in_git(clone: Clone) -> None:
    listed = clone.run("git", "ls-files", "data", "models").split()
    assert all(name.endswith(".gitignore") for name in listed)
    sizes = [(clone.folder / name).stat().st_size for name in clone.run("git", "ls-files").split()]
    assert max(sizes) < 1_000_000


def test_another_r_trains_again_but_does_not_generate(clone: Clone) -> None:
    assert {"train", "evaluate", "figures"} <= ran(clone.less)
    assert "generate" not in ran(clone.less)


def test_another_f_runs_everything(clone: Clone) -> None:
    assert ran(clone.fewer) == set(STAGES)


def test_metrics_diff_gives_the_numbers_of_both_revisions(clone: Clone) -> None:
    file = "metrics/evaluate.json"
    diff = clone.json("dvc", "metrics", "diff", "less", "fewer", "--json", "--all")[file]
    old, new = (json.loads(clone.at(revision, file)) for revision in ("less", "fewer"))
    for name in ("0var_exact", "2var_train", "2var_exact"):
        assert (diff[name]["old"], diff[name]["new"]) == (old[name], new[name])
    assert old != new


def test_plots_diff_gives_the_curves_of_both_revisions(clone: Clone) -> None:
    (chart,) = clone.json("dvc", "plots", "diff", "less", "fewer", "--json")["data"]["Accuracy, two variables"]
    points = chart["content"]["data"]["values"]
    assert {point["rev"] for point in points} == {"less", "fewer"}
    for revision in ("less", "fewer"):
        table = list(csv.DictReader(io.StringIO(clone.at(revision, "plots/accuracy.csv"))))
        for name in ("2var_train", "2var_var_restricted_2"):
            drawn = [p["dvc_inferred_y_value"] for p in points if (p["rev"], p["field"]) == (revision, name)]
            assert drawn == [row[name] for row in table]


def test_every_chart_has_a_title_and_axes_and_is_drawn_once(clone: Clone) -> None:
    data = clone.json("dvc", "plots", "show", "--json")["data"]
    titles = []
    for name, (chart, *more) in data.items():
        assert not more, name
        if chart["type"] == "vega":
            axes = set(re.findall(r'"title": "([^"]+)"', json.dumps(chart["content"])))
            assert axes & {"training step", "experiment", "ablated", "target"}, name
            titles.append(json.dumps(chart["content"]["title"]))
    assert len(titles) == len(set(titles))
    assert {"Accuracy, constants", "Accuracy, one variable", "Accuracy, two variables"} <= data.keys()


def test_experiments_are_readable_as_a_table(clone: Clone) -> None:
    keep = "Experiment|train.r$|generate.f|2var_exact"
    table = clone.run("dvc", "exp", "show", "--csv", "--drop", ".*", "--keep", keep)
    rows = {row["Experiment"]: row for row in csv.DictReader(io.StringIO(table))}
    assert rows["less"]["train.r"] == "0.2" and rows["fewer"]["generate.f"] == "0.5"
    for name in ("less", "fewer"):
        assert float(rows[name]["2var_exact"]) == json.loads(clone.at(name, "metrics/evaluate.json"))["2var_exact"]


def test_going_back_to_parameters_that_were_run_takes_the_results_from_the_run_cache(clone: Clone) -> None:
    clone.run("dvc", "exp", "apply", "less")
    assert not ran(clone.run("dvc", "repro"))
    clone.run("git", "checkout", "-q", "--", ".")
    output = clone.run("dvc", "repro")
    assert not ran(output), output
