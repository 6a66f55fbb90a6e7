"""The README's section "Artifacts", as written, with real servers; and what happens when they fail."""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from tests.processes import wait_for
from tests.readme import commands, section
from tests.servers import KINDS, PATIENCE, Server, Wire, serve, small_disk
from tests.test_pipeline import STATE, Clone, edited, ran

pytestmark = pytest.mark.servers

FILLS = "6m"  # a disk that a server starts on, and that the artifacts overflow
HALF = 3_000_000  # bytes, about a third of them
SECTION = "Artifacts"


def as_written(command: str, **places: str) -> str:
    """A command of the README's section "Artifacts", with its placeholders filled in."""
    assert command in commands(SECTION)
    for placeholder, value in places.items():
        assert placeholder in command
        command = command.replace(placeholder, value)
    return command


class Larger(Clone):
    """With artifacts of about 9 MB."""

    TINY: ClassVar = {
        **Clone.TINY,
        "model": {"d_model": 64, "d_head": 16, "d_mlp": 512},
        "train": {"steps": 300, "batch_size": 64, "checkpoint_every": 10},
    }


class Elsewhere(Clone):
    """A fresh clone of a Git repository, on the machine of somebody else: nothing of the first is there."""

    def __init__(self, git: Path, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.env = {**env, STATE: str(folder.parent / f"{folder.name}-state")}
        subprocess.run(["git", "clone", "-q", git, folder], env=env, check=True)

    def sh(self, command: str, check: bool = True) -> str:
        """What a line of the README prints."""
        return self.run("bash", "-c", command, check=check)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Larger:
    """Where everything ran: the results of r = 1 are committed, those of 0.2 and 0.5 only in the run cache."""
    source = Larger(tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("state"))
    source.cut()
    source.run("dvc", "repro")
    source.commit("results")
    for r in (0.2, 0.5):
        set_r(source, r)
        source.run("dvc", "repro")
    source.half = (source.folder / "metrics/evaluate.json").read_text()
    source.run("git", "checkout", "-q", "--", ".")
    return source


def set_r(clone: Clone, r: float) -> None:
    with edited(clone.folder / "params.yaml") as params:
        params["train"]["r"] = r


class Shared:
    """A source, the server that it shares its artifacts on, and the Git repository that names the server."""

    def __init__(self, source: Larger, kind: str, server: Server, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.env = {**source.env, **server.env}
        self.git = folder / "git"
        subprocess.run(["git", "clone", "-q", "--bare", source.folder, self.git], check=True)
        self.source = Elsewhere(self.git, folder / "source", self.env)
        shutil.copytree(source.folder / ".dvc/cache", self.source.folder / ".dvc/cache")
        self.source.run("dvc", "checkout")
        written = {"s3": "s3://BUCKET/assign-and-add", "ssh": "ssh://SERVER/srv/assign-and-add"}[kind]
        self.source.sh(as_written(f"dvc remote add -d storage {written}", **{written: server.url}))
        if kind == "s3":
            endpoint = {"https://SERVER": server.setup["endpointurl"]}
            self.source.sh(as_written("dvc remote modify storage endpointurl https://SERVER", **endpoint))
        self.source.commit("where the artifacts are")
        self.source.run("git", "push", "-q")
        output = self.source.run("dvc", "exp", "run", "-n", "less", "-S", "train.r=0.2")
        assert not ran(output), output
        self.source.run("git", "checkout", "-q", "--", ".")
        self.source.run("dvc", "checkout")

    def elsewhere(self, folder: Path) -> Elsewhere:
        return Elsewhere(self.git, folder, self.env)


@pytest.fixture(scope="module", params=sorted(KINDS))
def shared(
    request: pytest.FixtureRequest, source: Larger, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared]:
    """Everything pushed, after a user with wrong credentials was sent away and a full disk was made larger."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "server").mkdir()
    with (
        small_disk(folder / "disk", FILLS) as resize,
        serve(request.param, folder / "server", folder / "disk") as server,
    ):
        shared = Shared(source, request.param, server, folder)
        push = as_written("dvc push")
        shared.source.env.update(server.wrong)
        shared.refused = failing(shared.source, push)
        shared.source.env.update(server.env)
        shared.full = failing(shared.source, push)
        resize("256m")
        shared.completed = shared.source.sh(push)
        shared.again = shared.source.sh(push)
        shared.source.sh(as_written("python .dvc/push_runs.py"))
        shared.source.sh(as_written("dvc exp push origin NAME", NAME="less"))
        yield shared


def failing(clone: Elsewhere, command: str) -> str:
    """What a command prints that must fail."""
    done = subprocess.run(["bash", "-c", command], cwd=clone.folder, env=clone.env, capture_output=True, text=True)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr


def number(pattern: str, text: str) -> int:
    (found,) = re.findall(pattern, text)
    return int(found)


def test_wrong_credentials_are_called_that(shared: Shared) -> None:
    assert re.search(r"ERROR: .*(Forbidden|Permission denied)", shared.refused), shared.refused


def test_a_full_disk_fails_a_push_and_the_next_one_sends_what_is_missing(shared: Shared) -> None:
    missing = number(r"ERROR: failed to push data to the cloud - (\d+) files failed to upload", shared.full)
    assert re.search(r"failed to transfer '\w+' - .*(Failure|internal error)", shared.full), shared.full
    assert number(r"(\d+) files? pushed", shared.completed) == missing
    assert "Everything is up to date." in shared.again


def test_a_clone_pulls_and_has_nothing_left_to_run(shared: Shared, tmp_path: Path) -> None:
    clone = shared.elsewhere(tmp_path / "clone")
    clone.sh(as_written("dvc pull models/model.safetensors"))
    assert (clone.folder / "models/model.safetensors").exists() and not (clone.folder / "models/checkpoints").exists()
    said = json.loads(clone.run("python", "-m", "stages.ask", "--json", "c=3, b=2, b+c"))
    assert said["expected"] == 5 and 0 <= said["answer"] < 7
    clone.sh(as_written("dvc pull"))
    again = clone.run("dvc", "repro")
    assert not ran(again) and "up to date" in again
    assert clone.run("git", "status", "--short") == ""


def test_an_experiment_is_pulled_and_applied(shared: Shared, tmp_path: Path) -> None:
    clone = shared.elsewhere(tmp_path / "clone")
    clone.sh(as_written("dvc exp pull origin NAME", NAME="less"))
    clone.run("dvc", "exp", "apply", "less")
    assert "r: 0.2" in (clone.folder / "params.yaml").read_text()
    assert (clone.folder / "metrics/evaluate.json").read_text() == clone.at("less", "metrics/evaluate.json")
    assert not ran(clone.run("dvc", "repro"))


def test_parameters_that_ran_elsewhere_are_fetched_and_not_run(shared: Shared, source: Larger, tmp_path: Path) -> None:
    clone = shared.elsewhere(tmp_path / "clone")
    set_r(clone, 0.5)
    output = clone.sh(as_written("dvc repro --pull"))
    assert not ran(output), output
    assert (clone.folder / "metrics/evaluate.json").read_text() == source.half
    assert (clone.folder / "models/model.safetensors").exists()


def test_another_project_gets_the_model(shared: Shared, tmp_path: Path) -> None:
    model = (shared.source.folder / "models/model.safetensors").read_bytes()
    address = {"https://GIT/assign-and-add": str(shared.git)}
    project = tmp_path / "project"
    for command in ("dvc get", "dvc import"):
        subprocess.run(["git", "init", "-q", project], check=True)
        subprocess.run(["dvc", "init", "-q"], cwd=project, env=shared.env, check=True)
        line = as_written(f"{command} https://GIT/assign-and-add models/model.safetensors", **address)
        subprocess.run(["bash", "-c", line], cwd=project, env=shared.env, check=True)
        assert (project / "model.safetensors").read_bytes() == model
        assert (project / "model.safetensors.dvc").exists() == (command == "dvc import")
        shutil.rmtree(project)


def test_another_project_opens_the_model(shared: Shared, tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```py\n(.*?)```", section(SECTION), re.DOTALL)
    code = snippet.replace("https://GIT/assign-and-add", str(shared.git)) + "\nprint(*sorted(weights))\n"
    done = subprocess.run(["python", "-c", code], cwd=tmp_path, env=shared.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "blocks.1.attn.W_Q" in done.stdout and "embed.W_E" in done.stdout


@contextmanager
def ends_midway(shared: Shared, remote: str, end: Callable[[], None]) -> Iterator[Wire]:
    """A further remote of the source, whose server ends in the middle of a push, and is there again afterwards."""
    server, user = shared.server, shared.source
    config = server.folder / "home/.ssh/config"

    def reached_at(port: int) -> None:
        if server.setup:
            user.run("dvc", "remote", "modify", "--local", remote, "endpointurl", f"http://127.0.0.1:{port}")
        else:
            config.write_text(re.sub(r"Port \d+", f"Port {port}", config.read_text()))

    user.run("dvc", "remote", "add", "--local", remote, f"{server.url}-{remote}")
    wire = Wire(server.port, HALF, end)
    wire.start()
    reached_at(wire.port)
    try:
        yield wire
    finally:
        wire.close()
        server.kill()
        server.start()
        reached_at(server.port)


def rest_follows(shared: Shared, remote: str, folder: Path) -> None:
    """Check that the next push completes what a clone in this folder needs."""
    assert number(r"(\d+) files? pushed", shared.source.run("dvc", "push", "-r", remote)) > 0
    clone = shared.elsewhere(folder)
    shutil.copy(shared.source.folder / ".dvc/config.local", clone.folder / ".dvc/config.local")
    clone.run("dvc", "pull", "-r", remote)
    assert not ran(clone.run("dvc", "repro"))


def test_a_server_that_dies_in_the_middle_of_a_push_gets_the_rest_with_the_next(shared: Shared, tmp_path: Path) -> None:
    with ends_midway(shared, "dying", shared.server.kill) as wire:
        gone = failing(shared.source, "dvc push -r dying")
        assert wire.left <= 0
    assert re.search(r"ERROR: failed to transfer '\w+' - .*[Cc]onnect", gone), gone
    rest_follows(shared, "dying", tmp_path / "clone")


def test_a_server_that_falls_silent_in_the_middle_of_a_push_gets_the_rest_with_the_next(
    shared: Shared, tmp_path: Path
) -> None:
    assert "interrupt it" in section(SECTION) and "ServerAliveInterval" in section(SECTION)
    user, over_ssh = shared.source, not shared.server.setup
    with ends_midway(shared, "silent", shared.server.freeze) as wire:
        push = subprocess.Popen(
            ["dvc", "push", "-r", "silent"],
            cwd=user.folder,
            env=user.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background jobs ignore
        )
        wait_for(lambda: wire.left <= 0, PATIENCE, "silence")
        if not over_ssh:
            push.send_signal(signal.SIGINT)
        said, _ = push.communicate(timeout=PATIENCE)
    assert push.returncode != 0
    assert ("onnection" if over_ssh else "interrupted by the user") in said, said
    rest_follows(shared, "silent", tmp_path / "clone")
