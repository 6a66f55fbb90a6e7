"""Sweeps: grids of experiments, run here and on a real cluster, finished in several goes, collected and drawn."""

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from ruamel.yaml import YAML

from stages.core import params
from stages.core.params import InputError
from stages.draw import sweep as drawing
from stages.parts.experiments import Baseline, Experiment, Job, upstream
from stages.sweep import MOMENTS, SweepParams, experiments
from tests import slurm
from tests.conftest import ROOT
from tests.processes import kill, left, wait_for
from tests.test_pipeline import STATE, Clone, edited

PATIENCE = 240  # seconds that a sweep of three tiny experiments may take on a busy machine
SWEEP = ("-m", "stages.sweep")
SHORT = 100  # steps of an experiment
LONG = 2000  # steps of the experiment that is killed on the way

GRIDS = {
    "here": {
        "set": {"train.checkpoint_every": 100},
        "vary": [{"train.r": [0.2, 0.5]}, {"train.r": [0.2], "train.lr": [1e30]}],
    },
    "cluster": {
        "set": {"train.checkpoint_every": 100},
        "vary": [{"train.r": [0.3], "train.steps": [LONG]}, {"train.r": [0.2, 0.5]}],
    },
}


def grid(content: Any) -> Any:
    """A grid as the section holds it."""
    return SweepParams.parse({"g": content}, "sweep").grids["g"]


def names(content: Any) -> list[str]:
    return [experiment.name for experiment in experiments("g", grid(content))]


def test_a_grid_is_the_union_of_its_products_each_combination_once() -> None:
    content = {
        "set": {"train.steps": 10},
        "vary": [
            {"train.seed": [1, 42], "train.data_seed": [0]},
            {"train.seed": [42], "train.data_seed": [0, 1]},
            {"train.data_seed": [1, 2.0], "train.seed": [42.0]},
        ],
    }
    found = experiments("seeds", grid(content))
    assert [e.name for e in found] == [
        "seeds-seed=1-data_seed=0",
        "seeds-seed=42-data_seed=0",
        "seeds-seed=42-data_seed=1",
        "seeds-seed=42.0-data_seed=2.0",
    ]
    assert found[2].values == {"train.steps": 10, "train.seed": 42, "train.data_seed": 1}


def test_names_spell_whole_parameters_where_their_last_words_are_the_same() -> None:
    assert names({"vary": [{"train.seed": [1], "generate.seed": [2]}]}) == ["g-train.seed=1-generate.seed=2"]
    assert names({"vary": [{"train.r_mode": ["subset"], "train.r": [0.01, 1]}]}) == [
        "g-r_mode=subset-r=0.01",
        "g-r_mode=subset-r=1",
    ]


def test_a_product_of_more_parameters_leaves_the_names_of_the_others_as_they_are() -> None:
    first = {"train.r": [0.1, 0.2]}
    assert names({"vary": [first, {**first, "train.seed": [1]}]}) == [
        *names({"vary": [first]}),
        "g-r=0.1-seed=1",
        "g-r=0.2-seed=1",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (3, "sweep.g = 3: must be a section"),
        ({}, "sweep.g: vary = None must be a list of products"),
        ({"vary": {"train.r": [1]}}, "must be a list of products"),
        ({"vary": [{}]}, "must be a list of products"),
        ({"vary": [{"train.r": 0.1}]}, "sweep.g: vary: train.r = 0.1 must be a list of values"),
        ({"vary": [{"train.r": []}]}, "train.r = [] must be a list of values"),
        ({"vary": [{"train.r": [True]}]}, "train.r: True must be a finite number or a word"),
        ({"vary": [{"train.r": [float("nan")]}]}, "train.r: nan must be"),
        ({"vary": [{"train.r_mode": ["a b"]}]}, "train.r_mode: 'a b' must be"),
        ({"vary": [{"train.r": [1]}], "set": [2]}, "sweep.g: set = [2] must give parameters"),
        ({"vary": [{"train.r": [1]}], "set": {"train.r": None}}, "train.r: None must be"),
        ({"vary": [{"train.r": [1]}], "fix": {}}, "sweep.g.fix = {}: there is no such key; sweep.g has set, vary"),
    ],
)
def test_a_bad_grid_is_refused_with_what_is_wrong_and_what_is_allowed(content: Any, said: str) -> None:
    with pytest.raises(InputError) as error:
        grid(content)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_the_grids_of_params_yaml_vary_parameters_that_exist() -> None:
    sections = YAML(typ="safe").load((ROOT / "params.yaml").read_text())
    grids = params.read(ROOT / "params.yaml", "sweep", SweepParams).grids
    for name, content in grids.items():
        for experiment in experiments(name, content):
            for key in experiment.values:
                section, _, parameter = key.partition(".")
                assert parameter in sections[section], f"{name}: {key}"


def test_a_grid_that_has_no_word_for_a_name_is_refused() -> None:
    with pytest.raises(InputError, match=r"must be a word, not 'a/b'"):
        SweepParams.parse({"a/b": {"vary": [{"train.r": [1]}]}}, "sweep")


def test_only_the_stages_that_the_targets_need_are_run() -> None:
    stages = {
        "draw": {"deps": ["plots/c.csv"]},
        "judge": {"deps": ["model", "judge.py"], "plots": [{"plots/c.csv": {"cache": False}}]},
        "train": {"deps": ["data"], "outs": ["model"]},
        "make": {"outs": ["data"]},
    }
    assert upstream(stages, ["judge"]) == ["judge", "train", "make"]
    with pytest.raises(InputError, match="no stage 'guess'"):
        upstream(stages, ["guess"])


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """A clone with the grids ``here`` and ``cluster``; what runs in it at the end is killed."""
    clone = Clone(tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("state"))
    put(clone, GRIDS)
    yield clone
    kill(left({STATE: clone.env[STATE]}))


def put(clone: Clone, grids: dict[str, Any]) -> None:
    """Commit these grids, and sizes for the measures that suit the tiny task."""
    with edited(clone.folder / "params.yaml") as sections:
        sections["sweep"] = grids
        sections["train"]["steps"] = SHORT
        sections["progress"].update({"sequences": 60, "probe_fit": 100, "probe_test": 50})
    clone.commit("grids")


def sweep(clone: Clone, *arguments: str) -> subprocess.CompletedProcess:
    """Run the tool in a clone."""
    command = [sys.executable, *SWEEP, *arguments]
    return subprocess.run(
        command,
        cwd=clone.folder,
        env=clone.env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
    )


def lines(output: str, word: str) -> set[str]:
    """The experiments that a line of the output says something about."""
    return {line.split()[1] for line in output.splitlines() if line.split()[:1] == [word]}


def commits(clone: Clone) -> dict[str, str]:
    """The experiments of the repository: name and commit."""
    output = clone.run("git", "for-each-ref", "--format=%(refname) %(objectname)", "refs/exps/*/*/*")
    return {line.split()[0].rpartition("/")[2]: line.split()[1] for line in output.splitlines()}


def leftovers(clone: Clone) -> list[Path]:
    """Clones of experiments that are still there."""
    return [path for path in (clone.folder / ".dvc/tmp/sweep").glob("*/") if path.name != "submitit"]


@pytest.fixture(scope="module")
def here(clone: Clone) -> Clone:
    """A clone whose grid ``here`` has been run on this machine, twice, the second time without what cannot work."""
    clone.planned = sweep(clone, "plan", "here")
    clone.first = sweep(clone, "run", "here", "--jobs", "2")
    clone.made = commits(clone)
    clone.partial = sweep(clone, "collect", "here")
    clone.partial_table = pd.read_csv(clone.folder / "plots/sweep_here.csv")
    put(
        clone,
        GRIDS | {"here": GRIDS["here"] | {"vary": [{"train.r": [0.2, 0.5]}, {"train.r": [0.2], "train.lr": [0.001]}]}},
    )
    clone.second = sweep(clone, "run", "here", "--jobs", "2")
    return clone


def test_a_plan_lists_every_experiment_and_says_what_its_estimate_assumes(here: Clone) -> None:
    assert lines(here.planned.stdout, "missing") == {"here-r=0.2", "here-r=0.5", "here-r=0.2-lr=1e+30"}
    assert "0 of 3 done" in here.planned.stdout and "35 ms a step" in here.planned.stdout


def test_a_failed_experiment_leaves_the_others_alone_and_is_named_with_its_log(here: Clone) -> None:
    assert here.first.returncode == 1
    assert lines(here.first.stdout, "finished") == {"here-r=0.2", "here-r=0.5"} == here.made.keys()
    assert lines(here.first.stdout, "FAILED") == {"here-r=0.2-lr=1e+30"}
    (named,) = [line for line in here.first.stderr.splitlines() if "here-r=0.2-lr=1e+30" in line]
    log = Path(named.rpartition(": ")[2])
    assert "error: train.lr = 1e+30: the loss was not finite" in log.read_text()


def test_a_second_run_makes_only_what_is_missing(here: Clone) -> None:
    assert here.second.returncode == 0, here.second.stderr
    assert "2 of 3 experiments of grid here are done" in here.second.stdout
    assert lines(here.second.stdout, "started") == {"here-r=0.2-lr=0.001"}
    assert here.made.items() <= commits(here).items()


def test_experiments_share_the_cache_so_that_nothing_is_trained_twice(here: Clone) -> None:
    log = (here.folder / ".dvc/tmp/sweep/here-r=0.2-lr=0.001.log").read_text()  # the values of here-r=0.2
    assert "Stage 'train' is cached - skipping run" in log and "Running stage" not in log
    assert here.at("here-r=0.2-lr=0.001", "dvc.lock") == here.at("here-r=0.2", "dvc.lock")


def test_an_experiment_has_its_values_and_only_the_numbers_of_the_grid(here: Clone) -> None:
    train = YAML(typ="safe").load(here.at("here-r=0.2", "params.yaml"))["train"]
    assert (train["r"], train["checkpoint_every"]) == (0.2, 100)
    lock = YAML(typ="safe").load(here.at("here-r=0.2", "dvc.lock"))
    assert set(lock["stages"]) == {"generate", "train", "evaluate", "progress"}
    assert not leftovers(here)
    here.run("dvc", "exp", "show")  # dvc knows them as its own


def test_what_is_collected_are_the_numbers_of_the_experiments_in_the_order_of_the_grid(here: Clone) -> None:
    assert here.partial.returncode == 0, here.partial.stderr
    table = here.partial_table
    assert list(table.experiment) == ["here-r=0.2", "here-r=0.5"]
    for row in table.to_dict("records"):
        assert row["commit"] == here.made[row["experiment"]]
        metrics = json.loads(here.at(row["experiment"], "metrics/evaluate.json"))
        progress = json.loads(here.at(row["experiment"], "metrics/progress.json"))
        assert row["train.steps"] == SHORT and row["train.r"] == float(row["experiment"].rpartition("=")[2])
        assert row["2var_exact"] == pytest.approx(metrics["2var_exact"], abs=1e-6)
        for split in ("0var_exact", "2var_add_restricted"):
            assert row[f"{split}_mean_last_ten"] == pytest.approx(metrics["mean_last_ten"][split], abs=1e-6)
        for moment in MOMENTS:
            assert row[moment] == progress[moment] or (pd.isna(row[moment]) and progress[moment] is None)
    assert (here.folder / "plots/sweep_here.png").stat().st_size > 5000


def test_what_was_collected_stands_where_the_experiments_are_not(here: Clone, tmp_path: Path) -> None:
    here.run("git", "clone", "-q", str(here.folder), str(tmp_path / "elsewhere"))
    elsewhere = copy.copy(here)
    elsewhere.folder = tmp_path / "elsewhere"
    assert not commits(elsewhere)
    planned = sweep(elsewhere, "plan", "here")
    assert lines(planned.stdout, "done") == {"here-r=0.2", "here-r=0.5"}
    assert sweep(elsewhere, "collect", "here").returncode == 0
    pd.testing.assert_frame_equal(pd.read_csv(elsewhere.folder / "plots/sweep_here.csv"), here.partial_table)
    (elsewhere.folder / "stages/evaluate.py").open("a").write("# changed\n")
    elsewhere.commit("other code")
    assert lines(sweep(elsewhere, "plan", "here").stdout, "outdated") == {"here-r=0.2", "here-r=0.5"}


def test_work_that_experiments_would_not_see_is_refused(here: Clone) -> None:
    file = here.folder / "stages/evaluate.py"
    before = file.read_text()
    file.write_text(before + "# changed\n")
    try:
        done = sweep(here, "run", "here")
        assert done.returncode == 1
        assert done.stderr.startswith("error: stages/evaluate.py is not as it was committed")
    finally:
        file.write_text(before)


def test_experiments_outlive_commits_that_change_nothing_that_they_depend_on(here: Clone) -> None:
    experiment = Experiment("here-r=0.2", {"train.checkpoint_every": 100, "train.r": 0.2})
    start = here.run("git", "rev-parse", "HEAD").strip()

    def current(file: str, change: tuple[str, str]) -> bool | None:
        text = (here.folder / file).read_text()
        (here.folder / file).write_text(text.replace(*change))
        here.commit("change")
        result = Baseline.here(here.folder).result(experiment)
        here.run("git", "reset", "-q", "--hard", start)
        return result and result.current

    assert current("README.md", ("# ", "## ")) is True
    assert current("stages/draw/style.py", ('"""One', '"""1')) is True
    assert current("stages/evaluate.py", ('"""Accuracy', '"""The accuracy')) is False
    assert current("params.yaml", ("eval_size: 60", "eval_size: 70")) is None
    assert current("params.yaml", ("probe_fit: 100", "probe_fit: 101")) is None


def test_a_parameter_that_does_not_exist_and_a_grid_that_does_not_are_named(here: Clone) -> None:
    with pytest.raises(InputError, match=r"x: params.yaml has no parameter train.rr"):
        Baseline.here(here.folder).expected(Experiment("x", {"train.rr": 1}))
    done = sweep(here, "plan", "nowhere")
    assert done.returncode == 1
    assert done.stderr == "error: params.yaml has no grid 'nowhere' in section sweep; it has here, cluster\n"


def test_the_commands_of_a_job_see_its_share_of_the_cores_and_the_gpus_of_whoever_started_it(tmp_path: Path) -> None:
    job = Job(Baseline(tmp_path, "c"), Experiment("x", {}), tmp_path, tmp_path, threads=3, gpus={})
    environment = job.environment(tmp_path / "x")
    assert {environment[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")} == {"3"}
    assert "CUDA_VISIBLE_DEVICES" not in environment
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


@pytest.fixture(scope="module")
def on_cluster(clone: Clone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """The clone, its grid ``cluster`` run through Slurm with one job cancelled, then run again."""
    if reason := slurm.why_not():
        pytest.skip(reason)
    arguments = ("run", "cluster", "--executor", "slurm", "--partition", slurm.PARTITION, "--cpus", "1")
    state = Path(clone.env[STATE])
    folder = tmp_path_factory.mktemp("slurm")
    with slurm.cluster(folder) as variable:
        clone.env |= variable
        command = [sys.executable, *SWEEP, *arguments]
        with (folder / "first").open("w+") as output:
            first = subprocess.Popen(command, cwd=clone.folder, env=clone.env, stdout=output, stderr=subprocess.STDOUT)
            try:
                wait_for(lambda: list(state.glob("*/checkpoints/step_00000[2-9]*")), PATIENCE, "checkpoint")
                clone.run("scancel", f"--name=cluster-r=0.3-steps={LONG}")
                first.wait(PATIENCE)
            finally:
                first.kill()
            output.seek(0)
            clone.first, clone.code = output.read(), first.returncode
        clone.left = leftovers(clone)
        clone.refused = sweep(clone, *arguments[:-3], "nowhere")
        clone.second = sweep(clone, *arguments)
        yield clone
    del clone.env["SLURM_CONF"]
    assert not left(variable)


def test_a_job_cancelled_on_the_cluster_is_named_and_the_others_finish(on_cluster: Clone) -> None:
    assert on_cluster.code == 1
    assert lines(on_cluster.first, "finished") == {"cluster-r=0.2", "cluster-r=0.5"}
    assert lines(on_cluster.first, "FAILED") == {f"cluster-r=0.3-steps={LONG}"}
    assert f"cluster-r=0.3-steps={LONG} failed: " in on_cluster.first and ".log" in on_cluster.first
    assert not on_cluster.left


def test_a_second_run_on_the_cluster_goes_on_where_the_cancelled_job_was(on_cluster: Clone) -> None:
    assert on_cluster.second.returncode == 0, on_cluster.second.stderr
    assert lines(on_cluster.second.stdout, "started") == {f"cluster-r=0.3-steps={LONG}"}
    log = (on_cluster.folder / f".dvc/tmp/sweep/cluster-r=0.3-steps={LONG}.log").read_text()
    assert "going on from step" in log
    assert json.loads(on_cluster.at(f"cluster-r=0.3-steps={LONG}", "metrics/train.json"))["step"] == LONG


def test_what_the_cluster_refuses_is_said_in_a_sentence(on_cluster: Clone) -> None:
    assert on_cluster.refused.returncode == 1
    assert f"error: sbatch refused cluster-r=0.3-steps={LONG}: " in on_cluster.refused.stderr
    assert "partition" in on_cluster.refused.stderr and "Traceback" not in on_cluster.refused.stderr


@pytest.fixture
def table() -> pd.DataFrame:
    """Three experiments over seeds, of which one reaches all phases, one the first, one none."""
    return pd.DataFrame(
        {
            "experiment": ["a", "b", "c"],
            "commit": ["1", "2", "3"],
            "train.seed": [1, 2, 3],
            "train.steps": [1000, 1000, 1000],
            "0var_exact": [1.0, 0.9, 0.1],
            "2var_exact": [0.9, 0.3, 0.1],
            "addition": [100, 200, None],
            "assignment": [300, None, None],
            "refinement": [400, None, None],
            "grokking_delay": [50, 100, None],
        }
    )


def test_phases_that_were_not_reached_are_drawn_beyond_the_end_of_the_run(table: pd.DataFrame) -> None:
    (axis,) = drawing.phases(table).axes
    drawn = {"full": [], "none": []}
    for line in axis.lines:
        drawn[line.get_fillstyle()] += [(x, y) for x, y in line.get_xydata() if not math.isnan(x)]
    assert sorted(drawn["full"]) == [(100, 0), (200, 1), (300, 0), (400, 0)]
    assert sorted(y for _, y in drawn["none"]) == [1, 1, 2, 2, 2]
    assert min(x for x, _ in drawn["none"]) > 1000
    assert [label.get_text() for label in axis.get_yticklabels()] == ["seed 1", "seed 2", "seed 3"]


def test_an_experiment_that_never_adds_is_a_cross_and_no_point_of_the_curve(table: pd.DataFrame) -> None:
    table = table.rename(columns={"train.seed": "train.lr"})
    axis = drawing.accuracies(table).axes[2]
    curve, crosses = axis.lines
    assert [point for point in curve.get_xydata().tolist() if not math.isnan(point[1])] == [[1, 50], [2, 100]]
    assert crosses.get_marker() == "x" and crosses.get_xdata().tolist() == [3]


@pytest.mark.parametrize("delays, top", [([50, 100, None], 100), ([0, 0, 0], 1000), ([None, None, None], 1000)])
def test_delays_are_drawn_from_zero_on_an_axis_of_steps(table: pd.DataFrame, delays: list, top: int) -> None:
    table = table.rename(columns={"train.seed": "train.lr"}).assign(grokking_delay=pd.Series(delays, dtype=float))
    low, high = drawing.accuracies(table).axes[2].get_ylim()
    assert -0.1 * top < low < 0 and top < high < 1.3 * top


def test_both_published_thresholds_are_marked_where_both_sweeps_are_collected(
    tmp_path: Path, table: pd.DataFrame
) -> None:
    (tmp_path / "plots").mkdir()
    modes = pd.Series(["subset", "subset", "frequency"])
    r = table.rename(columns={"train.seed": "train.r"}).assign(**{"train.r": [0.01, 0.5, 0.5], "train.r_mode": modes})
    f = table.rename(columns={"train.seed": "generate.f"}).assign(**{"generate.f": [0.1, 0.2, 0.9]})
    r.to_csv(tmp_path / "plots/sweep_r.csv", index=False)
    assert dict(drawing.figures(tmp_path)).keys() == {"sweep_r"}
    f.head(1).to_csv(tmp_path / "plots/sweep_f.csv", index=False)
    table.head(1).to_csv(tmp_path / "plots/sweep_seeds.csv", index=False)
    found = dict(drawing.figures(tmp_path))
    assert found.keys() == {"sweep_f", "sweep_r", "sweep_seeds", "sweep_thresholds"}
    left, right = found["sweep_thresholds"].axes
    assert [text.get_text() for axis in (left, right) for text in axis.texts] == ["published: 0.2", "published: 0.25"]
    lines = {line.get_label(): line.get_xydata().tolist() for line in left.lines if line.get_marker() != "None"}
    assert lines == {"r_mode frequency": [[0.5, 0.1]], "r_mode subset": [[0.01, 0.9], [0.5, 0.3]]}


def test_seeds_of_a_sweep_over_another_parameter_are_lines_of_their_own(tmp_path: Path, table: pd.DataFrame) -> None:
    (tmp_path / "plots").mkdir()
    table = table.assign(**{"train.r": [0.1, 0.2, 0.3]})
    more = pd.concat([table.assign(**{"train.seed": seed}) for seed in (1, 2)])
    more.to_csv(tmp_path / "plots/sweep_r.csv", index=False)
    (figure,) = dict(drawing.figures(tmp_path)).values()
    labels = {line.get_label() for line in figure.axes[0].lines}
    assert labels == {"seed 1", "seed 2"}
    assert figure.axes[1].get_xlabel() == drawing.WORDS["train.r"]
