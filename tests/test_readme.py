"""The README: its numbers are those of metrics/, its commands and its tree are real, its snippet runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stages.core.weights import initialise, save
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"([−-]?[\d,]*\.?\d+(?:e-?\d+)?)( %)?<!-- (\w+):([\w.]+) -->")


def quoted() -> list[tuple[str, str, str, str]]:
    """Every number with a source: as written, the percent sign, the metrics file, the key in it."""
    return NUMBER.findall(README)


def test_every_source_of_a_number_is_read() -> None:
    assert len(quoted()) == len(re.findall(r"<!-- \w+:[\w.]+ -->", README)) >= 30


@pytest.mark.parametrize(("written", "percent", "file", "key"), quoted())
def test_a_number_is_that_of_the_metrics(written: str, percent: str, file: str, key: str) -> None:
    value = json.loads((ROOT / f"metrics/{file}.json").read_text())
    for part in key.split("."):
        value = value[part]
    if percent:
        value *= 100
    plain = written.replace(",", "").replace("−", "-")
    digits = len(plain.partition(".")[2]) if "." in plain else 0
    assert float(plain) == pytest.approx(value, rel=0.06 if "e" in plain else 1e-9, abs=0.5001 * 10**-digits)


def test_the_pictures_and_files_it_links_to_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_tree_names_every_script_and_room() -> None:
    tree = README.partition("## Files")[2]
    for file in sorted((ROOT / "stages").rglob("*.py")):
        if file.name != "__init__.py" and file.parent.name != "draw":
            assert re.search(rf"^\s*{file.name}\s", tree, re.MULTILINE), file.name


def test_the_parameters_that_it_sets_exist() -> None:
    from ruamel.yaml import YAML

    params = YAML(typ="safe").load((ROOT / "params.yaml").read_text())
    settings = re.findall(r"-S '?(\w+)\.(\w+)=", README)
    assert settings
    for section, key in settings:
        assert key in params[section]


def test_every_module_that_it_runs_has_help() -> None:
    for module in sorted(set(re.findall(r"python -m ([\w.]+)", README))):
        done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and "Usage" in done.stdout, module


def test_the_notebook_snippet_runs_outside_the_repository(tmp_path: Path, config) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    model = tmp_path / "model.safetensors"
    save(model, initialise(config, 0), config)
    code = snippet.replace("/path/to/assign-and-add/models/model.safetensors", str(model))
    code = code.replace("/path/to/assign-and-add", str(ROOT))
    assert "/path/to" not in code
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pattern = [float(weight) for weight in re.findall(r"\d\.\d+(?:e-\d+)?", done.stdout)]
    assert len(pattern) == config.task.context and sum(pattern) == pytest.approx(1, abs=1e-2)
