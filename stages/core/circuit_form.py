"""The exact forward pass in circuit form: logits at the last position without a vector per token.

Without normalisation, biases and a first MLP, everything before layer 2's MLP is a product of embeddings with the QK
and OV circuits (Elhage et al. 2021, "A mathematical framework for transformer circuits"). With X = [E; P], the token
embeddings stacked on the positions:

- every layer-1 score is a sum of four entries of the table X QK1 Xᵀ;
- layer 2 has one query, at ``=``; its score for position i is q·x_i + Σ_j a_ij q·(x_j OV1), where a is
  layer 1's pattern;
- a weighted sum over positions of embeddings is (weights added up by token) E + (weights) P.

The result is that of the TransformerLens model (`stages.core.bridge`) up to rounding, for any number of heads.

Shapes: B sequences of T positions; V tokens; d = d_model; H heads (G where layer 2's stand beside layer 1's);
h = d_head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from stages.core.weights import Weights


@dataclass(frozen=True)
class Circuits:
    """The products of weights that the forward pass reads; made once for any number of batches.

    Attributes:
        X: [V+T, d] token embeddings on top of position embeddings.
        scores1: [H, V+T, V+T] the table X QK1 Xᵀ / sqrt(h).
        XOV1: [H, V+T, d] layer 1's output for each row of X.
        QK2: [G, d, d] layer 2's W_Q W_Kᵀ / sqrt(h).
        OV2: [G, d, d] layer 2's W_V W_O.
        W_in, W_out, W_U: [d, d_mlp], [d_mlp, d], [d, N].
    """

    X: Tensor
    scores1: Tensor
    XOV1: Tensor
    QK2: Tensor
    OV2: Tensor
    W_in: Tensor
    W_out: Tensor
    W_U: Tensor

    @classmethod
    def of(cls, weights: Weights) -> "Circuits":
        """Multiply a model's weights out; differentiable."""
        X = torch.cat([weights["embed.W_E"], weights["pos_embed.W_pos"]])
        Q1, K1, V1, O1 = (weights[f"blocks.0.attn.W_{name}"] for name in "QKVO")
        Q2, K2, V2, O2 = (weights[f"blocks.1.attn.W_{name}"] for name in "QKVO")
        scale = Q1.shape[-1] ** -0.5
        return cls(
            X=X,
            scores1=(X @ Q1 * scale) @ (X @ K1).mT,  # [H, V+T, h] @ [H, h, V+T]
            XOV1=(X @ V1) @ O1,  # [H, V+T, h] @ [H, h, d]
            QK2=(Q2 * scale) @ K2.mT,
            OV2=V2 @ O2,
            W_in=weights["blocks.1.mlp.W_in"],
            W_out=weights["blocks.1.mlp.W_out"],
            W_U=weights["unembed.W_U"],
        )


@dataclass(frozen=True)
class Forward:
    """What one pass computes.

    Attributes:
        pattern1: [H, B, T, T] layer 1's attention, query by key.
        pattern2: [G, B, T] layer 2's attention from the last position.
        resid_mid: [B, d] the input of layer 2's MLP at the last position.
        logits: [B, N] at the last position.
    """

    pattern1: Tensor
    pattern2: Tensor
    resid_mid: Tensor
    logits: Tensor


def forward(circuits: Circuits, tokens: Tensor) -> Forward:
    """Run the model.

    Args:
        circuits: the multiplied-out weights.
        tokens: [B, T] token ids, int64.
    """
    c = circuits
    T = tokens.shape[1]
    V = len(c.X) - T

    scores = _TableLookup.apply(c.scores1, tokens)  # [H, B, T, T]
    future = torch.ones(T, T, dtype=torch.bool, device=tokens.device).triu(1)
    pattern1 = scores.masked_fill(future, -torch.inf).softmax(-1)

    attended = _by_row_of_X(pattern1[:, :, -1], tokens, V)  # [H, B, V+T]
    resid = c.X[tokens[:, -1]] + c.X[-1] + (attended @ c.XOV1).sum(0)  # [B, d] after layer 1, last position

    # Layer 2 reads the same rows from every position: X itself, and what each head of layer 1 makes of X.
    rows = torch.cat([c.X, *c.XOV1])  # [(1+H)(V+T), d]
    direct, *moved = (resid @ (c.QK2 @ rows.T)).split(V + T, dim=2)  # [B, d] @ [G, d, (1+H)(V+T)]
    scores = _by_position(direct, tokens, V)  # [G, B, T]
    for pattern, through in zip(pattern1, moved, strict=True):
        source = _by_position(through, tokens, V)  # [G, B, T] over j
        scores = scores + (pattern @ source.unsqueeze(-1)).squeeze(-1)  # [B, T, T] @ [G, B, T, 1]
    pattern2 = scores.softmax(-1)

    weights = [_by_row_of_X(pattern2, tokens, V)]  # [G, B, V+T]
    for pattern in pattern1:
        source = (pattern2.unsqueeze(-2) @ pattern).squeeze(-2)  # [G, B, 1, T] @ [B, T, T]
        weights.append(_by_row_of_X(source, tokens, V))
    resid_mid = resid + (torch.cat(weights, dim=2) @ (rows @ c.OV2)).sum(0)  # [G, B, (1+H)(V+T)] @ [G, (1+H)(V+T), d]

    logits = (resid_mid + mlp2(c, resid_mid)) @ c.W_U
    return Forward(pattern1, pattern2, resid_mid, logits)


def mlp2(circuits: Circuits, resid_mid: Tensor) -> Tensor:
    """Layer 2's MLP without the residual: [..., d] → [..., d]."""
    return torch.relu(resid_mid @ circuits.W_in) @ circuits.W_out


class _TableLookup(torch.autograd.Function):
    """S[h, t_i, t_j] + S[h, t_i, V+j] + S[h, V+i, t_j] + S[h, V+i, V+j] as [H, B, T, T].

    Plain indexing gives the same; its backward pass (index_put) is slower than the matrix products of a whole step, so
    that here gradients are added up by table entry with `bincount` and `index_add_`, in float64.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, S: Tensor, tokens: Tensor) -> Tensor:
        T = tokens.shape[1]
        V = S.shape[1] - T
        entry = tokens.unsqueeze(2) * V + tokens.unsqueeze(1)  # [B, T, T]
        ctx.save_for_backward(tokens, entry)
        ctx.V = V
        by_query = S[:, :V, V:].contiguous()[:, tokens]  # [H, B, T, T]
        by_key = S[:, V:, :V].mT.contiguous()[:, tokens].mT  # [H, B, T, T]
        both = S[:, :V, :V].flatten(1)[:, entry]
        return both.add_(by_query).add_(by_key).add_(S[:, None, V:, V:])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        tokens, entry = ctx.saved_tensors
        T, flat = tokens.shape[1], tokens.flatten()
        V = ctx.V
        table = grad.new_empty(len(grad), V + T, V + T)
        for head, g in enumerate(grad.to(torch.float64)):  # [B, T, T]
            table[head, :V, :V] = torch.bincount(entry.flatten(), g.flatten(), V * V).view(V, V)
            table[head, :V, V:] = g.new_zeros(V, T).index_add_(0, flat, g.reshape(-1, T))
            table[head, V:, :V] = g.new_zeros(V, T).index_add_(0, flat, g.mT.reshape(-1, T)).T
        table[:, V:, V:] = grad.sum(1)
        return table, None


def _by_row_of_X(weights: Tensor, tokens: Tensor, V: int) -> Tensor:
    """Weights over positions [H, B, T] as weights over the rows of X [H, B, V+T]: added up by token, then as is."""
    by_token = weights.new_zeros(*weights.shape[:2], V).scatter_add(2, tokens.expand_as(weights), weights)
    return torch.cat([by_token, weights], dim=2)


def _by_position(values: Tensor, tokens: Tensor, V: int) -> Tensor:
    """Values of the rows of X [H, B, V+T] looked up for the token and position at each place: [H, B, T]."""
    return values[..., V:] + values.gather(2, tokens.expand(len(values), *tokens.shape))
