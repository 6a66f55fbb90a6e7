"""What is drawn is what the tables hold: curves, cells, outlines and histograms, under names that belong to them."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stages.draw import circuits, evaluate, progress

STEPS = [0, 100, 200, 300]
SPLITS = {
    "0var_train": "trained pair and positions",
    "0var_add_restricted": "held-out pair",
    "1var_train": "trained pair and positions",
    "1var_add_restricted": "held-out pair",
    "1var_var_restricted": "one held-out position",
    "1var_both_restricted": "held-out pair, one held-out position",
    "2var_train": "trained pair and positions",
    "2var_add_restricted": "held-out pair",
    "2var_var_restricted_1": "one held-out position",
    "2var_both_restricted_1": "held-out pair, one held-out position",
    "2var_var_restricted_2": "two held-out positions",
    "2var_both_restricted_2": "held-out pair, two held-out positions",
}
PANELS = {"0var": "constants", "1var": "one variable", "2var": "two variables"}
MOMENTS = {"addition": 50, "spike_before": 100, "spike": 200, "assignment": 250, "refinement": 300}
WORDS_OF_MEASURES = (
    {
        "OV2 and MLP2 alone add": "ov2_mlp2_accuracy",
        "QK1: one position back": "qk1_num_to_prev_var",
        "QK2: same variable": "qk2_ov1_var_identity",
    },
    {
        "layer 1: = to operands": "attn1_equals_to_operands",
        "layer 1: number to variable": "attn1_num_to_prev",
        "layer 2: = to values": "attn2_equals_to_values",
        "probe: variable at number": "probe1_var_from_num",
    },
)
TWO_VARIABLES = ("attn1_equals_to_operands", "attn1_num_to_prev", "attn2_equals_to_values")
MARGIN = "qk2_ov1_diagonal_margin"
MEASURES = [*WORDS_OF_MEASURES[0].values(), *WORDS_OF_MEASURES[1].values(), MARGIN]
PARTS = ("embedding", "position", "layer 1")


def curves(names: list[str]) -> pd.DataFrame:
    """A table by step in which no two numbers are equal, all between 0 and 1."""
    values = np.linspace(0.01, 0.99, len(STEPS) * len(names)).reshape(len(STEPS), -1)
    return pd.DataFrame(values, columns=names).assign(step=STEPS)


def split_curves() -> pd.DataFrame:
    return curves([*SPLITS, "0var_exact"])


def column_of(line: Line2D, table: pd.DataFrame) -> str:
    """Which column of the table a curve is."""
    assert line.get_xdata().tolist() == table.step.tolist()
    (name,) = [name for name in table if name != "step" and table[name].tolist() == line.get_ydata().tolist()]
    return name


def looks(line: Line2D) -> tuple:
    """A line's style; `get_linestyle` calls every pattern of dashes by the same name."""
    return line._unscaled_dash_pattern


def check_splits(fig: Figure, table: pd.DataFrame) -> None:
    """Every split is a curve in its form's panel, in the line style that the legend gives its words."""
    (legend,) = fig.legends
    words = {looks(line): text.get_text() for line, text in zip(legend.get_lines(), legend.get_texts(), strict=True)}
    assert len(words) == 6
    drawn = {}
    for axis, (form, title) in zip(fig.axes, PANELS.items(), strict=True):
        assert axis.get_title(loc="left") == title
        lines = [line for line in axis.lines if len(line.get_xdata()) == len(STEPS)]
        names = {column_of(line, table): words[looks(line)] for line in lines}
        assert all(name.startswith(form) for name in names)
        strong, weak = (
            {line.get_color() for line in lines if column_of(line, table).endswith("_2") == two}
            for two in (False, True)
        )
        assert len(strong) == 1 and len(weak) == (form == "2var") and not strong & weak
        drawn |= names
    assert drawn == SPLITS


def test_each_split_is_drawn_in_its_forms_panel_under_its_name() -> None:
    check_splits(evaluate.accuracy(split_curves()), split_curves())
    check_splits(evaluate.loss(split_curves()), split_curves())
    check_splits(progress.accuracy(split_curves(), MOMENTS), split_curves())


def test_the_panels_of_the_loss_have_one_scale_and_the_same_ticks() -> None:
    table = split_curves()
    table["0var_train"] /= 10**6  # which needs many more decades than the others
    fig = evaluate.loss(table)
    FigureCanvasAgg(fig).draw()
    assert {axis.get_yscale() for axis in fig.axes} == {"log"}
    for minor in (False, True):
        assert len({tuple(axis.get_yticks(minor=minor)) for axis in fig.axes}) == 1
    assert len({axis.get_ylim() for axis in fig.axes}) == 1


def test_figures_of_training_are_drawn_from_the_files_of_their_names(tmp_path: Path) -> None:
    tables = {"accuracy": split_curves(), "loss": split_curves(), "progress": curves(MEASURES)}
    tables["loss"][[*SPLITS]] *= 4
    for folder in ("plots", "metrics"):
        (tmp_path / folder).mkdir()
    for name, table in tables.items():
        table.to_csv(tmp_path / f"plots/{name}.csv", index=False)
    (tmp_path / "metrics/progress.json").write_text(json.dumps(MOMENTS))
    figures = dict(evaluate.figures(tmp_path)) | dict(progress.figures(tmp_path))
    assert figures.keys() == {"accuracy", "loss", "accuracy_phases", "progress"}
    for stem, table in (("accuracy", "accuracy"), ("loss", "loss"), ("accuracy_phases", "accuracy")):
        check_splits(figures[stem], tables[table])
    assert column_of(figures["progress"].axes[2].lines[0], tables["progress"]) == MARGIN
    assert len(figures["progress"].axes[0].texts) == 4  # moments


def test_each_measure_is_drawn_under_its_name_and_dashed_with_two_variables() -> None:
    table = curves([*MEASURES, *(f"{name}_2var" for name in TWO_VARIABLES)])
    fig = progress.progress(table, dict.fromkeys(MOMENTS))
    for axis, words in zip(fig.axes, WORDS_OF_MEASURES, strict=False):
        lines = [line for line in axis.lines if len(line.get_xdata())]
        solid = {line.get_label(): line for line in lines if not line.is_dashed()}
        assert {label: column_of(line, table) for label, line in solid.items()} == words
        colours = {column_of(line, table): line.get_color() for line in solid.values()}
        assert len(set(colours.values())) == len(words)
        dashed = {column_of(line, table): line.get_color() for line in lines if line.is_dashed()}
        assert dashed == {f"{name}_2var": colours[name] for name in words.values() if name in TWO_VARIABLES}
        assert [text.get_text() for text in axis.get_legend().get_texts()][: len(words)] == [*words]
    margin, zero = fig.axes[2].lines
    assert column_of(margin, table) == MARGIN
    assert set(zero.get_ydata()) == {0}


@pytest.mark.parametrize("drawing", [progress.accuracy, progress.progress])
def test_phases_are_lines_and_the_spike_a_band_in_every_panel(drawing) -> None:
    fig = drawing(curves([*SPLITS, *MEASURES]), MOMENTS)
    assert len(fig.axes) == 3
    for axis in fig.axes:
        lines = [
            line.get_xdata() for line in axis.lines if len(line.get_xdata()) == 2 and len({*line.get_xdata()}) == 1
        ]
        assert sorted(x[0] for x in lines) == [50, 250, 300]
        (band,) = axis.patches
        assert (band.get_x(), band.get_width()) == (100, 100)
    assert {text.get_text(): text.xy[0] for text in fig.axes[0].texts} == {
        "addition 50": 50,
        "spike 200": 200,
        "assignment 250": 250,
        "refinement 300": 300,
    }


# Circuits


def cells(axis: Axes) -> np.ndarray:
    """What a heat map shows, NaN where it shows nothing."""
    (image,) = axis.images
    return np.ma.filled(image.get_array().astype(float), np.nan)


def words_of(labels: list) -> list[str]:
    return [label.get_text() for label in labels]


def attention_of(sequences: list[str]) -> pd.DataFrame:
    """Both layers' attention on sequences of tokens: no two weights equal, two of each layer marked."""
    rows = []
    for sequence, text in enumerate(sequences):
        tokens = text.split()
        last = len(tokens) - 1
        marked = {(1, 1, 0), (1, last, 2), (2, last, sequence), (2, last, 3)}
        for layer, queries in ((1, range(len(tokens))), (2, [last])):
            rows += [
                (sequence, layer, q, k, tokens[q], tokens[k], (layer, q, k) in marked)
                for q in queries
                for k in range(q + 1)
            ]
    columns = ["sequence", "layer", "query", "key", "query_token", "key_token", "matters"]
    return pd.DataFrame(rows, columns=columns).assign(weight=np.linspace(0.01, 0.99, len(rows)))


def test_attention_is_drawn_as_it_is_with_outlines_where_it_matters_and_what_they_mean() -> None:
    sequences = ["a 5 + 5 3 =", "a 6 + a 4 =", "b 5 + 5 b ="]
    table = attention_of(sequences)
    fig = circuits.attention(table, "after the spike, step 200")
    assert fig.get_suptitle() == "attention after the spike, step 200"
    (legend,) = fig.legends
    (words,) = words_of(legend.get_texts())
    assert "from a number to its variable" in words and "from = to both operands" in words
    panels = np.array(fig.axes[:8]).reshape(4, 2)  # layer 1 over layer 2 for two examples, then for the next
    for sequence, text in enumerate(sequences):
        row, column = divmod(sequence, 2)
        for layer, first in ((1, 0), (2, 5)):
            axis = panels[2 * row + layer - 1, column]
            part = table[(table.sequence == sequence) & (table.layer == layer)]
            shown = cells(axis)
            assert shown.shape == (6 - first, 6)
            assert np.isfinite(shown).sum() == len(part)
            assert [shown[q - first, k] for q, k in zip(part["query"], part.key, strict=True)] == part.weight.tolist()
            outlines = {(patch.get_y() + 0.5 + first, patch.get_x() + 0.5) for patch in axis.patches}
            assert outlines == set(part.loc[part.matters, ["query", "key"]].itertuples(index=False, name=None))
            assert {patch.get_edgecolor() for patch in axis.patches} == {legend.get_patches()[0].get_edgecolor()}
            assert words_of(axis.get_yticklabels()) == text.split()[first:]
            assert axis.get_ylabel().startswith(f"layer {layer}")
        assert words_of(axis.get_xticklabels()) == text.split()
    assert [axis.get_title() for axis in panels[[0, 0, 2], [0, 1, 0]]] == [
        "the sum 5 + 3",
        "the sum a + 4",
        "the sum 5 + b",
    ]


def test_position_and_identity_are_drawn_less_their_rows_means_at_their_moments() -> None:
    rng = np.random.default_rng(0)
    scores = {moment: (rng.normal(size=(4, 4)), rng.normal(size=(3, 3))) for moment in ("spike", "other", "final")}
    position, identity = (
        pd.concat(
            pd.DataFrame(
                [(names[q], names[k], grids[i][q, k]) for q, k in np.ndindex(grids[i].shape) if i or k <= q],
                columns=["query", "key", "score"],
            ).assign(moment=moment)
            for moment, grids in scores.items()
        )
        for i, names in enumerate(([0, 1, 2, 3], ["a", "b", "c"]))
    )
    when = {"final": "at the end, step 300", "spike": "after the spike, step 200"}
    axes = np.array(circuits.circuits(position, identity, when).axes[:4]).reshape(2, 2)
    for row, (moment, words) in zip(axes, when.items(), strict=True):
        P, V = scores[moment]
        P = np.where(np.tri(4, dtype=bool), P, np.nan)
        np.testing.assert_allclose(cells(row[0]), P - np.nanmean(P, axis=1, keepdims=True))
        np.testing.assert_allclose(cells(row[1]), V - V.mean(axis=1, keepdims=True))
        assert [axis.get_title() for axis in row] == [f"position circuit\n{words}", f"variable identity\n{words}"]
        assert words_of(row[0].get_xticklabels()) == words_of(row[0].get_yticklabels()) == ["0", "1", "2", "3"]
        assert words_of(row[1].get_xticklabels()) == words_of(row[1].get_yticklabels()) == ["a", "b", "c"]
        for axis in row:
            assert axis.images[0].get_clim()[0] == -axis.images[0].get_clim()[1]
    for column in axes.T:
        assert column[0].images[0].get_clim() == column[1].images[0].get_clim()


def test_each_cosine_is_a_histogram_under_its_name() -> None:
    """Every cosine of a column is the same, and so falls into one bin."""
    adder = pd.DataFrame(
        [{"cosine_1var": 0.91, "mismatched_1var": -0.31, "cosine_2var": 0.51, "mismatched_2var": -0.71}] * 4
    )
    sums = pd.DataFrame([{"cosine": 0.81, "shuffled": 0.21}] * 4)
    above, below = circuits.cosines(adder, sums).axes
    shown = {}
    for axis in (above, below):
        handles, labels = axis.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            corners = handle.get_xy()
            filled = corners[corners[:, 1] > 0]
            assert filled[:, 1].max() == pytest.approx(1)
            shown[label] = (filled[:, 0].min(), filled[:, 0].max(), handle.get_fill())
    expected = {
        "1var, same pair (mean 0.91)": (0.91, True),
        "1var, another pair (mean -0.31)": (-0.31, False),
        "2var, same pair (mean 0.51)": (0.51, True),
        "2var, another pair (mean -0.71)": (-0.71, False),
        "same pair (mean 0.81)": (0.81, True),
        "$n_2$ of another pair (mean 0.21)": (0.21, False),
    }
    assert shown.keys() == expected.keys()
    for label, (value, filled) in expected.items():
        start, stop, is_filled = shown[label]
        assert start <= value <= stop and stop - start < 0.03 and is_filled == filled


def sides() -> pd.DataFrame:
    """Accuracies, no two equal, of a, b and c at three steps; a is never right and c never left in training."""
    rows = [
        (step, side, variable, (side, variable) in {("right", "a"), ("left", "c")})
        for step in (100, 200, 300)
        for side in ("left", "right")
        for variable in "abc"
    ]
    table = pd.DataFrame(rows, columns=["step", "side", "variable", "held_out"])
    return table.assign(accuracy=np.linspace(0, 1, len(rows)))


def test_accuracy_by_side_is_drawn_by_variable_and_step_with_held_out_positions_coloured() -> None:
    table = sides()
    axes = circuits.accuracy_by_side(table).axes[:2]
    for axis, side, held_out in zip(axes, ("left", "right"), ("c", "a"), strict=True):
        expected = table[table.side == side].accuracy.to_numpy().reshape(3, 3).T  # [variables, steps]
        np.testing.assert_array_equal(cells(axis), expected)
        assert axis.get_ylabel() == f"variable on the {side}"
        assert words_of(axis.get_yticklabels()) == ["a", "b", "c"]
        coloured = [label.get_text() for label in axis.get_yticklabels() if label.get_color() == circuits.HELD_OUT]
        assert coloured == [held_out]
    assert dict(zip(axes[1].get_xticks(), words_of(axes[1].get_xticklabels()), strict=True)) == {
        0: "100",
        1: "200",
        2: "300",
    }


def test_scores_from_equals_are_drawn_under_the_variables_and_positions_that_they_go_to() -> None:
    keys = ["a", "b", "c", "left", "right"]
    table = pd.DataFrame([(step, key) for step in (100, 200, 300) for key in keys], columns=["step", "key"])
    table["score"] = np.arange(len(table)) ** 1.5
    fig = circuits.scores_from_equals(table, sides())
    (axis,) = fig.axes
    wide = table.pivot(index="step", columns="key", values="score").reset_index()
    expected = {
        "a (never right in training)": "a",
        "other variables": "b",
        "c (never left in training)": "c",
        "left position": "left",
        "right position": "right",
    }
    assert {line.get_label(): column_of(line, wide) for line in axis.lines} == expected
    looks_of = {line.get_label(): (to_hex(line.get_color()), looks(line)) for line in axis.lines}
    assert len(set(looks_of.values())) == len(expected)
    (legend,) = fig.legends
    handles = zip(legend.get_texts(), legend.get_lines(), strict=True)
    assert {text.get_text(): (to_hex(line.get_color()), looks(line)) for text, line in handles} == looks_of


def test_each_term_of_a_score_is_in_its_cell_of_the_panel_of_its_case() -> None:
    cases = [
        (0, "trained", "variable's value"),
        (0, "constant", "constant"),
        (0, "best wrong", "best wrong"),
        (1, "held out", "variable's value"),
        (1, "constant", "constant"),
        (1, "best wrong", "best wrong"),
    ]
    rows = [
        (form, moment, held_out, position, q, k)
        for form in ("1var", "2var")
        for moment in ("spike", "assignment", "final")
        for held_out, position, _ in cases
        for q in PARTS
        for k in PARTS
    ]
    columns = ["form", "moment", "held_out", "position", "query_part", "key_part"]
    table = pd.DataFrame(rows, columns=columns)
    table["score"] = (np.arange(len(table)) - 150) / 10
    when = {"final": "at the end", "assignment": "at assignment"}
    fig = circuits.score_decomposition(table.sample(frac=1, random_state=0), when)
    axes = np.array(fig.axes[:12]).reshape(2, 6)
    for row, (moment, words) in zip(axes, when.items(), strict=True):
        assert row[0].get_ylabel() == f"{words}\nquery's part"
        assert words_of(row[0].get_yticklabels()) == [*PARTS]
        for axis, (held_out, position, title) in zip(row, cases, strict=True):
            part = table[
                (table.form == "1var")
                & (table.moment == moment)
                & (table.held_out == held_out)
                & (table.position == position)
            ]
            np.testing.assert_array_equal(cells(axis), part.score.to_numpy().reshape(3, 3))  # [query, key]
            assert axis.get_title() == f"{title}\nsum {part.score.sum():.1f}"
            for text, score in zip(axis.texts, part.score, strict=True):
                column, line = text.get_position()
                assert text.get_text() == f"{score:.1f}" == f"{cells(axis)[line, column]:.1f}"
    assert [axis.get_xlabel() for axis in axes[1] if axis.get_xlabel()] == [
        "key's part\nvariable in a trained position",
        "key's part\nvariable in a held-out position",
    ]
    assert words_of(axes[1, 0].get_xticklabels()) == [*PARTS]
