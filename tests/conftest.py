"""What the tests share."""

from pathlib import Path

import pytest

from stages.core.task import Task
from stages.core.weights import Config, ModelConfig

ROOT = Path(__file__).parents[1]


@pytest.fixture
def reference() -> Path:
    """The folder with the published checkpoints and what the authors' code gives for them."""
    folder = ROOT.parent / "shared/reference"
    if not folder.is_dir():
        pytest.skip(f"{folder}, the published checkpoints, is not there")
    return folder


@pytest.fixture(scope="session")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The `Newcomer` of all modules of tests."""
    from tests.test_newcomer import Newcomer

    return Newcomer(tmp_path_factory.getbasetemp() / "newcomer")


@pytest.fixture
def task() -> Task:
    """The paper's task."""
    return Task(N=59, variables=12, context=16, left_only=2, right_only=2)


@pytest.fixture
def config(task: Task) -> Config:
    """The paper's task and model sizes."""
    return Config(task, ModelConfig(d_model=128, d_head=128, n_heads=1, d_mlp=512))


@pytest.fixture
def tiny_config() -> Config:
    """A task and a model small enough for exhaustive tests, with several heads."""
    task = Task(N=7, variables=4, context=10, left_only=1, right_only=1)
    return Config(task, ModelConfig(d_model=16, d_head=8, n_heads=2, d_mlp=32))
