"""The generated Parquet files: what is in them, that nothing trained is judged as held out, and bad input."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from scipy.stats import chisquare

from stages import generate
from stages.core.layouts import values
from stages.core.task import CONSTANT, SPLITS, Operands, Task, read_table, token_array, trained_pairs
from stages.generate import GenerateParams, draw_split, exact_set
from tests.strategies import problem_of, tasks

ROOT = Path(__file__).parents[1]
FILES = ["eval.parquet", "exact.parquet", "operands.parquet", "pairs.parquet"]
PAPER = {
    "task": {"N": 59, "variables": 12, "context": 16, "left_only": 2, "right_only": 2},
    "generate": {"f": 0.7, "eval_size": 2000, "exact_limit": 250_000, "seed": 42},
}
TINY = {
    "task": {"N": 7, "variables": 4, "context": 10, "left_only": 1, "right_only": 1},
    "generate": {"f": 0.5, "eval_size": 100, "exact_limit": 10_000, "seed": 3},
}
HELD_OUT_POSITIONS = {"train": 0, "add_restricted": 0, "var_restricted": 1, "both_restricted": 1}


def changed(params: dict, **changes: object) -> dict:
    """The parameters with some keys replaced, wherever they stand."""
    return {name: {k: changes.get(k, v) for k, v in section.items()} for name, section in params.items()}


def as_yaml(params: dict) -> str:
    lines = []
    for name, section in params.items():
        lines += [f"{name}:", *(f"  {key}: {value}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


def generated(folder: Path, params: dict) -> Path:
    """Run the stage in this process; returns the folder with the files."""
    (folder / "params.yaml").write_text(as_yaml(params))
    generate.main(folder / "data", folder / "params.yaml")
    return folder / "data"


def rows(data: Path, file: str) -> tuple[Task, pd.DataFrame, np.ndarray]:
    """A file of sequences: its task, its columns but for the tokens, and the tokens [rows, T]."""
    table, task = read_table(data / file)
    return task, table.drop(["tokens"]).to_pandas(), token_array(table)


def problem_numbers(task: Task, tokens: np.ndarray) -> np.ndarray:
    """[rows, 4] n1, n2, left, right of sequences, operands as variable indices or `CONSTANT`."""
    operands = tokens[:, -3:-1].astype(int)
    return np.hstack([values(task, tokens), np.where(operands < task.N, CONSTANT, operands - task.first_variable)])


def trained_problems(data: Path) -> set[tuple[int, ...]]:
    """Every problem that training can show, from the two files that it reads: trained pairs × trained couples."""
    pairs, task = read_table(data / "pairs.parquet")
    operands, _ = read_table(data / "operands.parquet")
    index = {name: i for i, name in enumerate(task.names)}
    couples = [
        (index.get(row["left"], CONSTANT), index.get(row["right"], CONSTANT))
        for row in operands.to_pylist()
        if row["trained"]
    ]
    return {
        (row["n1"], row["n2"], left, right) for row in pairs.to_pylist() if row["trained"] for left, right in couples
    }


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files at the default parameters."""
    return generated(tmp_path_factory.mktemp("paper"), PAPER)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a task that is small enough to list."""
    return generated(tmp_path_factory.mktemp("tiny"), TINY)


# --- the files ------------------------------------------------------------------------------------------------------


def test_the_default_parameters_are_the_papers():
    params = YAML(typ="safe").load(ROOT / "params.yaml")
    assert {name: params[name] for name in PAPER} == PAPER


def test_pairs_are_all_ordered_pairs_in_row_major_order_with_their_sums(paper):
    table, _ = read_table(paper / "pairs.parquet")
    pairs = table.to_pandas()
    assert pairs.columns.tolist() == ["n1", "n2", "answer", "trained"] and len(pairs) == 3481
    assert (pairs.n1 * 59 + pairs.n2).tolist() == list(range(3481))
    assert (pairs.answer == (pairs.n1 + pairs.n2) % 59).all()
    assert pairs.trained.tolist() == trained_pairs(59, 0.7, 42).tolist() and pairs.trained.sum() == 2436


def test_operands_are_all_couples_with_their_letters_and_held_out_positions(paper):
    table, _ = read_table(paper / "operands.parquet")
    operands = table.to_pylist()
    assert Counter((row["form"], row["trained"]) for row in operands) == {
        ("0var", True): 1,
        ("1var", True): 20,
        ("1var", False): 4,
        ("2var", True): 92,
        ("2var", False): 40,
    }
    for row in operands:
        wrong = (row["left"] in ("k", "l")) + (row["right"] in ("a", "b"))
        assert (row["held_out_positions"], row["trained"]) == (wrong, wrong == 0)
        assert row["form"] == f"{sum(side is not None for side in (row['left'], row['right']))}var"
    assert {"form": "1var", "left": "k", "right": None, "held_out_positions": 1, "trained": False} in operands


def test_every_row_has_the_answer_and_the_text_of_its_tokens(tiny):
    for file in ("eval.parquet", "exact.parquet"):
        task, frame, tokens = rows(tiny, file)
        for row, sequence in zip(frame.itertuples(), tokens, strict=True):
            n1, n2, *_ = problem_of(task, sequence)
            assert row.answer == (n1 + n2) % 7
            words = [task.names[t - 10] if t >= 10 else str(t) for t in sequence if t < 7 or t >= 10]
            assert row.text.replace(", ", "").replace("=", "").replace("+", "") == "".join(words)


def test_the_same_parameters_give_the_same_bytes_and_another_seed_others(tiny, tmp_path):
    again = generated(tmp_path, TINY)
    assert [(again / f).read_bytes() == (tiny / f).read_bytes() for f in FILES] == [True] * 4
    other = generated(tmp_path, changed(TINY, seed=4))
    assert [(other / f).read_bytes() == (tiny / f).read_bytes() for f in FILES] == [False, False, True, False]


def test_the_exact_sets_do_not_depend_on_the_size_of_the_splits(tiny, tmp_path):
    small = generated(tmp_path, changed(TINY, eval_size=1))
    first = pd.read_parquet(small / "eval.parquet")
    assert first.split.tolist() == [split.name for split in SPLITS]
    assert (small / "exact.parquet").read_bytes() == (tiny / "exact.parquet").read_bytes()


def test_each_split_is_drawn_with_its_own_seed(tiny):
    task, frame, tokens = rows(tiny, "eval.parquet")
    trained = [frame.split == split.name for split in SPLITS if split.pair_trained]
    draws = {tuple(problem_numbers(task, tokens[of_split])[:, :2].ravel().tolist()) for of_split in trained}
    assert len(draws) == len(trained) == 6  # the same pairs to choose from, another choice in each


# --- nothing trained is judged as held out --------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["tiny", "paper"])
def test_no_trained_problem_is_in_a_held_out_split(size, request):
    data = request.getfixturevalue(size)
    trained = trained_problems(data)
    of_split: dict[str, set[tuple[int, ...]]] = {}
    for file in ("eval.parquet", "exact.parquet"):
        task, frame, tokens = rows(data, file)
        numbers = problem_numbers(task, tokens)
        for split, index in frame.groupby("split").indices.items():
            of_split[str(split)] = set(map(tuple, numbers[index].tolist()))
    assert of_split.keys() == {split.name for split in SPLITS} | {"0var_exact", "2var_exact"}
    for split, problems in of_split.items():
        if split.endswith("_train"):
            assert problems <= trained, split
        else:
            assert not problems & trained, split
    cells = [of_split[split.name] for split in SPLITS]
    assert sum(map(len, cells)) == len(set.union(*cells))  # no problem in two splits


@pytest.mark.parametrize("size", ["tiny", "paper"])
def test_every_row_of_a_split_belongs_to_the_split(size, request):
    data = request.getfixturevalue(size)
    task, frame, tokens = rows(data, "eval.parquet")
    trained = read_table(data / "pairs.parquet")[0].to_pandas().trained.to_numpy()
    n1, n2, left, right = problem_numbers(task, tokens).T
    wrong = (left >= task.variables - task.right_only).astype(int) + ((right >= 0) & (right < task.left_only))
    form = (left >= 0).astype(int) + (right >= 0)
    assert frame.groupby("split", sort=False).size().to_dict() == dict.fromkeys(
        [split.name for split in SPLITS], 2000 if size == "paper" else 100
    )
    for split, index in frame.groupby("split").indices.items():
        kind, _, count = str(split)[5:].partition("restricted_")
        kind += "restricted" if count else ""
        assert set(form[index]) == {int(str(split)[0])}
        assert set(wrong[index]) == {int(count or HELD_OUT_POSITIONS[kind])}, split
        assert set(trained[(n1 * task.N + n2)[index]]) == {kind in ("train", "var_restricted")}, split
    assert (left[form == 2] != right[form == 2]).all()


# --- the exact sets -------------------------------------------------------------------------------------------------


def test_the_exact_sets_of_the_papers_task_hold_1045_and_193580_problems_each_once(paper):
    task, frame, tokens = rows(paper, "exact.parquet")
    assert frame.groupby("split").size().to_dict() == {"0var_exact": 1045, "2var_exact": 193_580}
    assert 1045 * 92 + 2436 * 40 == 193_580
    assert not frame.sampled.any()
    for _, index in frame.groupby("split").indices.items():
        assert len(np.unique(problem_numbers(task, tokens[index]), axis=0)) == len(index)


def test_the_exact_sets_are_every_problem_of_their_kind(tiny):
    task, frame, tokens = rows(tiny, "exact.parquet")
    trained = {tuple(pair) for pair in np.argwhere(trained_pairs(7, 0.5, 3).reshape(7, 7)).tolist()}
    pairs = [(n1, n2) for n1 in range(7) for n2 in range(7)]
    zero = [(*pair, CONSTANT, CONSTANT) for pair in pairs if pair not in trained]
    # d never stands on the left in training, a never on the right.
    two = [
        (*pair, left, right)
        for pair in pairs
        for left in range(4)
        for right in range(4)
        if left != right and (pair in trained) == (left == 3 or right == 0)
    ]
    for name, expected in (("0var_exact", zero), ("2var_exact", two)):
        found = [problem_of(task, sequence) for sequence in tokens[(frame.split == name).to_numpy()]]
        assert len(found) == len(expected) and set(found) == set(expected)


def test_an_exact_set_above_the_limit_becomes_a_marked_sample_of_that_size(tmp_path):
    data = generated(tmp_path, changed(TINY, exact_limit=30))
    task, frame, tokens = rows(data, "exact.parquet")
    assert frame.groupby("split").sampled.unique().map(list).to_dict() == {"0var_exact": [False], "2var_exact": [True]}
    assert frame.groupby("split").size().to_dict() == {"0var_exact": 25, "2var_exact": 30}
    sample = [problem_of(task, sequence) for sequence in tokens[25:]]
    assert len(set(sample)) == 30 and not set(sample) & trained_problems(data)


def test_an_exact_set_of_exactly_the_limit_is_whole_and_not_marked():
    task = Task(**TINY["task"])
    trained = trained_pairs(7, 0.5, 3)
    rng = np.random.default_rng(0)
    problems, population = exact_set("2var_exact", task, trained, 1000, rng)
    assert len(problems) == population == 25 * 7 + 24 * 5
    whole, _ = exact_set("2var_exact", task, trained, population, rng)
    assert np.array_equal(whole.n1, problems.n1) and np.array_equal(whole.operands.left, problems.operands.left)


def test_the_sample_of_an_exact_set_is_uniform():
    task = Task(**TINY["task"])
    trained = trained_pairs(7, 0.5, 3)
    counts = Counter()
    for seed in range(400):
        p, _ = exact_set("2var_exact", task, trained, 50, np.random.default_rng(seed))
        counts.update(zip(*(c.tolist() for c in (p.n1, p.n2, p.operands.left, p.operands.right)), strict=True))
    assert len(counts) == 295 and sum(counts.values()) == 20_000
    # Without replacement the counts vary less than Pearson's test supposes, by (295 - 50) / 294.
    statistic = chisquare(list(counts.values())).statistic * 294 / 245
    assert 220 < statistic < 380


# --- which problems -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1var_train", "1var_var_restricted", "1var_add_restricted", "1var_both_restricted"])
def test_the_sides_of_1var_splits_are_equally_likely_whatever_their_variables(name):
    task = Task(N=7, variables=12, context=16, left_only=5, right_only=1)
    split = next(split for split in SPLITS if split.name == name)
    problems = draw_split(split, task, trained_pairs(7, 0.5, 0), 40_000, np.random.default_rng(0))
    left, right = problems.operands.left, problems.operands.right
    assert (left != CONSTANT).mean() == pytest.approx(0.5, abs=0.01)
    trained_position = split.held_out == 0
    for side, variables in ((left, 11 if trained_position else 1), (right, 7 if trained_position else 5)):
        counts = np.bincount(side[side != CONSTANT])
        counts = counts[counts > 0]
        assert len(counts) == variables
        assert variables == 1 or chisquare(counts).pvalue > 1e-3


def test_a_1var_split_with_variables_on_one_side_only_uses_that_side():
    task = Task(N=7, variables=4, context=10, left_only=1, right_only=0)
    split = next(split for split in SPLITS if split.name == "1var_var_restricted")
    problems = draw_split(split, task, trained_pairs(7, 0.5, 0), 500, np.random.default_rng(0))
    assert set(problems.operands.left.tolist()) == {CONSTANT} and set(problems.operands.right.tolist()) == {0}


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_pairs_and_couples_of_a_split_are_equally_likely(split):
    task = Task(**TINY["task"])
    trained = trained_pairs(7, 0.5, 3)
    problems = draw_split(split, task, trained, 30_000, np.random.default_rng(5))
    pairs = np.bincount(problems.n1 * 7 + problems.n2, minlength=49)[trained == split.pair_trained]
    assert pairs.sum() == 30_000 and chisquare(pairs).pvalue > 1e-3
    operands = Operands.of(task)
    couples = np.flatnonzero((operands.form == split.form) & (operands.held_out == split.held_out))
    found = Counter(zip(problems.operands.left.tolist(), problems.operands.right.tolist(), strict=True))
    counts = [found.pop((operands.left[c], operands.right[c])) for c in couples]
    assert not found and (len(counts) == 1 or chisquare(counts).pvalue > 1e-3)


# --- what the parameters leave empty --------------------------------------------------------------------------------


def test_with_every_pair_trained_there_is_no_split_of_held_out_pairs(tmp_path):
    data = generated(tmp_path, changed(TINY, f=1))
    assert set(pd.read_parquet(data / "eval.parquet").split) == {
        "0var_train",
        "1var_train",
        "1var_var_restricted",
        "2var_train",
        "2var_var_restricted_1",
        "2var_var_restricted_2",
    }
    assert pd.read_parquet(data / "exact.parquet").groupby("split").size().to_dict() == {"2var_exact": 49 * 5}


def test_without_left_only_variables_no_couple_has_two_held_out_positions(tmp_path):
    data = generated(tmp_path, changed(TINY, left_only=0))
    assert {split.name for split in SPLITS} - set(pd.read_parquet(data / "eval.parquet").split) == {
        "2var_var_restricted_2",
        "2var_both_restricted_2",
    }


def test_without_restricted_variables_no_split_has_held_out_positions(tmp_path):
    data = generated(tmp_path, changed(TINY, left_only=0, right_only=0))
    assert set(pd.read_parquet(data / "eval.parquet").split) == {
        f"{form}var_{kind}" for form in (0, 1, 2) for kind in ("train", "add_restricted")
    }


def test_with_nothing_held_out_the_exact_sets_are_empty_and_the_files_still_there(tmp_path):
    data = generated(tmp_path, changed(TINY, f=1, left_only=0, right_only=0))
    task, frame, tokens = rows(data, "exact.parquet")
    assert len(frame) == 0 and tokens.shape == (0, 10)
    assert task == Task(**TINY["task"] | {"left_only": 0, "right_only": 0})
    assert frame.columns.tolist() == ["split", "answer", "text", "sampled"]


@settings(deadline=None, max_examples=40)
@given(
    tasks(most_numbers=12),
    st.floats(0.3, 1),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(0, 2**63 - 1),
)
def test_any_task_gives_sequences_of_the_splits_that_they_stand_for(task, f, eval_size, exact_limit, seed):
    p = GenerateParams(f=f, eval_size=eval_size, exact_limit=exact_limit, seed=seed)
    trained = trained_pairs(task.N, f, seed)
    evaluation = pa.concat_tables(generate.eval_tables(task, p, trained))
    exact = pa.concat_tables(generate.exact_tables(task, p, trained))
    for table in (evaluation, exact):
        tokens = token_array(table)
        assert tokens.shape == (len(table), task.context)
        for split, answer, sequence in zip(
            table["split"].to_pylist(), table["answer"].to_pylist(), tokens, strict=True
        ):
            n1, n2, left, right = problem_of(task, sequence)
            assert answer == (n1 + n2) % task.N
            wrong = (left >= task.variables - task.right_only) + (0 <= right < task.left_only)
            if split == "0var_exact":
                assert (left, right) == (CONSTANT, CONSTANT) and not trained[n1 * task.N + n2]
            elif split == "2var_exact":
                assert min(left, right) >= 0 and (wrong > 0) == trained[n1 * task.N + n2]
            else:
                cell = next(s for s in SPLITS if s.name == split)
                assert (cell.form, cell.held_out) == ((left >= 0) + (right >= 0), wrong)
                assert cell.pair_trained == trained[n1 * task.N + n2]
    assert set(Counter(evaluation["split"].to_pylist()).values()) == {eval_size}
    assert all(size <= exact_limit for size in Counter(exact["split"].to_pylist()).values())


def test_long_contexts_are_written_in_small_pieces():
    task = Task(N=7, variables=4, context=50_000, left_only=1, right_only=1)
    p = GenerateParams(f=0.5, eval_size=12, exact_limit=1, seed=0)
    table = next(generate.eval_tables(task, p, trained_pairs(7, 0.5, 0)))
    assert table.num_rows == 5  # 2**18 tokens, whatever their number a sequence


# --- bad input ------------------------------------------------------------------------------------------------------


def run_generate(folder: Path, text: str | None) -> subprocess.CompletedProcess[str]:
    if text is not None:
        (folder / "params.yaml").write_text(text)
    command = [sys.executable, "-m", "stages.generate", "--params", str(folder / "params.yaml")]
    return subprocess.run(
        [*command, "--out", str(folder / "data")], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("N: 7", "N: 1", "task.N = 1: must be a whole number from 2 to 1000"),
        ("f: 0.5", "f: 0", "generate.f = 0: must be a number above 0 and at most 1"),
        ("f: 0.5", "f: 1.2", "generate.f = 1.2: must be a number above 0 and at most 1"),
        ("f: 0.5", "f: 0.02", "generate.f = 0.02: no pair of 49 is trained; must be at least 1/49"),
        ("f: 0.5", "f: half", "generate.f = 'half': must be a number above 0 and at most 1"),
        ("context: 10", "context: 7", "task.context = 7: must be a whole number from 8 to 100000"),
        ("left_only: 1", "left_only: 4", "task: left_only = 4 and right_only = 1 with variables = 4: together they"),
        ("  seed: 3\n", "", "generate.seed is missing: must be a whole number at least 0 and below"),
        ("seed: 3", "seed: 3\n  speed: 9", "generate.speed = 9: there is no such key; generate has f, eval_size"),
        ("generate:", "generation:", "has no section 'generate'"),
        ("N: 7", "N: [7", "cannot be read as YAML"),
        (None, None, "does not exist: run this from the repository's root, or name the file"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(tmp_path, old, new, message):
    text = None if old is None else as_yaml(TINY).replace(old, new)
    assert text != as_yaml(TINY)
    result = run_generate(tmp_path, text)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
    assert not (tmp_path / "data").exists()


def test_good_input_through_the_command_line_says_nothing_and_writes_four_files(tmp_path, tiny):
    result = run_generate(tmp_path, as_yaml(TINY))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert sorted(os.listdir(tmp_path / "data")) == FILES
    assert all((tmp_path / "data" / f).read_bytes() == (tiny / f).read_bytes() for f in FILES)
