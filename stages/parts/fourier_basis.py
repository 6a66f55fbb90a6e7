"""Functions of a number, and of a pair of numbers, modulo N in the Fourier basis.

A frequency k runs from 1 to K = floor(N/2) and has two waves, cos(2πkn/N) and sin(2πkn/N). For even N, k = N/2 has the
cosine alone, which alternates between 1 and -1; a phase there can only be 0 or π, which is a sign.

Shapes: N numbers, K frequencies, M functions at once.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

BY_N1, BY_N2, BY_SUM, BY_DIFFERENCE = range(4)  # what a wave of a pair is a function of


def frequencies(N: int) -> np.ndarray:
    """The frequency of each function of `basis`: [N], 0, 1, 1, 2, 2 and so on."""
    return (np.arange(N) + 1) // 2


def basis(N: int) -> np.ndarray:
    """The orthonormal real Fourier basis, one function a column: [N, N], constant, cos 1, sin 1, cos 2, sin 2, …"""
    k = frequencies(N)
    is_sine = (np.arange(N) % 2 == 0) & (k > 0)
    # Reducing k·n modulo N keeps the angles small, and the basis exact to rounding for every N.
    angle = 2 * np.pi * (np.outer(np.arange(N), k) % N) / N  # [N, N]
    return np.where(is_sine, np.sin(angle), np.cos(angle)) / np.sqrt(np.where((k == 0) | (2 * k == N), N, N / 2))


def waves(values: np.ndarray) -> np.ndarray:
    """The wave at every frequency, as a complex number: amplitude times exp(i·phase).

    Args:
        values: [..., N, M] functions of a number.

    Returns:
        [..., K, M] such that values is its mean plus the sum over k of amplitude · cos(2πkn/N + phase).
    """
    N = values.shape[-2]
    return np.fft.rfft(values, axis=-2)[..., 1:, :] / _mean_squares(N)[:, None] / N  # at N/2 real, by rfft's definition


def energy(waves: np.ndarray, N: int) -> np.ndarray:
    """Sum of squares over the N numbers of every wave [..., K, M]."""
    return N * _mean_squares(N)[:, None] * np.abs(waves) ** 2


def _mean_squares(N: int) -> np.ndarray:
    """Mean square of cos(2πkn/N) over n, by frequency: [K], 1/2, and 1 at N/2."""
    return np.where(2 * np.arange(1, N // 2 + 1) == N, 1.0, 0.5)


def strongest(energy: np.ndarray) -> np.ndarray:
    """The frequency at which each of M functions has most: [K, M] → [M]; 0 for a function that has nothing anywhere."""
    energy = np.nan_to_num(energy)
    return np.where(energy.any(0), energy.argmax(0) + 1, 0)


def keep(values: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The part of functions of a number [N, M] that lies at the frequencies `k`."""
    N = len(values)
    functions = basis(N)[:, np.isin(frequencies(N), k)]
    return functions @ (functions.T @ values)  # [N, F] @ [F, N] @ [N, M]


def mean_by_sum(values: np.ndarray, sign: int = 1) -> np.ndarray:
    """Mean over the N pairs with n + m ≡ s, for every s; or with n - m ≡ s, for sign -1: [N, N, M] → [N, M].

    This projects functions of a pair on functions of its sum.
    """
    n = np.arange(len(values))
    return values[n, sign * (n[:, None] - n) % len(n)].mean(1)  # [s, n, M] → [s, M]


@dataclass(frozen=True)
class PairWaves:
    """The waves at every frequency k in M functions of a pair (n, m): those of n, of m, of n + m and of n - m.

    They are orthogonal. At each k the four span the products of {1, cos kn, sin kn} with {1, cos km, sin km}, without
    the constant; the first two are the least-squares fit of mean + A cos(2πkn/N + α) + B cos(2πkm/N + β).

    Attributes:
        waves: [4, K, M] complex, see `waves`; the first axis is BY_N1, BY_N2, BY_SUM, BY_DIFFERENCE. At N/2 sum and
            difference are the same wave, which stands at BY_SUM.
        share: [4, K, M] of the variance over the N² pairs; NaN for a function that does not vary.
    """

    waves: np.ndarray
    share: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> "PairWaves":
        """Of functions [N, N, M]."""
        N = len(values)
        centred = values - values.mean((0, 1))
        found = waves(np.stack([centred.mean(1), centred.mean(0), mean_by_sum(centred), mean_by_sum(centred, -1)]))
        if N % 2 == 0:
            found[BY_DIFFERENCE, -1] = 0
        total = np.einsum("nmj,nmj->j", centred, centred)
        # Each of the waves takes every value for N pairs.
        return cls(found, N * energy(found, N) / np.where(total > 0, total, np.nan))

    @property
    def explained_variance(self) -> np.ndarray:
        """The share [K, M] that a wave of either operand explains."""
        return self.share[BY_N1] + self.share[BY_N2]

    @property
    def best_k(self) -> np.ndarray:
        """The frequency [M] that explains most; 0 for a function that does not vary."""
        return strongest(self.explained_variance)

    def table(self) -> pd.DataFrame:
        """A row for each function (its number in `index`) and k: explained variance, amplitude and phase by operand."""
        K, M = self.explained_variance.shape
        columns = {"explained_variance": self.explained_variance}
        for which, operand in ((BY_N1, "n1"), (BY_N2, "n2")):
            columns[f"amplitude_{operand}"] = np.abs(self.waves[which])
            columns[f"phase_{operand}"] = np.angle(self.waves[which])
        index = pd.MultiIndex.from_product([range(M), range(1, K + 1)], names=["index", "k"]).to_frame(index=False)
        return index.assign(**{name: column.T.ravel() for name, column in columns.items()})


def fitted(values: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The best mean + A cos(2πkn/N + α) + B cos(2πkm/N + β) for functions of a pair, each at its own k.

    Args:
        values: [N, N, M].
        k: [M].

    Returns:
        [N, N, M].
    """
    N, M = values.shape[1:]
    found = waves(np.stack([values.mean(1), values.mean(0)]))[:, k - 1, np.arange(M)]  # [2, M]
    by_n, by_m = (found[:, None] * np.exp(2j * np.pi * np.outer(np.arange(N), k) / N)).real  # [N, M] each
    return values.mean((0, 1)) + by_n[:, None] + by_m


def map_table(values: np.ndarray, k: np.ndarray) -> pd.DataFrame:
    """Functions of a pair [N, N, M], each beside its fit at its k [M] (`fitted`): a row for each k, n1 and n2."""
    index = pd.MultiIndex.from_product([k, range(len(values)), range(len(values))], names=["k", "n1", "n2"])
    maps = {"value": values, "fit": fitted(values, k)}
    return index.to_frame(index=False).assign(**{name: np.moveaxis(m, 2, 0).ravel() for name, m in maps.items()})


def norm_table(named: dict[str, np.ndarray]) -> pd.DataFrame:
    """Norms of values [N, M] along every function of the orthonormal basis.

    Returns:
        a row a basis function: k, wave (constant, cos or sin), and a column for each of the named values.
    """
    N = len(next(iter(named.values())))
    columns = {"k": frequencies(N), "wave": ["constant", *["cos", "sin"] * (N // 2)][:N]}
    return pd.DataFrame(columns | {name: np.linalg.norm(basis(N).T @ values, axis=1) for name, values in named.items()})


def plane_table(vectors: np.ndarray, k: np.ndarray) -> pd.DataFrame:
    """`plane` at several frequencies: a row for each k and number n, with x and y."""
    index = pd.MultiIndex.from_product([k, range(len(vectors))], names=["k", "n"]).to_frame(index=False)
    x, y = np.concatenate([np.empty((0, 2)), *(plane(vectors, one) for one in k)]).T
    return index.assign(x=x, y=y)


def plane(vectors: np.ndarray, k: int) -> np.ndarray:
    """The vectors of the numbers, projected on the plane that their cosine and sine at k span.

    The axes are the orthonormal ones nearest to the directions of cosine and sine. Nothing but this projection is done:
    a circle means that the two directions are orthogonal, equally long and free of other frequencies. For k = N/2 the
    plane is a line, and the second coordinate 0.

    Args:
        vectors: [N, d], a vector a number.
        k: the frequency.

    Returns:
        points [N, 2].
    """
    N = len(vectors)
    functions = basis(N)[:, frequencies(N) == k]  # [N, 2] or, at N/2, [N, 1]
    left, _, right = np.linalg.svd(vectors.T @ functions, full_matrices=False)  # [d, N] @ [N, 2]
    points = (vectors - vectors.mean(0)) @ left @ right  # [N, d] @ [d, 2] @ [2, 2]
    return np.pad(points, ((0, 0), (0, 2 - points.shape[1])))


def circle_r2(vectors: np.ndarray) -> np.ndarray:
    """How well `plane` puts the numbers on an exact circle at every frequency: [N, d] → [K].

    R² of r · (cos(2πkn/N), sin(2πkn/N)) with the best radius r. Other frequencies in the plane lower it, and so do
    directions of cosine and sine that are not equally long or not orthogonal.
    """
    N, found = len(vectors), []
    for k in range(1, N // 2 + 1):
        functions = basis(N)[:, frequencies(N) == k]
        points = plane(vectors, k)[:, : functions.shape[1]]
        total = functions.shape[1] * (points**2).sum()
        found.append((functions * points).sum() ** 2 / total if total > 0 else np.nan)
    return np.array(found)


def circle_table(vectors: np.ndarray, rng: np.random.Generator) -> pd.DataFrame:
    """The numbers' vectors [N, d] at every frequency: a row for each, in order.

    Returns:
        circle_share of the centred vectors' sum of squares, circle_r2, and circle_r2_random of normal vectors.
    """
    by_frequency = energy(waves(vectors), len(vectors)).sum(1)  # [K]
    return pd.DataFrame(
        {
            "circle_share": by_frequency / by_frequency.sum(),
            "circle_r2": circle_r2(vectors),
            "circle_r2_random": circle_r2(rng.normal(size=vectors.shape)),
        }
    )


def correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pearson's, over the pairs, of functions [N, N, M] with functions [N, N, M]: [M], NaN where one does not vary."""
    x, y = x - x.mean((0, 1)), y - y.mean((0, 1))
    norms = np.sqrt((x**2).sum((0, 1)) * (y**2).sum((0, 1)))
    return (x * y).sum((0, 1)) / np.where(norms > 0, norms, np.nan)


def phase_agreement(k: pd.Series, phase: pd.Series, error: pd.Series) -> tuple[float, float]:
    """Mean cosine of the error of some phases, and its mean when the phases of each k are shuffled.

    Args:
        k, phase: [M] the frequency and phase of some waves.
        error: [M] by how much the phase is above the expected one.
    """
    pairs = [(turn(phase), turn(phase - error)) for turn in (np.cos, np.sin)]
    # The mean of a product over all ways to pair two sets of numbers is the product of their means.
    shuffled = sum(found.groupby(k).transform("mean") * other.groupby(k).transform("mean") for found, other in pairs)
    return np.cos(error).mean(), shuffled.mean()
