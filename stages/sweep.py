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
from collections.abc import Iterator
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
from stages.parts.experiments import GPUS, TARGETS, Baseline, Experiment, Job, Result, Value
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


def known(
    name: str, grid: Grid, baseline: Baseline
) -> Iterator[tuple[Experiment, Result | None, dict[str, Any] | None, str]]:
    """Every experiment in order, with its result here, its row in plots/sweep_GRID.csv, and its fingerprint now.

    Rows collected before stand even where their experiments are not.
    """
    file = baseline.root / f"plots/sweep_{name}.csv"
    rows = pd.read_csv(file).to_dict("records") if file.exists() else []
    before = {row["experiment"]: row for row in rows}
    for experiment in experiments(name, grid):
        yield experiment, baseline.result(experiment), before.get(experiment.name), baseline.fingerprint(experiment)


def status(result: Result | None, row: dict[str, Any] | None, fingerprint: str) -> str:
    """``done``, ``outdated`` (made by other code than what is committed now) or ``missing``."""
    if (result and result.current) or (row and row["fingerprint"] == fingerprint):
        return "done"
    return "outdated" if result or row else "missing"


def table(name: str, grid: Grid, baseline: Baseline) -> pd.DataFrame:
    """One row a finished experiment, in the grid's order: name, commit, values, final accuracies, phases.

    Where this repository does not have the experiment, its row in the table collected before is kept.

    Raises:
        InputError: none is finished.
    """
    keys = list(dict.fromkeys([*varied(grid), "train.steps"]))
    rows = []
    for experiment, result, row, fingerprint in known(name, grid, baseline):
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


def grids_of(params_file: Path, name: str | None = None) -> dict[str, Grid]:
    """The grids of the parameter file, or the one of a name.

    Raises:
        InputError: there is none of that name.
    """
    grids = params.read(params_file, "sweep", SweepParams).grids
    if name not in (None, *grids):
        raise InputError(f"{params_file} has no grid {name!r} in section sweep; it has {', '.join(grids) or 'none'}")
    return grids if name is None else {name: grids[name]}


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
    for name, chosen in grids_of(params_file, grid).items():
        planned = [(experiment, status(*facts)) for experiment, *facts in known(name, chosen, baseline)]
        for experiment, word in planned:
            print(f"{word:9} {experiment.name}")
        todo = [baseline.expected(e)["train"]["steps"] for e, word in planned if word != "done"]
        hours = sum(todo) * ms_per_step / 3_600_000 / min(jobs, max(len(todo), 1))
        print(
            f"grid {name}: {len(planned) - len(todo)} of {len(planned)} done; training the rest takes about "
            f"{hours:.1f} h if {jobs} run at once and each takes {ms_per_step:g} ms a step (--jobs, --ms-per-step); "
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
    chosen = grids_of(params_file, grid)[grid]
    if changed := baseline.uncommitted():
        raise InputError(f"{changed[0]} is not as it was committed, and experiments run what is committed: commit it")
    planned = list(known(grid, chosen, baseline))
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
    todo = [Job(baseline, experiment, *common) for experiment, *facts in planned if status(*facts) != "done"]
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
    chosen, baseline = grids_of(params_file, grid)[grid], Baseline.here(Path.cwd())
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
