"""The idealised model behind the gradient test: what the derivation in `stages.gradient` assumes, as weights.

It is a model in circuit form with orthonormal embeddings and a layer 1 that routes, so that `forward` runs it; only
what comes after layer 2's attention is another adder.

Shapes: B sequences of T tokens; N numbers; n variables; V+T rows of X, as in `stages.core.circuit_form`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from stages.core.circuit_form import Circuits
from stages.core.task import Task

CERTAIN = 1e4  # a score so far above all others that softmax gives exactly 1


def routed(circuits: Circuits, task: Task) -> Circuits:
    """The circuits with another layer 1, in every head: ``=`` sees both operands, all of the prefix one position back.

    The prefix's first position, with nothing before it, sees itself. ``+`` and the operands see what they saw.
    """
    V, last = task.vocabulary, len(circuits.X) - 1
    scores1 = circuits.scores1.clone()
    scores1[:, task.equals] = scores1[:, last] = 0
    scores1[:, last, [last - 2, last - 1]] = CERTAIN
    later = torch.arange(1, task.prefix)
    scores1[:, V + later, V + later - 1] += CERTAIN
    return replace(circuits, scores1=scores1)


def ideal_circuits(task: Task) -> Circuits:
    """The idealised model, float64; what `forward` calls logits is h, layer 2's attention on each number.

    The rows of X, of V and of E_numbers OV2 are orthonormal, all else is zero. Layer 1 routes; ``+`` and the operands
    see ``+``.
    """
    n, N, rows = task.variables, task.N, task.vocabulary + task.context
    basis = torch.eye(rows + n + N, dtype=torch.float64)
    d = len(basis)
    scores1, XOV1, OV2 = basis.new_zeros(1, rows, rows), basis.new_zeros(1, rows, d), basis.new_zeros(1, d, d)
    plus = task.vocabulary + task.prefix  # the row of X for the position of +
    scores1[0, plus : plus + 3, plus] = CERTAIN
    XOV1[0, task.first_variable : task.vocabulary] = basis[rows : rows + n]
    OV2[0, :N] = basis[rows + n :]
    circuits = Circuits(
        X=basis[:rows],
        scores1=scores1,
        XOV1=XOV1,
        QK2=torch.zeros_like(OV2),
        OV2=OV2,
        W_in=basis.new_zeros(d, 1),
        W_out=basis.new_zeros(1, d),
        W_U=basis[:, rows + n :],
    )
    return routed(circuits, task)


def product_adder(h: Tensor, adder_scale: float) -> Tensor:
    """The logits λ Σ_{n+m≡c} h_n h_m, [B, N] from h [B, N]: a convolution, by Fourier transform."""
    return adder_scale * torch.fft.irfft(torch.fft.rfft(h) ** 2, n=h.shape[-1])


def use_under_product_adder(task: Task, tokens: Tensor, answers: Tensor, adder_scale: float) -> Tensor:
    """g of step 4 of the derivation, from tokens [B, T] and answers [B]: [B, T], in nats per unit of attention."""
    is_number = tokens < task.N
    number = tokens.where(is_number, 0)
    h = torch.zeros(len(tokens), task.N, dtype=torch.float64)
    h.scatter_add_(1, number, is_number.to(h.dtype) / task.context)
    error = torch.nn.functional.one_hot(answers, task.N) - product_adder(h, adder_scale).softmax(-1)
    correlation = torch.fft.irfft(torch.fft.rfft(error) * torch.fft.rfft(h).conj(), n=task.N)  # Σ_c error_c h_{c-n}
    return 2 * adder_scale * correlation.gather(1, number) * is_number
