"""The README: its numbers are those of metrics/ and plots/, its commands and its tree are real, its snippet runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from stages.core.weights import initialise, save
from tests.conftest import ROOT
from tests.readme import README

NUMBER = re.compile(r"([−-]?[\d,]*\.?\d+(?:e-?\d+)?)( %)?<!-- (\w+):([\w.=:-]+) -->")


def quoted() -> list[tuple[str, str, str, str]]:
    """Every number with a source: as written, the percent sign, the file, the key (of a sweep: experiment:column)."""
    return NUMBER.findall(README)


def test_every_source_of_a_number_is_read() -> None:
    assert len(quoted()) == len(re.findall(r"<!-- \w+:\S+ -->", README)) >= 30


def sweep(grid: str) -> pd.DataFrame:
    """What was collected of a grid, by experiment."""
    return pd.read_csv(ROOT / f"plots/sweep_{grid}.csv").set_index("experiment")


def check(written: str, value: float, **tolerance: float) -> None:
    """A number is written as it is, rounded to the digits that are written."""
    plain = written.replace(",", "").replace("−", "-")
    digits = len(plain.partition(".")[2]) if "." in plain else 0
    assert float(plain) == pytest.approx(value, **{"rel": 1e-9, "abs": 0.5001 * 10**-digits, **tolerance})


@pytest.mark.parametrize(("written", "percent", "file", "key"), quoted())
def test_a_number_is_that_of_its_source(written: str, percent: str, file: str, key: str) -> None:
    kind, _, grid = file.partition("_")
    if kind == "sweep":
        experiment, _, column = key.rpartition(":")
        value = sweep(grid).loc[experiment, column]
    else:
        value = json.loads((ROOT / f"metrics/{file}.json").read_text())
        for part in key.split("."):
            value = value[part]
    check(written, value * 100 if percent else value, **({"rel": 0.06} if "e" in written else {}))


def table_of(corner: str) -> dict[str, dict[str, str]]:
    """The cells of the table with this word in its first cell: by row, then by column."""
    (text,) = re.findall(rf"^\| {corner} \|.*\n(?:\|.*\n)+", README, re.MULTILINE)
    head, _, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines())
    assert all(len(row) == len(head) for row in rows), text
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def test_the_table_over_r_has_every_experiment() -> None:
    found = table_of("r")
    for _, row in (collected := sweep("r")).iterrows():
        cells = found[f"`{row['train.r_mode']}`, seed {row['train.seed']}"]
        check(cells[f"{row['train.r']:g}"], row["2var_exact"])
    assert sum(cell != "–" for cells in found.values() for cell in cells.values()) == len(collected)


def test_the_table_over_f_has_every_experiment() -> None:
    accuracies, delays = table_of("f").values()
    collected = sweep("f")
    assert [*accuracies] == [*delays] == [f"{f:g}" for f in collected["generate.f"]]
    for written, delay, (_, row) in zip(accuracies.values(), delays.values(), collected.iterrows(), strict=True):
        check(written, row["0var_exact"])
        if pd.isna(row["grokking_delay"]):
            assert delay == "not yet"
        else:
            check(delay, row["grokking_delay"])


def test_how_often_phases_happen_is_what_was_collected() -> None:
    collected = sweep("seeds")
    words = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    said = " ".join(README.partition("### How often each phase happens")[2].partition("\n#")[0].split())
    for rows, counted in (
        (collected[collected["train.data_seed"] == 0], "initialisations"),
        (collected[collected["train.seed"] == 42], "draws"),
    ):
        assert f"{words[len(rows)]} {counted}" in said.lower()
        for phase in ("addition", "assignment", "refinement"):
            reached = rows[phase].notna().sum()
            assert f"{'all' if reached == len(rows) else words[reached]} reach {phase}" in said.lower()


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
