"""Jobs through submitit: on this machine, or on a cluster with Slurm."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import submitit

from stages.core.params import InputError
from stages.parts.experiments import Job

ONE_YEAR = 365 * 24 * 60  # minutes: jobs on this machine may take as long as they like


@dataclass
class Scheduler:
    """Starts jobs and knows which of them have not ended.

    Attributes:
        at_once: how many jobs may wait or run at the same time.
        threads: each job's share of the cores.
        poll: seconds between looks at the jobs.
        late: seconds for which what a job has written may not be visible here, on a file system of several machines.
    """

    at_once: int
    threads: int
    poll: float
    late: float = 0.0
    parameters: dict[str, object] = field(default_factory=dict)
    cluster: str = "local"

    @classmethod
    def local(cls, at_once: int) -> "Scheduler":
        """This machine, whose cores the jobs share."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(at_once, max(1, cores // at_once), poll=0.5, parameters={"timeout_min": ONE_YEAR})

    @classmethod
    def slurm(cls, at_once: int, cpus: int, hours: float, options: dict[str, str]) -> "Scheduler":
        """The cluster that `sbatch` submits to; `options` go into the head of the batch script.

        Raises:
            InputError: there is no such cluster.
        """
        if shutil.which("sbatch") is None:
            raise InputError(
                "--executor slurm: there is no command sbatch here; run this on a login node of the cluster"
            )
        parameters: dict[str, object] = {
            "timeout_min": max(1, round(60 * hours)),
            "cpus_per_task": cpus,
            "slurm_srun_args": [f"--cpus-per-task={cpus}"],  # srun does not take it from the batch script
            "slurm_additional_parameters": options,
        }
        return cls(at_once, cpus, poll=5.0, late=15.0, parameters=parameters, cluster="slurm")

    def submit(self, job: Job) -> submitit.Job:
        """Hand a job over.

        Raises:
            InputError: the cluster refuses it.
        """
        executor = submitit.AutoExecutor(folder=job.work / "submitit" / job.experiment.name, cluster=self.cluster)
        executor.update_parameters(name=job.experiment.name, **self.parameters)
        try:
            return executor.submit(job)
        except submitit.core.utils.FailedJobError as error:
            raise InputError(f"sbatch refused {job.experiment.name}: {' '.join(str(error).split())}") from None

    def alive(self, jobs: Iterable[submitit.Job]) -> set[str]:
        """The ids of those that wait or run."""
        if self.cluster == "local":
            return {job.job_id for job in jobs if not job.done()}
        # Not by `done`, which asks sacct: clusters without an accounting database have none.
        command = ["squeue", "--me", "--noheader", "--format=%A"]
        listed = subprocess.run(command, capture_output=True, text=True)
        return {job.job_id for job in jobs} if listed.returncode else set(listed.stdout.split())


def run_all(jobs: Sequence[Job], scheduler: Scheduler) -> list[Job]:
    """Run jobs and say what happens to them.

    Returns:
        the jobs whose experiments are not finished now.
    """
    waiting, running, ended = list(jobs), {}, {}
    failed = []
    while waiting or running:
        while waiting and len(running) < scheduler.at_once:
            job = waiting.pop(0)
            submitted = scheduler.submit(job)
            running[submitted.job_id] = job, submitted
            print(f"started   {job.experiment.name}", flush=True)
        time.sleep(scheduler.poll)
        alive = scheduler.alive(submitted for _, submitted in running.values())
        for number in running.keys() - alive:
            job, submitted = running[number]
            waited = time.monotonic() - ended.setdefault(number, time.monotonic())
            if job.finished():
                shutil.rmtree(submitted.paths.folder, ignore_errors=True)
                print(f"finished  {job.experiment.name}", flush=True)
            elif submitted.paths.result_pickle.exists() or waited >= scheduler.late:
                failed.append(job)
                print(f"FAILED    {job.experiment.name}", flush=True)
            else:
                continue
            del running[number]
    return failed
