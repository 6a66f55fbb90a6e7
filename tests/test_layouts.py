"""Problems → token sequences: what every layout obeys, how layouts are distributed, and what training draws."""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from stages.core.layouts import (
    TOKEN,
    Problems,
    TrainingDraw,
    kept_copies,
    lay_out,
    training_draw,
    training_examples,
    value_positions,
    values,
)
from stages.core.task import CONSTANT, Operands, Task, trained_pairs
from tests.strategies import assignments, problem_of, random_problems, tasks

UNLIKELY = 1e-3  # seeds are fixed: a p-value below this is a wrong distribution, not bad luck
seeds = st.integers(0, 2**32)


def one_problem(task: Task, left: int, right: int, copies: int, n1: int = 1, n2: int = 0) -> Problems:
    """The same problem many times."""
    operands = Operands.of(task)
    couple = np.flatnonzero((operands.left == left) & (operands.right == right))
    assert len(couple) == 1
    return Problems(np.full(copies, n1), np.full(copies, n2), operands[np.repeat(couple, copies)])


def draw_of(task: Task, r: float, pairs: np.ndarray, copies: np.ndarray | None = None) -> TrainingDraw:
    return training_draw(task, Operands.of(task).trained, pairs, (1.0, 1.0, r), copies)


def pairs_of(task: Task, f: float = 0.7, seed: int = 42) -> np.ndarray:
    return np.stack(np.divmod(np.flatnonzero(trained_pairs(task.N, f, seed)), task.N), axis=1)


def probability_of_frequencies(observed: list[float], expected: list[float]) -> float:
    """The p-value of Pearson's test that counts follow the given weights."""
    weights = np.array(expected, dtype=float)
    return chisquare(observed, weights / weights.sum() * np.sum(observed)).pvalue


# --- every layout ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(tasks(), seeds, st.booleans())
def test_every_layout_is_whole_assignments_of_different_variables_and_then_the_core(task, seed, training):
    rng = np.random.default_rng(seed)
    problems = random_problems(task, 50, rng)
    tokens = lay_out(task, problems, rng, training)
    assert tokens.shape == (50, task.context) and tokens.dtype == TOKEN
    operands = problems.operands
    for i, sequence in enumerate(tokens):
        n1, n2, left, right = problems.n1[i], problems.n2[i], operands.left[i], operands.right[i]
        assert sequence[-4:].tolist() == [
            task.N,
            n1 if left == CONSTANT else task.N + 3 + left,
            n2 if right == CONSTANT else task.N + 3 + right,
            task.N + 1,
        ]
        found = assignments(task, sequence)  # asserts that each variable is followed by its number, within the prefix
        value = {variable: number for _, variable, number in found}
        assert len(value) == len(found), "a variable is assigned twice"
        assert max(1, operands.form[i]) <= len(found) <= min(task.variables, (task.context - 4) // 2)
        assert left == CONSTANT or value[left] == n1
        assert right == CONSTANT or value[right] == n2


@settings(deadline=None, max_examples=50)
@given(tasks(), seeds)
def test_value_positions_point_at_the_two_numbers_that_are_added(task, seed):
    rng = np.random.default_rng(seed)
    problems = random_problems(task, 50, rng)
    tokens = lay_out(task, problems, rng)
    assert values(task, tokens).tolist() == np.stack([problems.n1, problems.n2], axis=1).tolist()
    for sequence, positions in zip(tokens, value_positions(task, tokens), strict=True):
        where = {variable: position + 1 for position, variable, _ in assignments(task, sequence)}
        _, _, left, right = problem_of(task, sequence)
        expected = [
            task.context - 3 if left == CONSTANT else where[left],
            task.context - 2 if right == CONSTANT else where[right],
        ]
        assert positions.tolist() == expected


@settings(deadline=None, max_examples=25)
@given(tasks(), seeds, st.booleans())
def test_layouts_are_a_function_of_problems_and_seed_alone(task, seed, training):
    problems = random_problems(task, 20, np.random.default_rng(0))
    first = lay_out(task, problems, np.random.default_rng(seed), training)
    lay_out(task, random_problems(task, 7, np.random.default_rng(1)), np.random.default_rng(2))
    np.random.seed(3)  # noqa: NPY002 - the global generator must not matter
    again = lay_out(task, problems, np.random.default_rng(seed), training)
    assert np.array_equal(first, again)
    assert training or not np.array_equal(first, lay_out(task, problems, np.random.default_rng(seed + 1)))


def test_no_problems_make_no_sequences(task):
    none = random_problems(task, 0, np.random.default_rng(0))
    assert lay_out(task, none, np.random.default_rng(0)).shape == (0, 16)


def test_value_positions_of_the_published_batch_are_the_published_ones(task: Task, reference: Path):
    batches = np.load(reference / "batches.npz")
    found = value_positions(task, batches["measures_tokens"].astype(TOKEN))
    assert found.tolist() == batches["measures_value_positions"].tolist()


def test_values_of_the_published_sequences_add_up_to_the_published_answers(task: Task, reference: Path):
    batches = np.load(reference / "batches.npz")
    splits = [name.removesuffix("_answers") for name in batches if name.endswith("_answers")]
    assert len(splits) == 9
    for split in splits:
        total = values(task, batches[f"{split}_tokens"].astype(TOKEN)).sum(axis=1)
        assert (total % task.N).tolist() == batches[f"{split}_answers"].tolist()


# --- how layouts are distributed ------------------------------------------------------------------------------------


def numbers_of_assignments(task: Task, k: int, training: bool) -> dict[int, float]:
    """Probability of each number of assignments, as the paper's data generation has it."""
    M = min(task.variables, (task.context - 4) // 2)
    draws = [max(k, m) for m in range(1, M + 1)] if training else list(range(max(1, k), M + 1))
    return {m: count / len(draws) for m, count in Counter(draws).items()}


def in_gaps(paddings: int, gaps: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every way in which so many padding tokens fall into so many gaps, with its probability."""
    for counts in product(range(paddings + 1), repeat=gaps):
        if sum(counts) == paddings:
            ways = math.factorial(paddings) / math.prod(math.factorial(count) for count in counts)
            yield counts, ways / gaps**paddings


def every_layout(task: Task, left: int, right: int, n1: int, n2: int, training: bool) -> dict[tuple[int, ...], float]:
    """Every sequence that one problem can become, with its probability, by enumeration."""
    core = {v: n for v, n in ((left, n1), (right, n2)) if v != CONSTANT}
    others = [v for v in range(task.variables) if v not in core]
    ends = [task.N, task.N + 3 + left if left in core else n1, task.N + 3 + right if right in core else n2, task.N + 1]
    result: dict[tuple[int, ...], float] = {}
    for m, p_m in numbers_of_assignments(task, len(core), training).items():
        # Ordered lists of m variables that contain the core's, all alike; distractors' numbers, all alike.
        orders = [order for order in permutations([*core, *others], m) if set(core) <= set(order)]
        for order, (gaps, p_gaps) in product(orders, list(in_gaps(task.context - 4 - 2 * m, m + 1))):
            for numbers in product(range(task.N), repeat=m - len(core)):
                values_of = core | dict(zip([v for v in order if v not in core], numbers, strict=True))
                words = [task.N + 2] * gaps[0]
                for v, gap in zip(order, gaps[1:], strict=True):
                    words += [task.N + 3 + v, values_of[v], *[task.N + 2] * gap]
                result[(*words, *ends)] = p_m * p_gaps / len(orders) / task.N ** len(numbers)
    return result


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize(
    ("left", "right"),
    [(CONSTANT, CONSTANT), (1, CONSTANT), (CONSTANT, 0), (2, 0)],
    ids=["0var", "1var left", "1var right", "2var"],
)
@pytest.mark.parametrize("context", [9, 10])
def test_each_possible_sequence_comes_as_often_as_its_probability_says(context, left, right, training):
    task = Task(N=2, variables=3, context=context, left_only=1, right_only=1)
    expected = every_layout(task, left, right, n1=1, n2=0, training=training)
    assert sum(expected.values()) == pytest.approx(1)
    problems = one_problem(task, left, right, copies=100_000)
    tokens = lay_out(task, problems, np.random.default_rng(7), training)
    sequences, counts = np.unique(tokens, axis=0, return_counts=True)
    observed = dict(zip(map(tuple, sequences.tolist()), counts, strict=True))
    assert observed.keys() <= expected.keys()
    p = probability_of_frequencies([observed.get(s, 0) for s in expected], list(expected.values()))
    assert p > UNLIKELY


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_the_number_of_assignments_of_the_papers_task_is_distributed_as_in_the_paper(task, k, training):
    left, right = [(CONSTANT, CONSTANT), (3, CONSTANT), (3, 4)][k]
    tokens = lay_out(task, one_problem(task, left, right, 30_000), np.random.default_rng(11), training)
    counts = np.bincount((tokens[:, :12] >= task.first_variable).sum(axis=1), minlength=7)
    of_two = [0, 0, 2, 1, 1, 1, 1] if training else [0, 0, 1, 1, 1, 1, 1]  # in training a draw of one becomes two
    expected = of_two if k == 2 else [0, 1, 1, 1, 1, 1, 1]
    possible = np.array(expected) > 0
    assert len(counts) == 7 and counts[~possible].sum() == 0
    assert probability_of_frequencies(counts[possible], np.array(expected)[possible]) > UNLIKELY


def test_each_padding_token_of_the_papers_task_falls_into_one_of_the_gaps_alike(task):
    tokens = lay_out(task, one_problem(task, 3, 4, 60_000), np.random.default_rng(13))
    four = tokens[(tokens[:, :12] >= task.first_variable).sum(axis=1) == 4][:, :12]
    first_tokens = np.nonzero(four >= task.first_variable)[1].reshape(-1, 4)
    edges = np.pad(first_tokens, ((0, 0), (1, 1)), constant_values=((0, 0), (-2, 12)))
    observed = Counter(map(tuple, (np.diff(edges, axis=1) - 2).tolist()))
    expected = dict(in_gaps(4, 5))
    assert len(expected) == 70 and observed.keys() <= expected.keys()
    assert probability_of_frequencies([observed[g] for g in expected], list(expected.values())) > UNLIKELY


def test_distractors_of_the_papers_task_are_any_other_variables_with_any_numbers_in_any_order(task):
    tokens = lay_out(task, one_problem(task, 3, CONSTANT, 60_000, n1=17), np.random.default_rng(17))
    rows, columns = np.nonzero(tokens[:, :12] >= task.first_variable)
    variables = tokens[rows, columns] - task.first_variable
    numbers = tokens[rows, columns + 1]
    assert set(numbers[variables == 3].tolist()) == {17}
    other = variables != 3
    by_variable = np.bincount(variables[other], minlength=12)
    assert probability_of_frequencies(np.delete(by_variable, 3), [1] * 11) > UNLIKELY
    assert probability_of_frequencies(np.bincount(numbers[other], minlength=59), [1] * 59) > UNLIKELY
    six = np.bincount(rows) == 6
    place_of_core = np.nonzero(variables.reshape(-1)[np.isin(rows, np.flatnonzero(six))].reshape(-1, 6) == 3)[1]
    assert probability_of_frequencies(np.bincount(place_of_core, minlength=6), [1] * 6) > UNLIKELY


# --- what training draws --------------------------------------------------------------------------------------------


def test_training_couples_weigh_twelve_to_ten_to_ten_to_ten_r(task):
    draw = draw_of(task, r=0.4, pairs=pairs_of(task))
    weights = np.diff(draw.couple_edges, prepend=0)
    assert draw.couple_edges[-1] == 1
    form, left = draw.operands.form, draw.operands.left
    total = 12 + 10 + 10 + 10 * 0.4
    assert weights[form == 0].tolist() == pytest.approx([12 / total])
    assert weights[(form == 1) & (left != CONSTANT)].tolist() == pytest.approx([1 / total] * 10)
    assert weights[(form == 1) & (left == CONSTANT)].tolist() == pytest.approx([1 / total] * 10)
    assert weights[form == 2].tolist() == pytest.approx([4 / 92 / total] * 92)


@settings(deadline=None, max_examples=50)
@given(tasks(), st.tuples(*[st.floats(0.01, 10)] * 3))
def test_forms_weigh_what_their_sides_have_in_any_task(task, form_weights):
    operands = Operands.of(task).trained
    draw = training_draw(task, operands, np.array([[0, 0]]), form_weights)
    w0, w1, r = form_weights
    n = task.variables
    expected = np.array(
        [w0 * n, w1 * (n - task.right_only), w1 * (n - task.left_only), r * (n - task.right_only)], dtype=float
    )
    kind = np.where(
        operands.form == 2, 3, np.where((operands.form == 1) & (operands.left == CONSTANT), 2, operands.form)
    )
    shares = np.bincount(kind, weights=np.diff(draw.couple_edges, prepend=0), minlength=4)
    assert shares.tolist() == pytest.approx((expected / expected.sum()).tolist())


def test_drawn_examples_have_each_couple_and_each_pair_as_often_as_they_weigh(task):
    pairs = pairs_of(task)
    draw = draw_of(task, r=0.4, pairs=pairs)
    tokens, answers = training_examples(task, draw, 200_000, np.random.default_rng(19))
    operand = np.where(tokens[:, 13:15] >= task.first_variable, tokens[:, 13:15] - task.first_variable, CONSTANT)
    couples = Counter(map(tuple, operand.tolist()))
    wanted = list(zip(draw.operands.left.tolist(), draw.operands.right.tolist(), strict=True))
    assert couples.keys() == set(wanted)  # none with a held-out position, all the others
    weights = np.diff(draw.couple_edges, prepend=0).tolist()
    assert probability_of_frequencies([couples[c] for c in wanted], weights) > UNLIKELY

    added = values(task, tokens)
    assert answers.tolist() == (added.sum(axis=1) % 59).tolist()
    for form in range(3):
        of_form = (operand != CONSTANT).sum(axis=1) == form
        counts = np.bincount(added[of_form] @ [59, 1], minlength=3481)
        trained = np.zeros(3481, dtype=bool)
        trained[pairs @ [59, 1]] = True
        assert counts[~trained].sum() == 0  # no held-out pair, in any form
        assert probability_of_frequencies(counts[trained], [1] * 2436) > UNLIKELY


@settings(deadline=None, max_examples=50)
@given(tasks(most_numbers=30), seeds, st.floats(0.05, 1), st.floats(0, 2), st.booleans())
def test_training_shows_only_trained_pairs_and_trained_couples_in_any_task(task, seed, f, r, subset):
    rng = np.random.default_rng(seed)
    pairs = pairs_of(task, f, seed)
    if not len(pairs):
        return
    draw = draw_of(task, r, pairs, kept_copies(task, len(pairs), min(r, 1), rng) if subset else None)
    tokens, answers = training_examples(task, draw, 200, rng)
    seen = set(map(tuple, pairs.tolist()))
    for sequence, answer in zip(tokens, answers, strict=True):
        n1, n2, left, right = problem_of(task, sequence)
        assert (n1, n2) in seen and answer == (n1 + n2) % task.N
        assert left == CONSTANT or left < task.variables - task.right_only
        assert right == CONSTANT or right >= task.left_only
        assert left != right or left == CONSTANT


def test_the_same_seed_draws_the_same_examples(task):
    draw = draw_of(task, r=1, pairs=pairs_of(task))
    first = training_examples(task, draw, 500, np.random.default_rng(5))
    training_examples(task, draw, 100, np.random.default_rng(6))
    again = training_examples(task, draw, 500, np.random.default_rng(5))
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1])


@pytest.mark.parametrize("subset", [False, True], ids=["frequency", "subset"])
def test_r_of_zero_shows_no_example_with_two_variables(task, subset):
    pairs = pairs_of(task)
    copies = kept_copies(task, len(pairs), 0.0, np.random.default_rng(0)) if subset else None
    tokens, _ = training_examples(task, draw_of(task, 0.0, pairs, copies), 20_000, np.random.default_rng(23))
    assert (tokens[:, 13:15] >= task.first_variable).sum(axis=1).max() == 1


def test_subset_mode_keeps_each_of_the_ten_copies_with_probability_r(task):
    copies = kept_copies(task, 400_000, 0.05, np.random.default_rng(29))
    binomial = [math.comb(10, k) * 0.05**k * 0.95 ** (10 - k) for k in range(11)]
    counts = np.bincount(copies, minlength=11)
    assert probability_of_frequencies([*counts[:5], counts[5:].sum()], [*binomial[:5], sum(binomial[5:])]) > UNLIKELY
    assert (copies > 0).mean() == pytest.approx(1 - 0.95**10, abs=0.003)  # 40 % of the pairs keep any


def test_in_subset_mode_examples_with_two_variables_weigh_the_mean_number_of_copies_kept(task):
    copies = np.array([0, 1, 2, 9])
    draw = draw_of(task, r=0.5, pairs=np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), copies=copies)
    weights = np.diff(draw.couple_edges, prepend=0)
    assert np.bincount(draw.operands.form, weights=weights).tolist() == pytest.approx([12 / 35, 20 / 35, 3 / 35])
    assert np.diff(draw.pair_edges_2var, prepend=0).tolist() == pytest.approx([0, 1 / 12, 2 / 12, 9 / 12])


def test_subset_mode_at_a_twentieth_shows_two_in_five_pairs_with_two_variables_and_all_in_other_forms(task):
    pairs = pairs_of(task)
    copies = kept_copies(task, len(pairs), 0.05, np.random.default_rng(31))
    assert (copies > 0).mean() == pytest.approx(0.40, abs=0.03)
    draw = draw_of(task, r=0.05, pairs=pairs, copies=copies)
    tokens, _ = training_examples(task, draw, 400_000, np.random.default_rng(37))
    two = (tokens[:, 13:15] >= task.first_variable).all(axis=1)
    assert two.mean() == pytest.approx(copies.mean() / (32 + copies.mean()), rel=0.05)
    index = values(task, tokens) @ [59, 1]
    in_2var = np.bincount(index[two], minlength=3481)[pairs @ [59, 1]]
    assert (in_2var[copies == 0] == 0).all()
    assert probability_of_frequencies(in_2var[copies > 0], copies[copies > 0]) > UNLIKELY  # twice as often for two
    elsewhere = np.bincount(index[~two], minlength=3481)[pairs @ [59, 1]]
    assert probability_of_frequencies(elsewhere, [1] * 2436) > UNLIKELY


def test_frequency_mode_at_a_twentieth_still_shows_every_pair_with_two_variables():
    task = Task(N=7, variables=6, context=12, left_only=1, right_only=1)
    pairs = pairs_of(task)
    tokens, _ = training_examples(task, draw_of(task, 0.05, pairs), 60_000, np.random.default_rng(41))
    two = (tokens[:, -3:-1] >= task.first_variable).all(axis=1)
    assert two.mean() == pytest.approx(0.25 / (6 + 5 + 5 + 0.25), rel=0.1)
    counts = np.bincount(values(task, tokens[two]) @ [7, 1], minlength=49)[pairs @ [7, 1]]
    assert probability_of_frequencies(counts, [1] * len(pairs)) > UNLIKELY
