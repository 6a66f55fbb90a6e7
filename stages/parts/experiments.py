"""Experiments of a sweep: named DVC experiments with known values, each made in a clone of its own.

A clone shares the DVC cache with the repository that it came from and pushes the experiment's commit back to it, so
that experiments run side by side, on one machine or on the nodes of a cluster that share a file system.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil
from filelock import FileLock
from ruamel.yaml import YAML

from stages.core.params import InputError

TARGETS = ("evaluate", "progress")  # the stages whose numbers a sweep collects
PARAMS = "params.yaml"
GPUS = "CUDA_VISIBLE_DEVICES"
MARK = "DVC_SITE_CACHE_DIR"  # of a clone is in the clone, and so goes with it and tells whose a process is

Value = int | float | str
Values = Mapping[str, Value]


@dataclass(frozen=True)
class Experiment:
    """A name, and the parameters (``train.r``) whose values differ from params.yaml's."""

    name: str
    values: Values


@dataclass(frozen=True)
class Result:
    """The commit of a finished experiment, and whether the code of its stages is the baseline's."""

    commit: str
    current: bool


def git(folder: Path, *arguments: str) -> str:
    """What a git command prints.

    Raises:
        InputError: it failed; with the last line of what it said.
    """
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise InputError(f"git {arguments[0]} failed in {folder}: {said[-1]}")
    return done.stdout


def upstream(stages: Mapping[str, Any], targets: Iterable[str]) -> list[str]:
    """The stages of dvc.yaml that have to run for `targets`, themselves among them, in the order of the file.

    Raises:
        InputError: a target is no stage.
    """
    maker = {}
    for name, stage in stages.items():
        for out in [out for kind in ("outs", "metrics", "plots") for out in stage.get(kind, [])]:
            maker[out if isinstance(out, str) else next(iter(out))] = name
    found, todo = set(), set(targets)
    if unknown := todo - stages.keys():
        raise InputError(f"dvc.yaml has no stage {min(unknown)!r}")
    while todo:
        found |= todo
        todo = {maker[dep] for name in todo for dep in stages[name].get("deps", []) if dep in maker} - found
    return [name for name in stages if name in found]


@dataclass(frozen=True)
class Baseline:
    """The commit that experiments start from, in the repository at `root`."""

    root: Path
    commit: str

    @classmethod
    def here(cls, folder: Path) -> "Baseline":
        """What is checked out in the repository that `folder` belongs to."""
        root = Path(git(folder, "rev-parse", "--show-toplevel").strip())
        return cls(root, git(root, "rev-parse", "HEAD").strip())

    def show(self, commit: str, file: str) -> str:
        """A file as a commit has it."""
        return git(self.root, "show", f"{commit}:{file}")

    @cached_property
    def stages(self) -> dict[str, Any]:
        """The stages that experiments run, as dvc.yaml describes them."""
        stages = YAML(typ="safe").load(self.show(self.commit, "dvc.yaml"))["stages"]
        return {name: stages[name] for name in upstream(stages, TARGETS)}

    @cached_property
    def code(self) -> dict[str, str]:
        """Every module that those stages depend on, with the MD5 sum of its contents, as dvc.lock names it."""
        files = {dep for stage in self.stages.values() for dep in stage.get("deps", []) if dep.endswith(".py")}
        return {f: hashlib.md5(self.show(self.commit, f).encode()).hexdigest() for f in sorted(files)}

    @cached_property
    def params(self) -> dict[str, Any]:
        """params.yaml."""
        return YAML(typ="safe").load(self.show(self.commit, PARAMS))

    def uncommitted(self) -> list[str]:
        """Files that the experiments depend on and that are not as the commit has them."""
        lines = git(self.root, "status", "--porcelain", "--", "dvc.yaml", PARAMS, *self.code).splitlines()
        return [line[3:] for line in lines]

    def expected(self, experiment: Experiment) -> dict[str, Any]:
        """The sections of params.yaml with the experiment's values in their place.

        Raises:
            InputError: a value is for a parameter that params.yaml does not have.
        """
        sections = {name: dict(section) for name, section in self.params.items() if isinstance(section, dict)}
        for key, value in experiment.values.items():
            section, _, name = key.partition(".")
            if name not in sections.get(section, {}):
                raise InputError(f"{experiment.name}: {PARAMS} has no parameter {key}")
            sections[section][name] = value
        return sections

    def fingerprint(self, experiment: Experiment) -> str:
        """A short hash of all that decides the experiment's numbers: its parameters, and the code of its stages."""
        expected = self.expected(experiment)
        sections = {name for stage in self.stages.values() for name in stage.get("params", [])}
        facts = {"params": {name: expected[name] for name in sorted(sections)}, "code": self.code}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]

    def result(self, experiment: Experiment) -> Result | None:
        """The experiment's commit, if it is finished: with the baseline's code if there is one, else the newest.

        Any commit may have been its baseline. What counts is what DVC wrote into dvc.lock: that all its stages ran,
        and with which parameters and code.
        """
        wanted, other = self.expected(experiment), None
        refs = f"refs/exps/*/*/{experiment.name}"
        commits = git(self.root, "for-each-ref", "--sort=-committerdate", "--format=%(objectname)", refs).split()
        for commit in commits:
            lock = YAML(typ="safe").load(self.show(commit, "dvc.lock"))["stages"]
            entries = [lock.get(name, {}) for name in self.stages]
            if all(
                entry.get("params", {}).get(PARAMS, {}) == {section: wanted[section] for section in stage["params"]}
                for entry, stage in zip(entries, self.stages.values(), strict=True)
                if "params" in stage
            ):
                made_with = {dep["path"]: dep.get("md5") for entry in entries for dep in entry.get("deps", [])}
                if self.code.items() <= made_with.items():
                    return Result(commit, current=True)
                other = other or Result(commit, current=False)
        return other


@dataclass(frozen=True)
class Job:
    """One experiment to be run, in this process or, pickled, in one that a scheduler starts.

    Attributes:
        work: folder for the clone while the experiment runs, and for its log.
        cache: the DVC cache that all clones share.
        threads: this job's share of the cores.
        gpus: the setting of CUDA_VISIBLE_DEVICES, if any; None leaves what the scheduler has set.
    """

    baseline: Baseline
    experiment: Experiment
    work: Path
    cache: Path
    threads: int
    gpus: Mapping[str, str] | None = None

    @property
    def log(self) -> Path:
        """The file that holds all that the experiment's commands print."""
        return self.work / f"{self.experiment.name}.log"

    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        result = self.baseline.result(self.experiment)
        return result is not None and result.current

    def __call__(self) -> None:
        """Run the experiment, unless another job that ran it meanwhile has finished it.

        Raises:
            subprocess.CalledProcessError: a command failed; its output is in the log.
        """
        signal.signal(signal.SIGTERM, _stop)  # so that a cancelled job still clears up
        with FileLock(self.work / f"{self.experiment.name}.lock"):
            if self.finished():
                return
            clone = self.work / self.experiment.name
            clear(clone)
            try:
                with self.log.open("w", encoding="utf-8") as log:
                    self._run(clone, log)
            finally:
                clear(clone)

    def _run(self, clone: Path, log: IO[str]) -> None:
        """Clone the repository, run the experiment there and push its commit back."""
        name, root = self.experiment.name, str(self.baseline.root)
        environment = self.environment(clone)

        def call(*command: str, folder: Path = clone) -> None:
            log.write(f"+ {' '.join(command)}\n")
            log.flush()
            subprocess.run(command, cwd=folder, env=environment, check=True, stdout=log, stderr=subprocess.STDOUT)

        dvc = (sys.executable, "-m", "dvc")
        call("git", "clone", "--quiet", "--no-checkout", root, str(clone), folder=self.work)
        call("git", "checkout", "--quiet", "--detach", self.baseline.commit)
        call(*dvc, "cache", "dir", "--quiet", "--local", str(self.cache))
        settings = [part for key, value in self.experiment.values.items() for part in ("-S", f"{key}={value}")]
        call(*dvc, "exp", "run", "--name", name, *settings, *TARGETS)
        (ref,) = git(clone, "for-each-ref", "--format=%(refname)", f"refs/exps/*/*/{name}").split()
        call("git", "push", "--quiet", root, f"+{ref}:{ref}")

    def environment(self, clone: Path) -> dict[str, str]:
        """The environment of the experiment's commands."""
        environment = dict(os.environ)
        # The stages call `python`: it must be this one, also where no virtual environment was activated.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        environment[MARK] = str(site(clone))
        for library in ("OMP", "MKL", "OPENBLAS"):
            environment[f"{library}_NUM_THREADS"] = str(self.threads)
        if self.gpus is not None:
            environment.pop(GPUS, None)
            environment.update(self.gpus)
        return environment


def site(clone: Path) -> Path:
    """Where DVC keeps what it usually keeps for all repositories of a machine."""
    return clone / ".dvc/tmp/site"


def clear(folder: Path) -> None:
    """Delete a clone, after ending what a job that was killed may have left running for it."""
    left = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get(MARK) == str(site(folder))]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=10)
    shutil.rmtree(folder, ignore_errors=True)


class CancelledError(RuntimeError):
    """The scheduler wants the job to end."""


def _stop(number: int, _frame: object) -> NoReturn:
    raise CancelledError(signal.Signals(number).name)
