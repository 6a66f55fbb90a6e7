"""Sweeps: many experiments, run here or on a cluster, and their numbers in one table (paper, figure on thresholds).

Not a stage. Section ``sweep`` of params.yaml names grids of parameter values; each combination is a DVC experiment
(`stages.parts.experiments`). What is finished is not run again, so that a grid can be made in several goes.
"""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pandas as pd
import typer
from pydantic import Field, model_validator

from stages.core import params
from stages.core.outputs import write_csv
from stages.core.params import InputError, Section
from stages.core.phases import PHASES
from stages.draw import style
from stages.draw import sweep as drawing
from stages.parts.experiments import GPUS, TARGETS, Baseline, Experiment, Job, Value
from stages.parts.scheduling import Scheduler, run_all

ACCURACIES = ("0var_exact", "2var_exact")  # of the last checkpoint
MEANS = ("0var_exact", "1var_add_restricted", "2var_add_restricted")  # over the last ten, as single ones can dip
MOMENTS = (*PHASES, "spike_before", "spike", "grokking_delay")
WORD = r"[A-Za-z][A-Za-z0-9_.]*"
MS_PER_STEP = 35.0  # a training step at the default sizes, one thread, both of two cores busy


class Grid(Section):
    """A grid of section ``sweep``: parameters set in all experiments, and products of values that vary."""

    set: dict[str, Any] = Field(default_factory=dict)
    vary: list[dict[str, list[Any]]]

    @model_validator(mode="before")
    @classmethod
    def _mappings_of_values(cls, grid: Any) -> Any:
        fixed, blocks = grid.get("set", {}), grid.get("vary")
        if not isinstance(fixed, dict):
            raise ValueError(f"set = {fixed!r} must give parameters and their values")
        if not isinstance(blocks, list) or not blocks or not all(isinstance(block, dict) and block for block in blocks):
            raise ValueError(f"vary = {blocks!r} must be a list of products, each of parameters and lists of values")
        for key, values in [(k, v) for block in blocks for k, v in block.items()]:
            if not isinstance(values, list) or not values:
                raise ValueError(f"vary: {key} = {values!r} must be a list of values")
        for key, value in [*fixed.items(), *((k, v) for block in blocks for k in block for v in block[k])]:
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number and not (isinstance(value, str) and re.fullmatch(WORD, value)):
                raise ValueError(f"{key}: {value!r} must be a finite number or a word")
        return grid


class SweepParams(Section):
    """Section ``sweep``: grids by name."""

    grids: dict[str, Grid]

    @classmethod
    def parse(cls, values: Any, where: str) -> Self:
        """As for other sections; every key is a grid's name."""
        if not isinstance(values, dict):
            raise InputError(f"{where} = {values!r}: must be a section with a grid under each key")
        if bad := [name for name in values if not re.fullmatch(WORD, str(name))]:
            raise InputError(f"{where}: a grid's name must be a word, not {bad[0]!r}")
        return cls(grids={name: Grid.parse(grid, f"{where}.{name}") for name, grid in values.items()})


def varied(grid: Grid) -> list[str]:
    """The parameters that vary, in the order in which they first occur."""
    return list(dict.fromkeys(key for block in grid.vary for key in block))


def experiments(name: str, grid: Grid) -> list[Experiment]:
    """Every combination of a grid once, named after the grid and the values: ``r-r_mode=subset-r=0.05``."""
    keys = varied(grid)
    last = [key.rpartition(".")[2] for key in keys]
    short = dict(zip(keys, last if len(set(last)) == len(last) else keys, strict=True))
    found = {}
    for block in grid.vary:
        for combination in itertools.product(*block.values()):
            values: dict[str, Value] = dict(zip(block, combination, strict=True))
            parts = (f"{short[key]}={values[key]}" for key in keys if key in values)
            experiment = Experiment("-".join((name, *parts)), {**grid.set, **values})
            found.setdefault(frozenset(values.items()), experiment)
    return list(found.values())


def collected(name: str, root: Path) -> dict[str, dict[str, Any]]:
    """The rows of plots/sweep_GRID.csv by experiment: results that stand even where their experiments are not."""
    file = root / f"plots/sweep_{name}.csv"
    if not file.exists():
        return {}
    return {row["experiment"]: row for row in pd.read_csv(file).to_dict("records")}


def status(name: str, experiment: Experiment, baseline: Baseline) -> str:
    """``done``, ``outdated`` (made by other code than what is committed now) or ``missing``."""
    result, row = baseline.result(experiment), collected(name, baseline.root).get(experiment.name)
    if (result and result.current) or (row and row["fingerprint"] == baseline.fingerprint(experiment)):
        return "done"
    return "outdated" if result or row else "missing"


def table(name: str, grid: Grid, baseline: Baseline) -> pd.DataFrame:
    """One row a finished experiment, in the grid's order: name, commit, values, final accuracies, phases.

    Where this repository does not have the experiment, its row in the table collected before is kept.

    Raises:
        InputError: none is finished.
    """
    keys = list(dict.fromkeys([*varied(grid), "train.steps"]))
    rows, before = [], collected(name, baseline.root)
    for experiment in experiments(name, grid):
        result, row = baseline.result(experiment), before.get(experiment.name)
        fingerprint = baseline.fingerprint(experiment)
        if row and (result is None or (not result.current and row["fingerprint"] == fingerprint)):
            rows.append(row)
            continue
        if result is None:
            continue
        expected = baseline.expected(experiment)
        values = {key: expected[key.partition(".")[0]][key.partition(".")[2]] for key in keys}
        accuracy, progress = (json.loads(baseline.show(result.commit, f"metrics/{stage}.json")) for stage in TARGETS)
        final = {split: accuracy[split] for split in ACCURACIES}
        final |= {f"{split}_mean_last_ten": accuracy["mean_last_ten"][split] for split in MEANS}
        moments = {moment: progress[moment] for moment in MOMENTS}
        made = {"commit": result.commit, "fingerprint": fingerprint if result.current else ""}
        rows.append({"experiment": experiment.name, **made, **values, **final, **moments})
    if not rows:
        raise InputError(f"no experiment of grid {name} is finished: run them with `python -m stages.sweep run {name}`")
    return pd.DataFrame(rows).astype(dict.fromkeys(MOMENTS, "Int64"))


def grid_named(name: str, params_file: Path) -> Grid:
    """A grid of the parameter file.

    Raises:
        InputError: there is none of that name.
    """
    grids = params.read(params_file, "sweep", SweepParams).grids
    if name not in grids:
        raise InputError(f"{params_file} has no grid {name!r} in section sweep; it has {', '.join(grids) or 'none'}")
    return grids[name]


Name = Annotated[str, typer.Argument(metavar="GRID", help="A grid of section sweep.")]
ParamsFile = Annotated[Path, typer.Option("--params", help="Parameter file that names the grids.")]


def plan(
    grid: Annotated[str | None, typer.Argument(metavar="[GRID]", help="A grid of section sweep; all without.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Experiments at once, for the estimate.")] = 2,
    ms_per_step: Annotated[float, typer.Option(min=0, help="Time of a training step, for the estimate.")] = MS_PER_STEP,
    params_file: ParamsFile = params.PARAMS,
) -> None:
    """List the experiments of a grid, what is done of them, and how long training the rest may take."""
    baseline = Baseline.here(Path.cwd())
    names = [grid] if grid else list(params.read(params_file, "sweep", SweepParams).grids)
    for name in names:
        steps, todo, planned = 0, 0, experiments(name, grid_named(name, params_file))
        for experiment in planned:
            word = status(name, experiment, baseline)
            print(f"{word:9} {experiment.name}")
            if word != "done":
                todo, steps = todo + 1, steps + baseline.expected(experiment)["train"]["steps"]
        hours = steps * ms_per_step / 3_600_000 / min(jobs, max(todo, 1))
        print(
            f"grid {name}: {len(planned) - todo} of {len(planned)} done; training the rest takes about {hours:.1f} h "
            f"if {jobs} run at once and each takes {ms_per_step:g} ms a step (--jobs, --ms-per-step); "
            "judging the checkpoints comes on top"
        )


def run(
    grid: Name,
    executor: Annotated[Literal["local", "slurm"], typer.Option(help="This machine, or a cluster.")] = "local",
    jobs: Annotated[int | None, typer.Option(min=1, help="Experiments at once; 2 here, all on a cluster.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm: partition.")] = None,
    cpus: Annotated[int, typer.Option(min=1, help="Slurm: cores an experiment.")] = 2,
    hours: Annotated[float, typer.Option(min=0, help="Slurm: time limit of an experiment.")] = 24,
    slurm: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Slurm: another option of sbatch, such as account=me.")
    ] = None,
    work: Annotated[
        Path, typer.Option(help="Folder for logs and, while they run, clones; every node must see it.")
    ] = Path(".dvc/tmp/sweep"),
    params_file: ParamsFile = params.PARAMS,
) -> None:
    """Run what is missing of a grid, each experiment in a clone of the repository. What is not committed is not run."""
    baseline = Baseline.here(Path.cwd())
    planned = experiments(grid, grid_named(grid, params_file))
    if changed := baseline.uncommitted():
        raise InputError(f"{changed[0]} is not as it was committed, and experiments run what is committed: commit it")
    if executor == "local":
        scheduler = Scheduler.local(jobs or 2)
    else:
        options = {"partition": partition} if partition else {}
        for option in slurm or []:
            key, given, value = option.partition("=")
            if not given:
                raise InputError(f"--slurm {option}: must be KEY=VALUE")
            options[key] = value
        scheduler = Scheduler.slurm(jobs or len(planned), cpus, hours, options)
    cache = subprocess.check_output([sys.executable, "-m", "dvc", "cache", "dir"], cwd=baseline.root, text=True)
    gpus = {name: os.environ[name] for name in (GPUS,) if name in os.environ} if executor == "local" else None
    common = (work.absolute(), baseline.root / cache.strip(), scheduler.threads, gpus)
    todo = [Job(baseline, e, *common) for e in planned if status(grid, e, baseline) != "done"]
    print(f"{len(planned) - len(todo)} of {len(planned)} experiments of grid {grid} are done")
    failed = run_all(todo, scheduler)
    for job in failed:
        why = job.log if job.log.exists() else f"{job.work} (it has not started: see the logs of submitit)"
        print(f"{job.experiment.name} failed: {why}", file=sys.stderr)
    if failed:
        print("the same command again runs only what is missing", file=sys.stderr)
        raise typer.Exit(1)


def collect(
    grid: Name,
    out: Annotated[Path, typer.Option(help="Folder below which plots/ is written.")] = Path("."),
    params_file: ParamsFile = params.PARAMS,
) -> None:
    """Write plots/sweep_GRID.csv from the experiments that are finished, and draw it."""
    chosen, baseline = grid_named(grid, params_file), Baseline.here(Path.cwd())
    rows = table(grid, chosen, baseline)
    write_csv(out / f"plots/sweep_{grid}.csv", rows)
    for stem, figure in drawing.figures(out):
        style.save(figure, out / f"plots/{stem}.png")
    print(f"{len(rows)} of {len(experiments(grid, chosen))} experiments of grid {grid}: {out}/plots/sweep_{grid}.csv")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    for command in (plan, run, collect):
        app.command()(command)
    try:
        app()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
