"""The task: vocabulary, operand couples, pairs, splits, and Parquet files that carry the task."""

import random
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from stages.core.layouts import TOKEN, values
from stages.core.params import InputError
from stages.core.task import CONSTANT, SPLITS, Operands, Task, read_table, token_array, trained_pairs, write_table
from tests.strategies import tasks

# The table of splits: name → form, variables in a held-out position, pair trained.
NAMES = {
    "0var_train": (0, 0, True),
    "0var_add_restricted": (0, 0, False),
    "1var_train": (1, 0, True),
    "1var_add_restricted": (1, 0, False),
    "1var_var_restricted": (1, 1, True),
    "1var_both_restricted": (1, 1, False),
    "2var_train": (2, 0, True),
    "2var_add_restricted": (2, 0, False),
    "2var_var_restricted_1": (2, 1, True),
    "2var_both_restricted_1": (2, 1, False),
    "2var_var_restricted_2": (2, 2, True),
    "2var_both_restricted_2": (2, 2, False),
}


def table_of(**columns: list[int]) -> pa.Table:
    return pa.table({name: pa.array(column, pa.int16()) for name, column in columns.items()})


# --- vocabulary and couples -----------------------------------------------------------------------------------------


def test_the_vocabulary_is_numbers_then_plus_equals_padding_then_variables(task):
    assert (task.plus, task.equals, task.padding, task.first_variable, task.vocabulary) == (59, 60, 61, 62, 74)
    assert task.names == "abcdefghijkl"
    assert (task.prefix, task.most_assignments) == (12, 6)


@pytest.mark.parametrize(("context", "variables", "most"), [(8, 12, 2), (9, 12, 2), (10, 12, 3), (200, 12, 12)])
def test_no_more_assignments_than_the_prefix_or_the_variables_allow(context, variables, most):
    task = Task(N=59, variables=variables, context=context, left_only=0, right_only=0)
    assert task.most_assignments == most


def test_there_are_157_couples_of_operands_and_113_are_trained(task):
    operands = Operands.of(task)
    assert np.bincount(operands.form).tolist() == [1, 24, 132] and len(operands) == 157
    assert np.bincount(operands.trained.form).tolist() == [1, 20, 92] and len(operands.trained) == 113
    held_out = {form: np.bincount(operands.held_out[operands.form == form]).tolist() for form in (1, 2)}
    assert held_out == {1: [20, 4], 2: [92, 36, 4]}


@settings(deadline=None, max_examples=60)
@given(tasks())
def test_couples_are_every_two_different_operands_once_and_know_their_held_out_positions(task):
    operands = Operands.of(task)
    sides = [CONSTANT, *range(task.variables)]
    every = [(left, right) for left, right in product(sides, sides) if left != right or left == CONSTANT]
    listed = list(zip(operands.left.tolist(), operands.right.tolist(), strict=True))
    assert len(listed) == len(every) and set(listed) == set(every)
    for i, (left, right) in enumerate(listed):
        wrong_left = left in range(task.variables - task.right_only, task.variables)
        wrong_right = right in range(task.left_only)
        assert operands.held_out[i] == wrong_left + wrong_right
        assert operands.form[i] == (left != CONSTANT) + (right != CONSTANT)
    assert set(operands.trained.form.tolist()) == {0, 1, 2}  # whatever is held out, each form can be trained


# --- pairs and splits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("N", "f", "seed", "count"), [(59, 0.7, 42, 2436), (59, 0.25, 0, 870), (7, 0.5, 3, 24), (2, 1.0, 1, 4)]
)
def test_trained_pairs_are_the_sample_of_the_row_major_list(N, f, seed, count):
    pairs = [(n1, n2) for n1 in range(N) for n2 in range(N)]
    sample = set(random.Random(seed).sample(pairs, int(f * N**2)))
    trained = trained_pairs(N, f, seed)
    assert len(sample) == trained.sum() == count and len(trained) == N**2
    assert [pair in sample for pair in pairs] == trained.tolist()


def test_the_pairs_are_those_behind_the_published_splits(task: Task, reference: Path):
    batches = np.load(reference / "batches.npz")
    trained = trained_pairs(59, 0.7, 42)
    splits = [name.removesuffix("_answers") for name in batches if name.endswith("_answers")]
    for split in splits:
        form, held_out, pair_trained = NAMES[split]
        tokens = batches[f"{split}_tokens"].astype(TOKEN)
        assert set(trained[values(task, tokens) @ [59, 1]].tolist()) == {pair_trained}, split
        operands = tokens[:, 13:15].astype(int) - task.first_variable
        assert set((operands >= 0).sum(axis=1).tolist()) == {form}, split
        wrong_side = (operands[:, 0] >= 10).astype(int) + ((operands[:, 1] >= 0) & (operands[:, 1] < 2))
        assert set(wrong_side.tolist()) == {held_out}, split


def test_splits_have_the_names_of_the_table():
    assert {split.name: (split.form, split.held_out, split.pair_trained) for split in SPLITS} == NAMES
    assert len(SPLITS) == 12


@settings(deadline=None, max_examples=30)
@given(tasks(most_numbers=20))
def test_every_problem_belongs_to_exactly_one_split(task):
    operands = Operands.of(task)
    trained = trained_pairs(task.N, 0.5, 0)
    members = np.zeros((len(operands), task.N**2), dtype=int)
    for split in SPLITS:
        couples = (operands.form == split.form) & (operands.held_out == split.held_out)
        members += np.outer(couples, trained == split.pair_trained)
    assert members.min() == members.max() == 1


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_table_comes_back_with_its_task(tmp_path, task):
    path = tmp_path / "deeper/numbers.parquet"
    write_table(path, [table_of(a=[1, 2]), table_of(a=[3])], task)
    table, found = read_table(path)
    assert table.column("a").to_pylist() == [1, 2, 3] and found == task
    assert read_table(path, task)[1] == task
    assert [file.name for file in path.parent.iterdir()] == ["numbers.parquet"]


def test_tokens_come_back_as_one_array(tmp_path, task):
    tokens = np.arange(96, dtype=TOKEN).reshape(6, 16)
    rows = [pa.FixedSizeListArray.from_arrays(pa.array(part.ravel()), 16) for part in (tokens[:4], tokens[4:])]
    write_table(tmp_path / "t.parquet", [pa.table({"tokens": r}) for r in rows], task)
    table, _ = read_table(tmp_path / "t.parquet")
    assert token_array(table).tolist() == tokens.tolist()
    assert token_array(table.slice(3, 2)).tolist() == tokens[3:5].tolist()
    assert token_array(table.slice(0, 0)).shape == (0, 16)


def test_a_table_that_fails_halfway_leaves_the_old_file_as_it_was(tmp_path, task):
    def failing():
        yield table_of(a=[1])
        raise RuntimeError("the disk is on fire")

    path = tmp_path / "numbers.parquet"
    write_table(path, [table_of(a=[5])], task)
    before = path.read_bytes()
    with pytest.raises(RuntimeError):
        write_table(path, failing(), task)
    assert path.read_bytes() == before


def test_a_missing_table_is_named_with_how_to_make_it(tmp_path):
    with pytest.raises(InputError, match=r"none\.parquet does not exist: make it with `dvc repro`"):
        read_table(tmp_path / "none.parquet")


@pytest.mark.parametrize("keep", [0, 3, 100, -1, -20])
def test_a_truncated_table_is_refused(tmp_path, task, keep):
    path = tmp_path / "numbers.parquet"
    write_table(path, [table_of(a=list(range(1000)))], task)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"numbers\.parquet is damaged or no Parquet file") as error:
        read_table(path)
    assert "\n" not in str(error.value)


def test_a_table_of_somebody_else_is_refused(tmp_path):
    pq.write_table(table_of(a=[1]), tmp_path / "foreign.parquet")
    with pytest.raises(InputError, match="does not say which task it is for: it was not written by this project"):
        read_table(tmp_path / "foreign.parquet")


@pytest.mark.parametrize(
    ("key", "value", "old"), [("N", 7, 59), ("variables", 11, 12), ("context", 17, 16), ("right_only", 3, 2)]
)
def test_a_table_made_for_another_task_is_refused_with_both_values(tmp_path, task, key, value, old):
    write_table(tmp_path / "numbers.parquet", [table_of(a=[1])], task)
    with pytest.raises(InputError) as error:
        read_table(tmp_path / "numbers.parquet", task.model_copy(update={key: value}))
    assert f"numbers.parquet was made for task.{key} = {old}, not for {value}" in str(error.value)


# --- bounds ---------------------------------------------------------------------------------------------------------

GOOD = {"N": 59, "variables": 12, "context": 16, "left_only": 2, "right_only": 2}


@pytest.mark.parametrize(
    "change",
    [
        {"N": 2},
        {"N": 1000},
        {"context": 8},
        {"context": 100_000},
        {"variables": 26},
        {"variables": 2, "left_only": 1, "right_only": 1},
        {"left_only": 6, "right_only": 6},
        {"left_only": 11, "right_only": 1},
        {"left_only": 0, "right_only": 11},
    ],
)
def test_the_ends_of_what_is_allowed_are_allowed(change):
    assert Task.parse(GOOD | change, "task").model_dump() == GOOD | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"N": 1}, "task.N = 1: must be a whole number from 2 to 1000"),
        ({"N": 1001}, "task.N = 1001: must be a whole number from 2 to 1000"),
        ({"context": 7}, "task.context = 7: must be a whole number from 8 to 100000"),
        ({"variables": 1}, "task.variables = 1: must be a whole number from 2 to 26"),
        ({"variables": 27}, "task.variables = 27: must be a whole number from 2 to 26"),
        ({"left_only": -1}, "task.left_only = -1: must be a whole number at least 0"),
        ({"right_only": -1}, "task.right_only = -1: must be a whole number at least 0"),
    ],
)
def test_what_is_beyond_is_refused_with_key_value_and_range(change, message):
    with pytest.raises(InputError) as error:
        Task.parse(GOOD | change, "task")
    assert str(error.value) == message


@pytest.mark.parametrize(("left_only", "right_only"), [(7, 6), (12, 0), (0, 12), (12, 12), (13, 0)])
def test_restrictions_that_leave_a_side_without_variables_are_refused(left_only, right_only):
    with pytest.raises(InputError) as error:
        Task.parse(GOOD | {"left_only": left_only, "right_only": right_only}, "task")
    assert str(error.value).startswith(
        f"task: left_only = {left_only} and right_only = {right_only} with variables = 12: together they must be at "
        "most the number of variables, and each below it"
    )
