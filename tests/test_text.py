"""Text ↔ tokens: the round trip, and errors that point at the part that is wrong."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.core.layouts import lay_out, values
from stages.core.params import InputError
from stages.core.task import Task
from stages.core.text import to_text, to_tokens
from tests.strategies import assignments, problem_of, random_problems, tasks

NO_SUM = "is no sum such as b+19: a problem ends in one, as in c=17, b=42, b+19"
NO_ASSIGNMENT = "is no assignment such as c=17 (a problem looks like c=17, b=42, b+19)"
NEITHER = "is neither a number from 0 to 58 nor a variable from a to l"


def error_of(task: Task, text: str) -> str:
    with pytest.raises(InputError) as error:
        to_tokens(task, text)
    return str(error.value)


# --- what is right --------------------------------------------------------------------------------------------------


def test_a_problem_becomes_padding_then_assignments_then_the_core(task):
    c, b = task.first_variable + 2, task.first_variable + 1
    tokens = to_tokens(task, "c=17, b=42, b+19")
    assert tokens.tolist() == [61] * 8 + [c, 17, b, 42, 59, b, 19, 60]
    assert values(task, tokens[None]).tolist() == [[42, 19]]
    assert to_text(task, tokens) == "c=17, b=42, b+19"


@pytest.mark.parametrize(
    "text", ["c=17,b=42,b+19", "  c = 17 ,\tb = 42 , b + 19 =\n", "c=17, b=42, b+19=", "c=017, b=42, b+0019"]
)
def test_spaces_leading_zeros_and_a_last_equals_sign_do_not_matter(task, text):
    assert to_text(task, to_tokens(task, text)) == "c=17, b=42, b+19"


def test_a_sum_of_constants_needs_no_assignment(task):
    assert to_tokens(task, "7+23").tolist() == [61] * 12 + [59, 7, 23, 60]
    assert to_tokens(task, "0" * 5000 + "+58").tolist() == [61] * 12 + [59, 0, 58, 60]


def test_as_many_assignments_as_fit_are_taken(task):
    text = "a=0, b=1, c=2, d=3, e=4, f=58, a+f"
    assert to_text(task, to_tokens(task, text)) == text
    assert task.padding not in to_tokens(task, text)


@settings(deadline=None, max_examples=100)
@given(tasks(), st.integers(0, 2**32), st.booleans())
def test_every_sequence_comes_back_from_its_text_but_for_the_padding(task, seed, training):
    rng = np.random.default_rng(seed)
    for sequence in lay_out(task, random_problems(task, 20, rng), rng, training):
        text = to_text(task, sequence)
        again = to_tokens(task, text)
        without = sequence[sequence != task.padding]
        assert again.tolist() == [task.padding] * (task.context - len(without)) + without.tolist()
        assert to_text(task, again) == text
        assert problem_of(task, again) == problem_of(task, sequence)
        assert [a[1:] for a in assignments(task, again)] == [a[1:] for a in assignments(task, sequence)]


# --- what is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("c=17, q+19", "variable q is used but never assigned (the variables of this task are a to l)"),
        ("c=17, d+19", "variable d is used but never assigned"),
        ("c=17, c+d", "variable d is used but never assigned"),
        ("b+b", "variable b is used but never assigned"),
        ("c=60, c+19", "60 is not below N = 59"),
        ("c=17, c+59", "59 is not below N = 59"),
        ("059+1", "059 is not below N = 59"),
        ("a=1, b=2, c=3, d=4, e=5, f=6, g=7, a+b", "7 assignments do not fit a context of 16"),
        ("b=3, b+b", "b+b is not part of the task: two variables must be different"),
        ("b=3, b +\n b", "b+b is not part of the task: two variables must be different"),
        ("a=1, a=2, a+1", "variable a is assigned twice"),
        ("17=c, c+1", "'17=c' assigns to a number: a variable must stand on the left of ="),
        ("a=b, a+1", "'a=b' assigns a variable: a number from 0 to 58 must stand on the right of ="),
        ("a=1, c+2, a+3", f"'c+2' {NO_ASSIGNMENT}"),
        ("a=1,, a+3", f"'' {NO_ASSIGNMENT}"),
        ("a=, a+3", f"'a=' {NO_ASSIGNMENT}"),
        ("a==1, a+3", f"'a==1' {NO_ASSIGNMENT}"),
        ("a=1 b=2, a+b", f"'a=1 b=2' {NO_ASSIGNMENT}"),
        ("", f"'' {NO_SUM}"),
        ("  ", f"'' {NO_SUM}"),
        ("=", f"'' {NO_SUM}"),
        ("+", f"'+' {NO_SUM}"),
        ("a=1,", f"'' {NO_SUM}"),
        ("a=1", f"'a=1' {NO_SUM}"),
        ("a=1 b+2", f"'a=1 b+2' {NO_SUM}"),
        ("1+2=3", f"'1+2=3' {NO_SUM}"),
        ("1+2+3", f"'1+2+3' {NO_SUM}"),
        ("1+", f"'1+' {NO_SUM}"),
        ("q=1, 2+3", f"'q' in 'q=1' {NEITHER}"),
        ("A=1, 2+3", f"'A' in 'A=1' {NEITHER}"),
        ("ab=1, 2+3", f"'ab' in 'ab=1' {NEITHER}"),
        ("A+1", f"'A' in 'A+1' {NEITHER}"),
        ("-1+2", f"'-1' in '-1+2' {NEITHER}"),
        ("1.5+2", f"'1.5' in '1.5+2' {NEITHER}"),
        ("1 2+3", f"'1 2' in '1 2+3' {NEITHER}"),
        ("١+2", f"'١' in '١+2' {NEITHER}"),
        ("²+2", f"'²' in '²+2' {NEITHER}"),
        ("a=٣, a+2", f"'٣' in 'a=٣' {NEITHER}"),
        ("é=1, 2+2", f"'é' in 'é=1' {NEITHER}"),
        ("\x00+1", f"'\\x00' in '\\x00+1' {NEITHER}"),
    ],
)
def test_the_error_points_at_the_part_that_is_wrong(task, text, message):
    assert error_of(task, text) == message


def test_a_number_of_thousands_of_digits_is_simply_too_large(task):
    assert error_of(task, "9" * 5000 + "+1") == "9" * 5000 + " is not below N = 59"
    assert error_of(task, "a=" + "9" * 5000 + ", a+1") == "9" * 5000 + " is not below N = 59"


def test_errors_speak_of_the_task_at_hand():
    small = Task(N=7, variables=2, context=9, left_only=0, right_only=0)
    assert error_of(small, "7+1") == "7 is not below N = 7"
    assert error_of(small, "c=1, 1+1") == "'c' in 'c=1' is neither a number from 0 to 6 nor a variable from a to b"
    large = Task(N=1000, variables=26, context=8, left_only=0, right_only=0)
    assert to_text(large, to_tokens(large, "z=999, z+0")) == "z=999, z+0"
    assert error_of(large, "c=17, q+19") == "variable q is used but never assigned"
    assert error_of(large, "a=1, b=2, c=3, a+b") == "3 assignments do not fit a context of 8"


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet="abz019+=, \n٣", max_size=30) | st.text(max_size=10))
def test_any_text_gives_a_sequence_or_one_line(text):
    task = Task(N=7, variables=3, context=10, left_only=0, right_only=0)
    try:
        tokens = to_tokens(task, text)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
    else:
        problem_of(task, tokens)  # asserts that the sequence is well-formed
        assert to_tokens(task, to_text(task, tokens)).tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("position", "token"),
    [(12, 61), (15, 59), (8, 5), (9, 64), (9, 61), (0, 62), (13, 61), (14, 60), (8, 74), (13, 74), (9, -1)],
)
def test_tokens_that_are_no_sequence_have_no_text(task, position, token):
    tokens = to_tokens(task, "c=17, b=42, b+19")
    tokens[position] = token
    with pytest.raises(InputError, match="are no sequence of this task"):
        to_text(task, tokens)


@pytest.mark.parametrize("length", [0, 3, 15, 17])
def test_tokens_of_another_length_have_no_text(task, length):
    with pytest.raises(InputError, match=rf"a sequence of this task is 16 tokens, not an array of shape \({length},\)"):
        to_text(task, np.full(length, task.padding))
