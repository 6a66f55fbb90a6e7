"""Programs, ports and processes of the tests that start more than one."""

import os
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import psutil


def sbin(name: str) -> str | None:
    """The path of a program; daemons need not be on the path of users."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nothing listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def left(variable: dict[str, str]) -> list[psutil.Process]:
    """The processes with this variable in their environment that still run."""
    ((name, value),) = variable.items()
    processes = psutil.process_iter(["environ", "status"])
    running = [process for process in processes if process.info["status"] != psutil.STATUS_ZOMBIE]
    return [process for process in running if (process.info["environ"] or {}).get(name) == value]


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def wait_for(true: object, patience: float, what: str) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: it does not within `patience` seconds.
    """
    end = time.monotonic() + patience
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"no {what} within {patience} s")
        time.sleep(0.1)
