"""Real servers for DVC's remotes, on the loopback interface: S3 (SeaweedFS) and SSH (OpenSSH)."""

import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from tests.processes import free_ports, kill, sbin, wait_for

PATIENCE = 60  # seconds that a server may take to be ready
SILENCE = 3  # seconds after which clients ask a server whether it is there


class Server:
    """A server that can be started, killed, and started again with what it held.

    Attributes:
        url: of a remote on it.
        env: what its user sets in the environment.
        wrong: what a user with the wrong credentials sets instead.
        setup: further `dvc remote modify` options.
    """

    url: str
    env: dict[str, str]
    wrong: dict[str, str]
    setup: ClassVar[dict[str, str]] = {}

    def __init__(self, folder: Path, storage: Path) -> None:
        self.folder, self.storage = folder, storage
        (self.port,) = free_ports(1)
        self.process: psutil.Popen | None = None

    def command(self) -> list[str]:
        """What runs in the foreground until it is killed."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether clients are served."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it, and wait until it serves."""
        with (self.folder / "server.log").open("a") as log:
            self.process = psutil.Popen(self.command(), stdout=log, stderr=log)
        wait_for(self.ready, PATIENCE, f"server: {self.folder / 'server.log'}")

    def running(self) -> list[psutil.Process]:
        """It, and what it started for its clients."""
        if not (self.process and self.process.is_running()):
            return []
        return [self.process, *self.process.children(recursive=True)]

    def freeze(self) -> list[psutil.Process]:
        """Let it answer nothing any more, as if the network had failed: clients are not told.

        Returns:
            what was running.
        """
        frozen = []
        while new := [process for process in self.running() if process not in frozen]:  # started in the meantime
            for process in new:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            frozen += new
        return frozen

    def kill(self) -> None:
        """End it at once, as if its power had failed: clients are told by the machine that it ran on."""
        kill(self.freeze())

    def listens(self, port: int) -> bool:
        """Whether something answers on a port."""
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0


class S3(Server):
    """SeaweedFS with one user and one bucket."""

    bucket = "artifacts"

    def __init__(self, folder: Path, storage: Path) -> None:
        super().__init__(folder, storage)
        self.url = f"s3://{self.bucket}/assign-and-add"
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_MAX_ATTEMPTS")
        self.env = dict(zip(names, ("tests", "secret", "us-east-1", "1"), strict=True))  # no patience with failures
        self.wrong = {**self.env, "AWS_SECRET_ACCESS_KEY": "guess"}
        self.setup = {"endpointurl": f"http://127.0.0.1:{self.port}"}
        names = ("master", "volume", "filer")
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.grpc = dict(zip((*names, "s3"), free_ports(len(names) + 1), strict=True))
        credentials = {"accessKey": self.env["AWS_ACCESS_KEY_ID"], "secretKey": self.env["AWS_SECRET_ACCESS_KEY"]}
        user = {"name": "tests", "credentials": [credentials], "actions": ["Admin", "Read", "List", "Write"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [user]}))

    def command(self) -> list[str]:
        weed = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        ports = [f"-{name}.port={port}" for name, port in {**self.ports, "s3": self.port}.items()]
        return [
            *(weed, "server", f"-dir={self.storage}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(
                "-s3",
                f"-s3.config={self.folder / 's3.json'}",
                "-s3.iam=false",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
            ),
            *(*ports, *(f"-{name}.port.grpc={port}" for name, port in self.grpc.items())),
            *("-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=8", "-volume.minFreeSpace=0"),
        ]

    def client(self) -> object:
        """What speaks S3 to it."""
        import botocore.config
        import botocore.session

        key, secret, region, _ = self.env.values()
        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.setup["endpointurl"],
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            region_name=region,
            config=botocore.config.Config(retries={"total_max_attempts": 1}, read_timeout=10),
        )

    def ready(self) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        if not self.listens(self.port):
            return False
        try:
            self.client().create_bucket(Bucket=self.bucket)
        except (BotoCoreError, ClientError) as error:
            if "BucketAlready" not in str(error):
                return False
        try:  # It answers before it can store.
            self.client().put_object(Bucket=self.bucket, Key="ready", Body=b"yes")
        except (BotoCoreError, ClientError):
            return False
        return True

    def kill(self) -> None:
        super().kill()
        for port in (self.port, *self.ports.values(), *self.grpc.values()):
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink()


class SSH(Server):
    """OpenSSH for the user who runs the tests, who knows it as the host ``server``."""

    def __init__(self, folder: Path, storage: Path) -> None:
        super().__init__(folder, storage)
        self.url = f"ssh://server{storage}/assign-and-add"
        for home in ("home", "stranger"):
            (folder / home / ".ssh").mkdir(parents=True, mode=0o700)
            self.keygen(folder / home / ".ssh/key")
            (folder / home / ".ssh/config").write_text(
                f"Host server\n  HostName 127.0.0.1\n  Port {self.port}\n  User {pwd.getpwuid(os.getuid()).pw_name}\n"
                f"  IdentityFile {folder / home / '.ssh/key'}\n  ServerAliveInterval {SILENCE}\n"
            )
        self.env, self.wrong = ({"HOME": str(folder / home)} for home in ("home", "stranger"))
        self.keygen(folder / "host_key")
        (folder / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {folder / 'host_key'}\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {folder / 'home/.ssh/key.pub'}\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nStrictModes no\nMaxStartups 100\nSubsystem sftp internal-sftp\n"
        )

    @staticmethod
    def keygen(file: Path) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)

    def command(self) -> list[str]:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # which sshd wants of root, and the service makes where it runs
        return [sbin("sshd"), "-D", "-e", "-f", str(self.folder / "sshd_config")]

    def ready(self) -> bool:
        return self.listens(self.port)


KINDS = {"s3": S3, "ssh": SSH}


def why_not(kind: str) -> str | None:
    """Why no such server can be started here; None if one can."""
    if kind == "ssh" and not (sbin("sshd") and shutil.which("ssh-keygen")):
        return "OpenSSH's server is not installed"
    return None


@contextmanager
def serve(kind: str, folder: Path, storage: Path | None = None) -> Iterator[Server]:
    """Run a server; skip the test where that cannot be.

    Args:
        folder: holds its configuration and log.
        storage: holds what its users store, a folder inside `folder` if not given.
    """
    if reason := why_not(kind):
        pytest.skip(reason)
    storage = storage or folder / "storage"
    storage.mkdir(exist_ok=True)
    server = KINDS[kind](folder, storage)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A file system of its own at a folder; skip the test where none can be mounted.

    Yields:
        what gives it another size.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o"]
    if (done := subprocess.run([*command, f"size={size}", "tests", folder], capture_output=True)).returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield lambda size: subprocess.run([*command, f"remount,size={size}", "tests", folder], check=True)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


class Wire(threading.Thread):
    """Forwards connections to a port, until clients have sent so much: then it calls `snap` and takes no more.

    Attributes:
        port: to connect to.
    """

    def __init__(self, to: int, limit: int, snap: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.to, self.left, self.snap = to, limit, snap
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def run(self) -> None:
        with suppress(OSError):  # raised here once `close` was called
            while True:
                client, _ = self.listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self.to))
                except OSError:
                    client.close()
                    continue
                for source, target, counted in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self.forward, args=(source, target, counted), daemon=True).start()

    def forward(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with source, target:
            with suppress(OSError):
                while data := source.recv(1 << 16):
                    if counted:
                        self.count(len(data))
                    target.sendall(data)
            for end in (source, target):  # The other direction may be waiting for one of them, which keeps it open.
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def count(self, size: int) -> None:
        with self.lock:
            before, self.left = self.left, self.left - size
            if before > 0 >= self.left:
                self.close()
                self.snap()

    def close(self) -> None:
        """Take no further connections."""
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # ends the wait for the next
        self.listener.close()
