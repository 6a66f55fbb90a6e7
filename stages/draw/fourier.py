"""The model's waves: neurons beside their fits, spectra, circles of numbers, phases, restricted and excluded loss."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Circle
from matplotlib.ticker import MaxNLocator

from stages.core.task import read_table
from stages.draw import style

TABLES = ("neurons", "frequencies", "maps", "planes", "spectra")
MOST_PANELS = 12  # key frequencies drawn, those with the largest share of the logits' variance
LABELS = 12  # numbers written around a circle, about
LOSSES = {
    "restricted_loss": ("restricted, held-out pairs", style.BLUE, "-"),
    "non_key_loss": ("only waves of n + m that are not key, held-out pairs", "0.6", (0, (1, 1))),
    "held_out_loss": ("all of the logits, held-out pairs", style.SKY, (0, (4, 1.2))),
    "excluded_loss": ("excluded, trained pairs", style.VERMILLION, "-"),
    "trained_loss": ("all of the logits, trained pairs", style.ORANGE, (0, (4, 1.2))),
}


def best_neuron(maps: pd.DataFrame, row: pd.Series) -> Figure:
    """One neuron's pre-activation for every pair of numbers beside its fit.

    Args:
        maps: k, n1, n2, value, fit.
        row: k, best_neuron, explained_variance.
    """
    fig, axes = style.figure(style.COLUMN, 1.85, 1, 2, sharey=True)
    largest = maps.value[maps.k == row.k].abs().max()
    mesh = _value_and_fit(axes, maps[maps.k == row.k], largest)
    axes[0].set_title(f"neuron {row.best_neuron:.0f}")
    axes[1].set_title(f"fit at k = {row.k:.0f} ({row.explained_variance:.3f})")
    axes[0].set_ylabel("left number n")
    fig.supxlabel("right number m", fontsize=8)
    fig.colorbar(mesh, ax=list(axes), label="pre-activation", shrink=0.9)
    return fig


def neurons(maps: pd.DataFrame, frequencies: pd.DataFrame) -> Figure:
    """For each row of `frequencies` its best neuron's pre-activation for every pair of numbers, above its fit.

    Args:
        maps: k, n1, n2, value, fit.
        frequencies: k, best_neuron, explained_variance.
    """
    columns = min(5, len(frequencies))
    blocks = -(-len(frequencies) // columns)
    fig, axes = style.figure(
        style.PAGE, 0.4 + 2.65 * blocks, 2 * blocks, columns, sharex=True, sharey=True, squeeze=False
    )
    by_frequency = axes.reshape(blocks, 2, columns).swapaxes(1, 2).reshape(-1, 2)
    for pair, row in zip(by_frequency, frequencies.itertuples(), strict=False):
        of_k = maps[maps.k == row.k]
        mesh = _value_and_fit(pair, of_k, of_k.value.abs().max())
        pair[0].set_title(f"k = {row.k}: neuron {row.best_neuron:.0f}")
        pair[1].set_title(f"fit ({row.explained_variance:.3f})")
    for rows in (axes[::2], axes[1::2]):
        _hide_unused(rows, len(frequencies))
    fig.supxlabel("right number m", fontsize=8)
    fig.supylabel("left number n", fontsize=8)
    bar = fig.colorbar(mesh, ax=axes.ravel().tolist(), shrink=0.3, aspect=30)
    bar.set_ticks([mesh.norm.vmin, 0, mesh.norm.vmax], labels=["-1", "0", "1"])
    bar.set_label("pre-activation / largest")
    return fig


def _hide_unused(axes: np.ndarray, used: int) -> None:
    """Hide those of a grid of axes [rows, columns] after the first `used`, and label the ticks above them."""
    for i in range(used, axes.size):
        axes.flat[i].set_visible(False)
        axes.flat[i - axes.shape[1]].tick_params(labelbottom=True)


def _value_and_fit(axes: Sequence[Axes], rows: pd.DataFrame, largest: float) -> AxesImage:
    """Both as heat maps that are white where the neuron begins to fire."""
    for axis, name in zip(axes, ("value", "fit"), strict=True):
        image = rows.pivot(index="n1", columns="n2", values=name)
        mesh = axis.imshow(image, cmap=style.DIVERGING, vmin=-largest, vmax=largest, origin="lower")
        axis.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    return mesh


def explained_variance(neurons: pd.DataFrame, keys: list[int]) -> Figure:
    """Histogram over live neurons of the best fit's explained variance, the colour saying at which k.

    Args:
        neurons: live, k, explained_variance.
        keys: the frequencies that have a colour of their own.
    """
    fig, axis = style.figure(style.COLUMN, 2.6)
    live = neurons[neurons.live]
    groups = {f"k = {k}": live[live.k == k] for k in keys} | {"other k": live[~live.k.isin(keys)]}
    colours = [*matplotlib.colormaps[style.SEQUENTIAL](np.linspace(0, 0.95, len(keys))), "0.7"]
    if groups["other k"].empty:
        del groups["other k"], colours[-1]
    axis.hist(
        [group.explained_variance for group in groups.values()],
        bins=np.linspace(0, 1, 21),
        stacked=True,
        color=colours,
        label=list(groups),
    )
    axis.set_xlim(0, 1)
    axis.set_xlabel("explained variance at the best k")
    axis.set_ylabel("live neurons")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1, reverse=True)
    return fig


def spectra(table: pd.DataFrame, frequencies: pd.DataFrame) -> Figure:
    """Norms of the number embeddings and of the neurons' output directions along each wave.

    Args:
        table: k, wave, W_E, W_out_W_U.
        frequencies: k, key.
    """
    fig, axes = style.figure(style.COLUMN, 3.4, 2, sharex=True)
    titles = {"W_E": "number embeddings W_E", "W_out_W_U": "neurons' outputs W_out W_U, over answers"}
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for wave, shift, colour in (("constant", 0, "0.6"), ("cos", -0.2, style.BLUE), ("sin", 0.2, style.ORANGE)):
            rows = table[table.wave == wave]
            axis.bar(rows.k + shift, rows[name], width=0.4, color=colour, label=wave)
        axis.set_title(title, loc="left")
        axis.set_ylabel("norm")
        for k in frequencies.k[frequencies.key]:
            axis.plot(k, 1, "kv", markersize=3, transform=axis.get_xaxis_transform(), clip_on=False)
    axes[0].legend(ncols=3, loc="lower right", bbox_to_anchor=(1, 1.12), handlelength=1)
    axes[1].set_xlabel("frequency k (triangles: key frequencies)")
    axes[1].margins(x=0.01)
    return fig


def planes(table: pd.DataFrame, frequencies: pd.DataFrame) -> Figure:
    """The numbers' embeddings in the plane of each of some frequencies, each point tied to its place on the circle.

    Args:
        table: k, n, x, y.
        frequencies: k, circle_r2, of the frequencies to draw.
    """
    columns = min(3, len(frequencies))
    rows = -(-len(frequencies) // columns)
    fig, axes = style.figure(
        style.PAGE * columns / 3, 2.3 * rows + 0.3, rows, columns, sharex=True, sharey=True, squeeze=False
    )
    for axis, row in zip(axes.flat, frequencies.itertuples(), strict=False):
        points = _with_places(table[table.k == row.k], row.k)
        radius = (points.x * points.cos + points.y * points.sin).mean()  # of the circle that fits best
        axis.add_patch(Circle((0, 0), radius, fill=False, color="0.8", linewidth=0.6, zorder=0))
        ties = np.stack([points[["x", "y"]], radius * points[["cos", "sin"]]], 1)  # [N, both ends, 2]
        axis.add_collection(LineCollection(ties, colors="0.5", linewidths=0.6, zorder=1))
        dots = axis.scatter(points.x, points.y, c=points.n, cmap=style.SEQUENTIAL, vmin=0, vmax=len(points) - 1, s=7)
        apart = points.drop_duplicates("place")  # where N and k have a common factor, numbers share a place
        for point in apart[:: max(1, len(apart) // LABELS)].itertuples():
            place = 1.4 * radius * point.cos, 1.4 * radius * point.sin
            axis.text(*place, str(point.n), fontsize=6, ha="center", va="center")
        axis.set_title(f"k = {row.k} (R² {row.circle_r2:.3f})")
        axis.set_aspect("equal")
        axis.update_datalim(1.5 * radius * np.array([[-1, -1], [1, 1]]))  # room for the numbers
        axis.autoscale_view()
        axis.xaxis.set_major_locator(MaxNLocator(3))
        axis.yaxis.set_major_locator(MaxNLocator(3))
    _hide_unused(axes, len(frequencies))
    fig.supxlabel("along the cosine's direction", fontsize=8)
    fig.supylabel("along the sine's direction", fontsize=8)
    fig.colorbar(dots, ax=axes.ravel().tolist(), label="number n", shrink=0.4, aspect=30)
    return fig


def _with_places(points: pd.DataFrame, k: int) -> pd.DataFrame:
    """Points with their place k·n modulo N on a circle, with its cos and sin, in the order of the places."""
    place = k * points.n % len(points)
    angle = 2 * np.pi * place / len(points)
    return points.assign(place=place, cos=np.cos(angle), sin=np.sin(angle)).sort_values(["place", "n"])


def phases(table: pd.DataFrame) -> Figure:
    """Each live neuron's output phase against the sum of its operands' phases, both within a turn.

    Phases are the same a whole turn on, so that the corners at the top left and bottom right lie next to the diagonal.
    `table`: the neurons.
    """
    fig, axis = style.figure(style.COLUMN, 2.9)
    live = table[table.live].sort_values("explained_variance")
    operands = np.angle(np.exp(1j * (live.output_phase - live.phase_error)))
    points = axis.scatter(
        operands, live.output_phase, c=live.explained_variance, cmap=style.SEQUENTIAL, s=5, vmin=0, vmax=1
    )
    axis.plot([-np.pi, np.pi], [-np.pi, np.pi], color=style.VERMILLION, linewidth=0.8, label="γ = α + β")
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1))
    fig.colorbar(points, label="explained variance")
    for ticks in (axis.set_xticks, axis.set_yticks):
        ticks([-np.pi, 0, np.pi], ["-π", "0", "π"])
    axis.set_aspect("equal")
    axis.set_xlabel("α + β, of the operands")
    axis.set_ylabel("γ, of the output")
    return fig


def losses(table: pd.DataFrame) -> Figure:
    """Every one of `LOSSES` against step. `table`: step and these."""
    fig, axis = style.figure(style.COLUMN, 3.1)
    for name, (words, colour, line) in LOSSES.items():
        axis.plot(table.step, table[name], label=words, color=colour, linestyle=line)
    axis.set_yscale("log")
    if len(table) > 1:
        axis.set_xscale("symlog", linthresh=table.step[1])  # most of it happens within the first checkpoints
    axis.margins(x=0)
    axis.set_xlabel("training step")
    axis.set_ylabel("loss (nats)")
    fig.legend(loc="outside lower center", ncols=1, handlelength=3)
    return fig


def figures(root: Path) -> Iterator[tuple[str, Figure]]:
    """The figures of stage ``fourier`` below `root`: (file stem, figure). Without key frequencies some are absent."""
    tables = {name: read_table(root / f"data/fourier/{name}.parquet")[0].to_pandas() for name in TABLES}
    frequencies = tables["frequencies"]
    fitted = frequencies.dropna(subset="best_neuron")
    drawn = frequencies[frequencies.key].nlargest(MOST_PANELS, "logit_share").sort_values("k")
    if len(fitted):
        best = fitted.loc[fitted.explained_variance.idxmax()]
        yield "fourier_best_neuron", best_neuron(tables["maps"], best)
        yield "fourier_explained_variance", explained_variance(tables["neurons"], drawn.k.tolist())
        yield "fourier_phases", phases(tables["neurons"])
        if len(drawn):
            yield "fourier_neurons", neurons(tables["maps"], drawn)
    if len(drawn):
        yield "fourier_planes", planes(tables["planes"], drawn)
    yield "fourier_spectra", spectra(tables["spectra"], frequencies)
    yield "fourier_loss", losses(pd.read_csv(root / "plots/fourier.csv"))
