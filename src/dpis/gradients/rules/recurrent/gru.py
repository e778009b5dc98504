"""The GRU cell.

With ``a = x W_ihᵀ + b_ih`` and ``b = h W_hhᵀ + b_hh``

    r = σ(a_r + b_r),   z = σ(a_z + b_z),   n = tanh(a_n + r b_n),   h' = n + z (h - n)

every gradient of a pre-activation is ``dh'`` times a factor known after the forward pass:

    da_n = dh' (1-z)(1-n²),             db_n = da_n r
    da_r = db_r = da_n b_n r(1-r),      da_z = db_z = dh' (h-n) z(1-z)

The inputs and the hidden state see different gradients in the last gate alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpis.gradients.rules.recurrent.cell import Cell, GateGrads, State, Trace, Weights


@dataclass(frozen=True)
class GruTrace(Trace):
    """What the backward pass needs, each for all steps of a block.

    Attributes:
        gates: ``r``, ``z`` and ``n``, ``[steps, directions, active, 3, features]``.
        recurrent_candidate: ``b_n``.
    """

    gates: Tensor
    recurrent_candidate: Tensor


@dataclass(frozen=True)
class GruCell(Cell):
    """``nn.GRU``."""

    gates = 3
    adds_gates = False

    def projection_bias(self, weights: Weights) -> Tensor:
        """``b_ih`` alone: ``r`` multiplies a part of ``b_hh``."""
        return weights.input_bias

    def forward(self, projected: Tensor, state: State, weights: Weights) -> GruTrace:
        """See ``Cell.forward``."""
        (hidden_before,) = state
        gates = torch.unflatten(projected, -1, (3, -1))
        hidden = gates.new_empty(len(gates) + 1, *hidden_before.shape)
        hidden[0] = hidden_before
        recurrent, bias = weights.hidden.mT, weights.hidden_bias.unsqueeze(1)
        recurrent_candidate = torch.empty_like(hidden[1:])
        for step in range(len(gates)):
            seen = torch.unflatten(torch.baddbmm(bias, hidden[step], recurrent), -1, (3, -1))
            recurrent_candidate[step] = seen[..., 2, :]
            gates[step, ..., :2, :].add_(seen[..., :2, :]).sigmoid_()
            r, z, n = gates[step].unbind(-2)
            n.addcmul_(r, recurrent_candidate[step]).tanh_()
            torch.lerp(n, hidden[step], z, out=hidden[step + 1])
        return GruTrace(hidden, gates, recurrent_candidate)

    def backward(
        self, trace: Trace, hidden_grads: Sequence[Tensor], carry: State, weights: Weights
    ) -> GateGrads:
        """See the top of this file."""
        assert isinstance(trace, GruTrace)
        grads = _slopes(trace)
        update = trace.gates[..., 1, :]
        for step in reversed(range(len(grads))):
            hidden_grad = hidden_grads[step + 1]
            grads[step].mul_(hidden_grad.unsqueeze(-2))
            hidden_grads[step].addcmul_(hidden_grad, update[step])
            hidden_grads[step].baddbmm_(grads[step, ..., :3, :].flatten(-2), weights.hidden)
        return GateGrads(
            inputs=torch.cat([grads[..., :2, :], grads[..., 3:, :]], dim=-2).flatten(-2),
            hidden=grads[..., :3, :].flatten(-2),
        )


def _slopes(trace: GruTrace) -> Tensor:
    """What ``dh'`` is multiplied by to give ``(db_r, db_z, db_n, da_n)``."""
    r, z, n = trace.gates.unbind(-2)
    candidate_slope = (1 - z) * (1 - n.square())
    recurrent_slope = candidate_slope * r
    return torch.stack(
        [
            recurrent_slope * trace.recurrent_candidate * (1 - r),
            (trace.hidden[:-1] - n) * z * (1 - z),
            recurrent_slope,
            candidate_slope,
        ],
        dim=-2,
    )
