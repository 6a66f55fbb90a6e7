"""The waves of n + m in the logits: how much each holds, and the losses with the key ones alone and without them.

Nanda et al. 2023, "Progress measures for grokking via mechanistic interpretability"; see `stages.fourier` for what the
losses mean. Shapes: N numbers, K = floor(N/2) frequencies; logits are [N, N, N] by n, m and answer.
"""

import numpy as np
import torch

from stages.parts import fourier_basis
from stages.parts.fourier_basis import BY_SUM, PairWaves


def logit_shares(logits: np.ndarray) -> np.ndarray:
    """Share of the logits' variance in cos and sin of k(n + m): [N, N, N] → [K].

    A number added to all logits of one sequence changes no probability, so each sequence's mean is taken away first.
    """
    logits = logits - logits.mean(2, keepdims=True)
    variance = logits.var((0, 1))  # [N] by answer
    return np.nan_to_num(PairWaves.of(logits).share[BY_SUM]) @ variance / variance.sum()  # [K, N] @ [N]


def losses(logits: np.ndarray, trained: np.ndarray, key: np.ndarray) -> dict[str, float]:
    """Restricted loss and that of the other waves (held-out pairs), excluded loss (trained pairs), the plain losses.

    A loss is NaN where there is no pair to take it over.

    Args:
        logits: [N, N, N] of the core-only sequences.
        trained: [N, N] which pairs training sees.
        key: the key frequencies.
    """
    n = np.arange(len(logits))
    answer = (n[:, None] + n) % len(n)
    by_sum = fourier_basis.mean_by_sum(logits)  # [N, N]
    key_part = fourier_basis.keep(by_sum, key)  # [N, N]

    def loss(logits: np.ndarray, pairs: np.ndarray) -> float:
        chosen = torch.from_numpy(logits[pairs]), torch.from_numpy(answer[pairs])
        return torch.nn.functional.cross_entropy(*chosen).item()

    return {
        "restricted_loss": loss((by_sum.mean(0) + key_part)[answer], ~trained),
        "non_key_loss": loss((by_sum - key_part)[answer], ~trained),
        "excluded_loss": loss(logits - key_part[answer], trained),
        "held_out_loss": loss(logits, ~trained),
        "trained_loss": loss(logits, trained),
    }
