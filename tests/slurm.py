"""A real Slurm cluster of one node, on the loopback interface, for as long as a test needs it."""

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.processes import free_ports, kill, left, sbin, wait_for

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "scancel", "sinfo", "squeue")
PARTITION = "tests"

# As root, without control groups, accounting, or anything else that a container may lack.
CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={node}(127.0.0.1)
NodeName={node} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName={partition} Nodes={node} Default=YES MaxTime=INFINITE State=UP
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
ReturnToService=2
"""


def why_not() -> str | None:
    """Why no cluster can be started here; None if one can."""
    missing = [name for name in (*DAEMONS, *COMMANDS) if sbin(name) is None]
    if missing:
        return f"Slurm is not installed (no {', '.join(missing)})"
    return None if os.geteuid() == 0 else "Slurm's daemons start jobs only as root"


@contextmanager
def cluster(folder: Path, patience: float = 60) -> Iterator[dict[str, str]]:
    """Start the daemons, wait until the node is idle, and stop all of it at the end, jobs included.

    Args:
        folder: holds everything that the daemons write.

    Yields:
        the environment variable that makes Slurm's commands find the cluster.
    """
    node = socket.gethostname().partition(".")[0]
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir()
    munge = folder / "munge"
    munge.chmod(0o755)
    key = munge / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    controller_port, node_port = free_ports(2)
    configuration = folder / "slurm.conf"
    facts = {"node": node, "cpus": os.cpu_count(), "partition": PARTITION, "folder": folder}
    configuration.write_text(CONFIGURATION.format(**facts, controller_port=controller_port, node_port=node_port))
    variable = {"SLURM_CONF": str(configuration)}
    environment = {**os.environ, **variable}

    files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
    commands = {
        # --force: the folder of its socket is for root alone, which is who uses it here.
        "munged": ["--foreground", "--force", f"--socket={munge}/socket", *files],
        "slurmctld": ["-D", "-f", str(configuration)],
        "slurmd": ["-D", "-f", str(configuration), "-N", node],
    }
    started: list[subprocess.Popen] = []
    try:
        for name, arguments in commands.items():
            with (folder / f"{name}.out").open("w") as out:
                command = [sbin(name), *arguments]
                started.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
            wait_for(lambda name=name: name != "munged" or (munge / "socket").exists(), patience, name)
        wait_for(lambda: ask("sinfo", "-h", "-o", "%t", env=environment) == "idle", patience, "an idle node")
        yield variable
    finally:
        ask("scancel", "--user=root", env=environment)
        end = time.monotonic() + 10
        while ask("squeue", "-h", env=environment) and time.monotonic() < end:
            time.sleep(0.5)
        for daemon in reversed(started):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        kill(left(variable))


def ask(*command: str, env: dict[str, str]) -> str:
    """What a command prints, empty if it fails."""
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
