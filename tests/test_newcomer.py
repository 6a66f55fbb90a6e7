"""The way of somebody new: clone, the README's first command, one experiment, compare, push, pull elsewhere."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.readme import one
from tests.test_pipeline import STAGES, Clone, ran
from tests.test_remotes import Elsewhere, as_written

pytestmark = pytest.mark.servers


def virtual_environment(folder: Path) -> None:
    """A virtual environment in which everything that this one has is installed already, but not the project."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    # Python 3.11 brings a setuptools that is too old to build the project.
    subprocess.run([folder / "bin/python", "-m", "pip", "uninstall", "-qy", "setuptools"], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    here = {path for path in sys.path if Path(path).name == "site-packages"}
    (packages / "here.pth").write_text("".join(f"{path}\n" for path in sorted(here)))


class Newcomer(Elsewhere):
    """Somebody's clone, in which the first command and one experiment of the README ran, as written.

    Attributes:
        git: what was cloned.
        experiment: the name that DVC gave the experiment.
    """

    def __init__(self, base: Path) -> None:
        (base / "author").mkdir(parents=True)
        author = Clone(base / "author", base / "author-state")  # makes the task tiny, and runs nothing
        self.git = base / "git"
        subprocess.run(["git", "clone", "-q", "--bare", author.folder, self.git], check=True)
        super().__init__(self.git, base / "clone", author.env)
        virtual_environment(base / "venv")
        # What is built is built with what is here, so that no network is needed.
        self.env.update(PATH=f"{base / 'venv/bin'}:{self.env['PATH']}", PIP_NO_BUILD_ISOLATION="0", PIP_NO_INDEX="1")
        self.first = self.sh(one("Run it", "pip install -e . "))
        self.commit("results")
        self.second = self.sh(one("Change one thing, and compare", "dvc exp run"))
        self.experiment = self.run("dvc", "exp", "list", "--name-only").split()[-1]


def test_the_first_command_runs_everything(newcomer: Newcomer) -> None:
    assert "Successfully installed assign-and-add" in newcomer.first
    assert ran(newcomer.first) == set(STAGES)
    assert (newcomer.folder / "plots/figures/accuracy.png").exists()


def test_an_experiment_runs_what_depends_on_its_parameter(newcomer: Newcomer) -> None:
    assert {"train", "evaluate"} <= ran(newcomer.second) and "generate" not in ran(newcomer.second)


def test_comparing_names_the_experiment_and_gives_both_numbers(newcomer: Newcomer) -> None:
    shown = newcomer.sh(one("Change one thing, and compare", "dvc exp show"))
    assert newcomer.experiment in shown
    command = one("Change one thing, and compare", "dvc metrics diff").replace("EXPERIMENT", newcomer.experiment)
    changed = newcomer.sh(command)
    for revision in ("main", newcomer.experiment):
        text = newcomer.run("git", "show", f"{revision}:metrics/evaluate.json") if revision == "main" else None
        metrics = json.loads(text or newcomer.at(revision, "metrics/evaluate.json"))
        assert f"{metrics['2var_exact']:.5f}".rstrip("0") in changed


def test_what_is_pushed_to_a_shared_folder_is_pulled_elsewhere(newcomer: Newcomer, tmp_path: Path) -> None:
    newcomer.run("git", "checkout", "-q", "--", ".")
    newcomer.run("dvc", "checkout")
    place = {"/mnt/shared/assign-and-add": str(tmp_path / "shared")}
    newcomer.sh(as_written("dvc remote add -d storage /mnt/shared/assign-and-add", **place))
    newcomer.commit("where the artifacts are")
    newcomer.sh(as_written("dvc push"))
    newcomer.run("git", "push", "-q")

    other = Elsewhere(newcomer.git, tmp_path / "clone", newcomer.env)
    other.sh(as_written("dvc pull"))
    assert not ran(other.run("dvc", "repro"))
    assert other.run("git", "status", "--short") == ""
    said = other.run("python", "-m", "stages.ask", "c=3, b=2, b+c")
    assert re.match(r"c=3, b=2, b\+c → \d", said)


def test_no_source_depends_on_one_operating_system() -> None:
    """No folder, module, shell or way to start processes that Windows or macOS lacks."""
    for file in (ROOT / "stages").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w.])/(tmp|dev|bin)\b", source.replace(".dvc/tmp", "")), file
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not names & {"fcntl", "pwd", "grp", "resource", "msvcrt", "winreg"}, file
            elif isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in {"os.fork", "os.system", "os.popen", "os.killpg", "os.getuid"}, (
                    file
                )
                assert not {key.arg for key in node.keywords} & {"shell", "preexec_fn", "start_new_session"}, file
                assert "fork" not in [word.value for word in node.args if isinstance(word, ast.Constant)], file
