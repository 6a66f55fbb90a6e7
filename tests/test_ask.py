"""Putting problems to a model: what is said about them, and what happens to input that is no problem."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.ask import answer, looks_by_token, main, membership, trained_pairs
from stages.core import task as tasks
from stages.core.bridge import from_state_dict
from stages.core.circuit_form import Circuits, forward
from stages.core.params import InputError
from stages.core.task import Task
from stages.core.text import to_tokens
from stages.core.weights import Config, initialise, save
from stages.generate import pair_table
from tests.conftest import ROOT


@pytest.fixture
def tiny(tiny_config: Config) -> Circuits:
    """An untrained model with two heads; variables a to d, a never right and d never left."""
    return Circuits.of({name: 2 * w for name, w in initialise(tiny_config, seed=1).items()})


@pytest.fixture
def tiny_file(tiny_config: Config, tmp_path: Path) -> Path:
    """An untrained model as a file."""
    file = tmp_path / "model.safetensors"
    save(file, initialise(tiny_config, seed=1), tiny_config)
    return file


@pytest.fixture
def pairs(tiny_config: Config) -> np.ndarray:
    """Of the pairs, those whose first number is even are trained."""
    return np.arange(7)[:, None] % 2 == np.zeros((1, 7), dtype=int)


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("4+3", "0var_train"),
        ("b=3, 4+3", "0var_train"),
        ("b=3, b+3", "1var_add_restricted"),
        ("a=4, 4+a", "1var_var_restricted"),
        ("a=4, a+1", "1var_train"),
        ("d=3, d+2", "1var_both_restricted"),
        ("b=2, c=3, c+b", "2var_add_restricted"),
        ("b=2, c=3, b+c", "2var_train"),
        ("b=2, a=3, b+a", "2var_var_restricted_1"),
        ("d=2, a=3, d+a", "2var_var_restricted_2"),
        ("d=3, b=2, d+b", "2var_both_restricted_1"),
        ("d=3, a=2, d+a", "2var_both_restricted_2"),
    ],
)
def test_a_problem_is_told_its_split(
    tiny: Circuits, tiny_config: Config, pairs: np.ndarray, text: str, split: str
) -> None:
    said = answer(tiny, tiny_config.task, pairs, text)
    assert said.split == split
    assert said.trained == split.endswith("_train")
    assert f"split {split}: " in membership(said)


def test_without_the_pairs_no_split_is_claimed_but_a_held_out_position_still_is(
    tiny: Circuits, tiny_config: Config
) -> None:
    known, unknown = (answer(tiny, tiny_config.task, None, text) for text in ("a=4, 4+a", "a=4, a+4"))
    assert (known.split, known.pair_trained, known.trained, known.held_out_positions) == (None, None, False, 1)
    assert (unknown.split, unknown.pair_trained, unknown.trained, unknown.held_out_positions) == (None, None, None, 0)
    assert "trained or held out" in membership(unknown)


def test_the_answer_is_the_models_with_its_probability_and_the_next_likeliest(
    tiny: Circuits, tiny_config: Config
) -> None:
    text = "b=2, c=3, b+c"
    said = answer(tiny, tiny_config.task, None, text)
    tokens = torch.from_numpy(to_tokens(tiny_config.task, text).astype(np.int64))[None]
    probabilities = forward(tiny, tokens).logits[0].softmax(0)
    order = probabilities.argsort(descending=True).tolist()
    assert said.answer == order[0] and said.expected == 5
    assert said.probability == pytest.approx(probabilities.max().item())
    assert [number for number, _ in said.runners_up] == order[1:4]
    assert said.runners_up[0][1] == pytest.approx(probabilities[order[1]].item())


def test_where_equals_looks_is_a_share_of_one_in_each_layer(tiny: Circuits, tiny_config: Config) -> None:
    said = answer(tiny, tiny_config.task, None, "b=2, c=3, b+c")
    assert said.tokens == ["·", "·", "b", "2", "c", "3", "+", "b", "c", "="]
    assert sum(said.layer1) == pytest.approx(1, abs=1e-6)
    assert sum(said.layer2) == pytest.approx(1, abs=1e-6)
    rows = looks_by_token(said)
    assert [word for word, _, _ in rows] == ["padding ×2", "b", "2", "c", "3", "+", "b", "c", "="]
    assert rows[0][1] == pytest.approx(said.layer1[0] + said.layer1[1])


def test_only_a_sum_without_an_assignment_gets_a_note(tiny: Circuits, tiny_config: Config) -> None:
    assert "always has at least one" in answer(tiny, tiny_config.task, None, "1+2").note
    assert answer(tiny, tiny_config.task, None, "a=0, 1+2").note is None


def test_pairs_of_another_task_are_not_used(tiny_config: Config, tmp_path: Path) -> None:
    task = tiny_config.task
    other = Task(N=5, variables=4, context=10, left_only=1, right_only=1)
    for name, of in (("own", task), ("other", other)):
        trained = np.arange(of.N**2) % 3 == 0
        tasks.write_table(tmp_path / name / "pairs.parquet", [pair_table(of.N, trained)], of)
    found = trained_pairs(tmp_path / "own", task)
    assert found[1, 2] and not found[2, 0]  # rows are the first number: 1·7 + 2 is a multiple of 3, 2·7 + 0 is not
    assert trained_pairs(tmp_path / "other", task) is None
    assert trained_pairs(tmp_path / "absent", task) is None


def test_the_published_model_answers_right(reference: Path) -> None:
    state = torch.load(reference / "checkpoint_step_39901.pth", weights_only=True)
    weights, config = from_state_dict(state, left_only=2, right_only=2)
    said = answer(Circuits.of(weights), config.task, None, "c=17, b=42, b+19")
    assert (said.answer, said.expected) == (2, 2)
    assert said.probability > 0.99
    value, constant = said.tokens.index("42"), said.tokens.index("19")
    assert {*np.argsort(said.layer2)[-2:]} == {value, constant}


def test_as_json_each_line_of_input_gets_a_line_and_errors_end_nothing(
    tiny_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("b=3, b+1\n\nb+1\n  1+2  \n"))
    main(problem=None, model=tiny_file, data=tmp_path, as_json=True)
    printed = capsys.readouterr()
    first, second, third = (json.loads(line) for line in printed.out.splitlines())
    assert first["problem"] == "b=3, b+1" and first["expected"] == 4
    assert second == {"problem": "b+1", "error": "variable b is used but never assigned"}
    assert third["problem"] == "1+2" and third["expected"] == 3


def test_for_people_errors_go_to_standard_error_and_the_rest_is_answered(
    tiny_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("b=3, b+b\nb=3, b+1"))
    main(problem=None, model=tiny_file, data=tmp_path, as_json=False)
    printed = capsys.readouterr()
    assert printed.err == "error: b+b is not part of the task: two variables must be different\n"
    assert printed.out.startswith("b=3, b+1 → ")
    assert "where = looks" in printed.out and "> " not in printed.out


def test_words_of_a_problem_that_the_shell_took_apart_belong_together(
    tiny_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(problem=["b=3,", "b+1"], model=tiny_file, data=tmp_path, as_json=True)
    assert json.loads(capsys.readouterr().out)["problem"] == "b=3, b+1"


def test_an_error_in_the_one_problem_given_is_raised_as_it_is(tiny_file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="9 is not below N = 7"):
        main(problem=["9+1"], model=tiny_file, data=tmp_path, as_json=True)


def test_without_a_model_one_line_says_how_to_get_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stages.ask", "1+2", "--model", str(tmp_path / "model.safetensors")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and not ended.stdout
    assert len(ended.stderr.splitlines()) == 1
    assert "dvc repro" in ended.stderr and "dvc pull" in ended.stderr


def test_another_file_in_the_place_of_the_pairs_is_refused_in_a_sentence(tiny_config: Config, tmp_path: Path) -> None:
    import pyarrow as pa

    tasks.write_table(tmp_path / "pairs.parquet", [pa.table({"form": ["0var"]})], tiny_config.task)
    with pytest.raises(InputError, match="has no column 'n1'"):
        trained_pairs(tmp_path, tiny_config.task)
