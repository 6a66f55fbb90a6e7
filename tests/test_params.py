"""Parameters in, one-line errors out."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError
from ruamel.yaml import YAML

from stages import generate
from stages.core.params import InputError, Section, allowed, read
from stages.core.task import Task
from stages.core.weights import ModelConfig
from stages.generate import GenerateParams
from stages.train import TrainParams

ROOT = Path(__file__).parents[1]


class Sample(Section):
    """One parameter of each kind."""

    count: int = Field(ge=2, le=9)
    share: float = Field(gt=0, le=1)
    rate: float = Field(ge=0)
    free: float
    mode: Literal["slow", "fast"] = "slow"
    name: str = "x"


GOOD = {"count": 3, "share": 0.5, "rate": 0.0, "free": -1.5}
MODEL = {"d_model": 128, "d_head": 128, "n_heads": 1, "d_mlp": 512}
TRAIN = {
    "r": 1.0,
    "r_mode": "frequency",
    "weight_0var": 1.0,
    "weight_1var": 1.0,
    "steps": 100,
    "batch_size": 512,
    "lr": 0.001,
    "weight_decay": 0.02,
    "seed": 42,
    "data_seed": 0,
    "checkpoint_every": 100,
    "device": "cpu",
}
TINY = """
task: {N: 7, variables: 4, context: 10, left_only: 1, right_only: 1}
generate: {f: 0.5, eval_size: 10, exact_limit: 100, seed: 3}
model: {d_model: 16, d_head: 8, n_heads: 2, d_mlp: 32}
train: {r: 1.0, r_mode: frequency, weight_0var: 1.0, weight_1var: 1.0, steps: 4, batch_size: 8, lr: 0.001,
        weight_decay: 0.02, seed: 42, data_seed: 0, checkpoint_every: 2, device: cpu}
"""


def error_of(section: type[Section], values: object, where: str = "sample") -> str:
    with pytest.raises(InputError) as error:
        section.parse(values, where)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


# --- values ---------------------------------------------------------------------------------------------------------


def test_good_values_become_the_section():
    sample = Sample.parse(GOOD | {"mode": "fast", "name": "y"}, "sample")
    assert sample.model_dump() == {**GOOD, "mode": "fast", "name": "y"}
    with pytest.raises(ValidationError):
        sample.count = 4


@pytest.mark.parametrize(
    ("value", "number"),
    [("1e-3", 0.001), ("0.25", 0.25), (1, 1.0), ("1E-1", 0.1), (" 0.5 ", 0.5)],
)
def test_numbers_that_arrive_as_text_count_as_the_numbers_they_spell(value, number):
    assert Sample.parse(GOOD | {"share": value}, "sample").share == number


@pytest.mark.parametrize("value", [7, 7.0, "7", "7.0", "7e0", "0.7e1"])
def test_whole_numbers_may_be_written_in_any_way_but_stay_whole(value):
    count = Sample.parse(GOOD | {"count": value}, "sample").count
    assert count == 7 and type(count) is int


@pytest.mark.parametrize(
    "value", [7.5, "7.5", "0x7", "", "seven", None, [7], {"a": 7}, True, False, math.nan, math.inf]
)
def test_what_is_no_whole_number_in_range_is_refused_with_key_value_and_range(value):
    shown = float(value) if value == "7.5" else value
    message = error_of(Sample, GOOD | {"count": value})
    assert message == f"sample.count = {shown!r}: must be a whole number from 2 to 9"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf", "-inf", "1e400", True, None, [1], "x"])
def test_booleans_lists_text_and_infinities_are_no_numbers(value):
    assert error_of(Sample, GOOD | {"free": value}).endswith(": must be a number")
    assert error_of(Sample, GOOD | {"free": value}).startswith("sample.free = ")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("count", 1, "sample.count = 1: must be a whole number from 2 to 9"),
        ("count", 10, "sample.count = 10: must be a whole number from 2 to 9"),
        ("count", 10**30, f"sample.count = {10**30}: must be a whole number from 2 to 9"),
        ("share", 0, "sample.share = 0: must be a number above 0 and at most 1"),
        ("share", -0.0, "sample.share = -0.0: must be a number above 0 and at most 1"),
        ("share", 1.0000001, "sample.share = 1.0000001: must be a number above 0 and at most 1"),
        ("rate", -1, "sample.rate = -1: must be a number at least 0"),
        ("mode", "medium", "sample.mode = 'medium': must be one of slow, fast"),
        ("mode", True, "sample.mode = True: must be one of slow, fast"),
        ("mode", ["slow"], "sample.mode = ['slow']: must be one of slow, fast"),
        ("name", 3, "sample.name = 3: must be text"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(key, value, message):
    assert error_of(Sample, GOOD | {key: value}) == message


@pytest.mark.parametrize("key", ["Count", "speed", 1, None, True, ("a", "b")])
def test_an_unknown_key_is_named_with_the_known_ones(key):
    message = error_of(Sample, GOOD | {key: 5})
    assert message == f"sample.{key} = 5: there is no such key; sample has count, share, rate, free, mode, name"


def test_a_misspelt_key_is_named_rather_than_the_one_that_is_missing():
    values = {("cuont" if key == "count" else key): value for key, value in GOOD.items()}
    assert error_of(Sample, values).startswith("sample.cuont = 3: there is no such key")


def test_a_missing_key_is_named_with_what_it_may_be():
    message = error_of(Sample, {key: GOOD[key] for key in GOOD if key != "share"})
    assert message == "sample.share is missing: must be a number above 0 and at most 1"


@pytest.mark.parametrize("values", [None, 3, "text", [1], True])
def test_a_section_that_is_no_section_is_refused(values):
    assert error_of(Sample, values).startswith(f"sample = {values!r}: must be a section with the keys count, share, ")


def test_negative_zero_is_zero_where_zero_is_allowed():
    assert Sample.parse(GOOD | {"rate": -0.0, "free": "-0"}, "sample").rate == 0


@pytest.mark.parametrize("text", ["9007199254740993", "9223372036854775807"])
def test_a_seed_written_as_text_keeps_its_last_digit(text):
    p = {"f": 0.5, "eval_size": 1, "exact_limit": 1, "seed": text}
    assert GenerateParams.parse(p, "generate").seed == int(text)


values_of_any_kind = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from([*GOOD, "mode", "name"]), values_of_any_kind)
def test_any_value_is_taken_or_refused_in_one_line(key, value):
    try:
        taken = Sample.parse(GOOD | {key: value}, "sample")
    except InputError as error:
        assert str(error).startswith(f"sample.{key} = ") and len(str(error).splitlines()) == 1
    else:
        assert not isinstance(value, bool | list | dict | None)
        assert 2 <= taken.count <= 9 and 0 < taken.share <= 1 and taken.rate >= 0 and math.isfinite(taken.free)


def test_what_is_allowed_is_said_in_words():
    assert {name: allowed(field) for name, field in Sample.model_fields.items()} == {
        "count": "a whole number from 2 to 9",
        "share": "a number above 0 and at most 1",
        "rate": "a number at least 0",
        "free": "a number",
        "mode": "one of slow, fast",
        "name": "text",
    }


# --- the sections of the first stages -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "name"), [(Task, "task"), (GenerateParams, "generate"), (ModelConfig, "model"), (TrainParams, "train")]
)
def test_the_projects_own_parameter_file_is_good(section, name):
    assert read(ROOT / "params.yaml", name, section).model_dump().keys() == section.model_fields.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": -1}, "train.r = -1: must be a number at least 0"),
        ({"steps": 0}, "train.steps = 0: must be a whole number at least 1"),
        ({"steps": 2.5}, "train.steps = 2.5: must be a whole number at least 1"),
        ({"r_mode": "half"}, "train.r_mode = 'half': must be one of frequency, subset"),
        ({"lr": 0}, "train.lr = 0: must be a number above 0"),
        ({"lr": "fast"}, "train.lr = 'fast': must be a number above 0"),
        ({"batch_size": 0}, "train.batch_size = 0: must be a whole number at least 1"),
        ({"weight_decay": -0.1}, "train.weight_decay = -0.1: must be a number at least 0"),
        ({"weight_0var": True}, "train.weight_0var = True: must be a number at least 0"),
        ({"seed": -1}, f"train.seed = -1: must be a whole number at least 0 and below {2**63}"),
        ({"data_seed": 2**63}, f"train.data_seed = {2**63}: must be a whole number at least 0 and below {2**63}"),
        ({"checkpoint_every": 0}, "train.checkpoint_every = 0: must be a whole number at least 1"),
        ({"device": "tpu"}, "train.device = 'tpu': must be one of auto, cpu, cuda"),
        ({"r_mode": "subset", "r": 1.5}, "train: r = 1.5 with r_mode = subset: must be a number from 0 to 1"),
        (
            {"r": 0, "weight_0var": 0, "weight_1var": 0},
            "train: r, weight_0var and weight_1var are all 0: one of them must be above 0",
        ),
    ],
)
def test_bad_training_parameters_are_refused(change, message):
    assert error_of(TrainParams, TRAIN | change, "train") == message


@pytest.mark.parametrize("change", [{"r": 0}, {"weight_0var": 0}, {"lr": "1e-3"}, {"r_mode": "subset", "r": 1}])
def test_the_ends_of_the_training_parameters_are_allowed(change):
    assert TrainParams.parse(TRAIN | change, "train").lr == 0.001


@pytest.mark.parametrize("key", ["d_model", "d_head", "n_heads", "d_mlp"])
@pytest.mark.parametrize("value", [0, -1])
def test_model_sizes_are_at_least_one(key, value):
    message = f"model.{key} = {value}: must be a whole number at least 1"
    assert error_of(ModelConfig, MODEL | {key: value}, "model") == message


# --- files ----------------------------------------------------------------------------------------------------------


def reading_error(path: Path, content: str | bytes | None = None) -> str:
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as error:
        read(path, "task", Task)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def test_one_section_is_read_whatever_else_is_in_the_file(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(
        "other: [1, 2]\ntask:\n  N: 1e1\n  variables: '4'\n  context: 8\n  left_only: 0\n  right_only: 0.0\n"
    )
    assert read(path, "task", Task) == Task(N=10, variables=4, context=8, left_only=0, right_only=0)


@pytest.mark.parametrize("content", ["", "5", "- 1\n- 2\n", "tusk:\n  N: 7\n", "# nothing\n"])
def test_a_file_without_the_section_is_refused(tmp_path, content):
    assert reading_error(tmp_path / "p.yaml", content) == f"{tmp_path / 'p.yaml'} has no section 'task'"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("task:\n\tN: 7\n", r"found character '\t'"),
        ("task: {N: 7", "expected ',' or '}'"),
        ("task:\n  N: 7\n  N: 8\n", 'found duplicate key "N"'),
        ("task:\n  N: 7\ntask:\n  N: 8\n", 'found duplicate key "task"'),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
        ("task: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
        (b"\x89PNG\r\n\x1a\n\x00", "can't decode byte"),
        ("task: {N: 7}\n".encode("utf-16"), "can't decode byte"),
        ("a\0b", "special characters are not allowed"),
        ("task:\n  N: " + "1" * 5000 + "\n", "5000 digits"),
        ("task:\n  N: !!int seven\n", "invalid literal for int()"),
        ("task:\n  N: 2020-13-45\n", "month must be in 1..12"),
    ],
)
def test_what_is_no_yaml_is_refused_with_the_reason(tmp_path, content, reason):
    message = reading_error(tmp_path / "p.yaml", content)
    assert message.startswith(f"{tmp_path / 'p.yaml'} cannot be read as YAML: ") and reason in message


def test_a_file_that_is_not_there_or_cannot_be_read_is_named(tmp_path):
    missing = tmp_path / "none.yaml"
    assert reading_error(missing) == f"{missing} does not exist: run this from the repository's root, or name the file"
    assert reading_error(tmp_path) == f"{tmp_path} cannot be read: Is a directory"
    (tmp_path / "file").touch()
    below = tmp_path / "file/p.yaml"
    assert reading_error(below) == f"{below} cannot be read: Not a directory"


# --- the command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with a small parameter file and the data that it makes."""
    (tmp_path / "params.yaml").write_text(TINY)
    generate.main(tmp_path / "data", tmp_path / "params.yaml")
    return tmp_path


def run_stage(stage: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"stages.{stage}", "--params", str(folder / "params.yaml"), *options]
    environment = os.environ | {"ASSIGN_AND_ADD_STATE": str(folder / "state")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def assert_one_line(result: subprocess.CompletedProcess[str], part: str) -> None:
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
    assert part in result.stderr


@pytest.mark.parametrize("damage", ["truncated", "another N"])
def test_training_refuses_bad_data_in_one_line_and_writes_nothing(tiny, damage):
    pairs = tiny / "data/pairs.parquet"
    if damage == "truncated":
        pairs.write_bytes(pairs.read_bytes()[:-7])
        part = f"{pairs} is damaged or no Parquet file"
    else:
        (tiny / "params.yaml").write_text(TINY.replace("N: 7", "N: 8"))
        part = f"{pairs} was made for task.N = 7, not for 8"
    result = run_stage("train", tiny, "--data", str(tiny / "data"), "--out", str(tiny / "out"))
    assert_one_line(result, part)
    assert not (tiny / "out").exists() and not (tiny / "state").exists()


def test_an_output_folder_that_cannot_be_made_is_one_line(tiny):
    (tiny / "file").write_text("not a folder")
    assert_one_line(run_stage("generate", tiny, "--out", str(tiny / "file/data")), str(tiny / "file/data"))
    assert (tiny / "file").read_text() == "not a folder"


def test_yaml_of_the_projects_file_is_what_dvc_writes(tmp_path):
    """`dvc exp run -S` writes the file back with its values as YAML, so that reading it again changes nothing."""
    yaml = YAML()
    values = yaml.load(ROOT / "params.yaml")
    values["train"]["lr"] = 1e-3
    yaml.dump(values, tmp_path / "params.yaml")
    assert read(tmp_path / "params.yaml", "train", TrainParams).lr == 0.001
