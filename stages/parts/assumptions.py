"""How far a model meets what the derivation in `stages.gradient` assumes; steps are those of that derivation.

Shapes: B sequences of T tokens; N numbers; n variables; d = d_model; V+T rows of X, as in `stages.core.circuit_form`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from stages.core.circuit_form import Circuits, forward, mlp2
from stages.core.layouts import value_positions
from stages.core.task import Task


def variable_images(circuits: Circuits, task: Task) -> Tensor:
    """V = E_variables OV1, heads summed: [n, d]."""
    return circuits.XOV1.sum(0)[task.first_variable : task.vocabulary]


def use_of_positions(circuits: Circuits, tokens: Tensor, answers: Tensor) -> Tensor:
    """g - ḡ of step 2 for a real model: [B, T], in nats per unit of attention (of every head of layer 2).

    Attending to position j adds x_j OV2 to the residual stream; g_j is how fast that lowers the loss.
    """
    c = replace(circuits, QK2=torch.zeros_like(circuits.QK2))
    out = forward(c, tokens)
    resid_mid = out.resid_mid.detach().requires_grad_()
    logits = (resid_mid + mlp2(c, resid_mid)) @ c.W_U
    loss = torch.nn.functional.cross_entropy(logits, answers, reduction="sum")
    wanted = -torch.autograd.grad(loss, resid_mid)[0] @ c.OV2.sum(0).T  # [B, d] @ [d, d]

    def by_position(rows: Tensor) -> Tensor:
        along = wanted @ rows.T  # [B, d] @ [d, V+T]
        return along.gather(1, tokens) + along[:, -tokens.shape[1] :]

    use = by_position(c.X)
    for pattern1, XOV in zip(out.pattern1, c.XOV1, strict=True):
        use = use + (pattern1 @ by_position(XOV).unsqueeze(-1)).squeeze(-1)  # [B, T, T] @ [B, T, 1]
    return use - use.mean(1, keepdim=True)


def assumptions(circuits: Circuits, task: Task, tokens: Tensor, use: Tensor) -> dict[str, float]:
    """How far a model meets what the derivation assumes, on sequences of one form; layer 1's heads are averaged.

    Args:
        tokens: [B, T].
        use: [B, T] of `use_of_positions`.

    Returns:
        `attn1_equals_to_operands`: share of sequences whose two largest layer-1 weights from ``=`` are the operands;
        `attn1_left_variable`, `attn1_right_variable`: mean weight there where that is a variable (step 6: 1/2);
        `attn1_num_to_prev`: share of the prefix's numbers whose largest layer-1 weight is on the token before;
        `variables_cosine`, `variables_cosine_max`: mean cosine of two rows of V, and the largest in size (step 3: 0);
        `adder_accuracy`: share of all pairs for which MLP2(E_a OV2 + E_b OV2) W_U is largest at (a+b) mod N;
        `use_of_values`, `use_of_distractors`: mean g - ḡ of the prefix's numbers that are operands' values, and of the
        others (step 5: G - 2G/T and -2G/T).
    """
    N = task.N
    pattern1 = forward(circuits, tokens).pattern1.mean(0)  # [B, T, T]
    from_equals, operands = pattern1[:, -1], torch.tensor([task.context - 3, task.context - 2])
    largest = from_equals.topk(2).indices.sort(1).values
    at_operands = from_equals[:, operands].masked_fill(tokens[:, operands] < task.first_variable, torch.nan)  # [B, 2]
    left, right = at_operands.nanmean(0)

    row, place = (tokens[:, : task.prefix] < N).nonzero(as_tuple=True)  # the prefix's numbers
    is_value = (torch.from_numpy(value_positions(task, tokens.numpy()))[row] == place.unsqueeze(1)).any(1)

    V = torch.nn.functional.normalize(variable_images(circuits, task), dim=1)
    cosines = (V @ V.T)[~torch.eye(task.variables, dtype=torch.bool)]
    E, numbers = circuits.X[:N] @ circuits.OV2.sum(0), torch.arange(N)  # [N, d]
    sums = torch.stack([(mlp2(circuits, E[a] + E) @ circuits.W_U).argmax(-1) for a in numbers])
    found = {
        "attn1_equals_to_operands": (largest == operands).all(1).double().mean(),
        "attn1_left_variable": left,
        "attn1_right_variable": right,
        "attn1_num_to_prev": (pattern1[row, place].argmax(1) == place - 1).double().mean(),
        "variables_cosine": cosines.mean(),
        "variables_cosine_max": cosines.abs().max(),
        "adder_accuracy": (sums == (numbers + numbers.unsqueeze(1)) % N).double().mean(),
        "use_of_values": use[row, place][is_value].mean(),
        "use_of_distractors": use[row, place][~is_value].mean(),
    }
    return {name: value.item() for name, value in found.items()}
