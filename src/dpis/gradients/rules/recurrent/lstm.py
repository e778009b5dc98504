"""The LSTM cell.

With the gates ``i, f, o = σ(·)`` and ``g = tanh(·)`` of the pre-activations

    c' = f c + i g,    u = o tanh(c'),    h' = u  (or u W_hrᵀ with proj_size)

and with ``du`` the gradient of ``u``, the gradients of the pre-activations are

    dc' += du o (1 - tanh²c')
    (di, df, dg, do) = (dc' g i(1-i),  dc' c f(1-f),  dc' i(1-g²),  du tanh(c') o(1-o))
    dc   = dc' f

Every factor but ``du`` and ``dc'`` is known after the forward pass. They are computed for all steps
of a block at once, so that a backward step is one matrix product and four elementwise products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpis.gradients.rules.recurrent.cell import Cell, GateGrads, State, Trace, Weights


@dataclass(frozen=True)
class LstmTrace(Trace):
    """What the backward pass needs, each for all steps of a block.

    Attributes:
        gates: ``σ`` of the pre-activations, ``[steps, directions, active, 4, features]``; the third
            is of no use (it is cheaper to compute than to leave out).
        candidate: ``g``.
        cell: ``c`` before the block and after each step.
        cell_tanh: ``tanh(c')``.
        output: ``u``, the hidden state before the projection.
    """

    gates: Tensor
    candidate: Tensor
    cell: Tensor
    cell_tanh: Tensor
    output: Tensor

    @property
    def final(self) -> State:
        """The hidden state and the cell after the block."""
        return self.hidden[-1], self.cell[-1]

    @property
    def unprojected(self) -> Tensor:
        """``u`` at every step."""
        return self.output


@dataclass(frozen=True)
class LstmCell(Cell):
    """``nn.LSTM``, with or without ``proj_size``."""

    def projection_bias(self, weights: Weights) -> Tensor:
        """Both biases: they only ever appear as a sum."""
        return weights.input_bias + weights.hidden_bias

    def forward(self, projected: Tensor, state: State, weights: Weights) -> LstmTrace:
        """See ``Cell.forward``."""
        trace = _empty_trace(projected, state, weights)
        recurrent = weights.hidden.mT
        for step, activations in enumerate(projected):
            activations.baddbmm_(trace.hidden[step], recurrent)
            i, f, g, o = trace.gates[step].unbind(-2)
            torch.tanh(g, out=trace.candidate[step])
            activations.sigmoid_()  # in place: the gates are a view of it
            cell, output = trace.cell[step + 1], trace.output[step]
            torch.mul(f, trace.cell[step], out=cell).addcmul_(i, trace.candidate[step])
            torch.tanh(cell, out=trace.cell_tanh[step])
            torch.mul(o, trace.cell_tanh[step], out=output)
            if weights.projection is not None:
                torch.bmm(output, weights.projection.mT, out=trace.hidden[step + 1])
        return trace

    def backward(
        self, trace: Trace, hidden_grads: Sequence[Tensor], carry: State, weights: Weights
    ) -> GateGrads:
        """See the top of this file."""
        assert isinstance(trace, LstmTrace)
        (cell_grad,) = carry
        grads, cell_slope = _slopes(trace)
        forget = trace.gates[..., 1, :]
        for step in reversed(range(len(grads))):
            output_grad = hidden_grads[step + 1]
            if weights.projection is not None:
                output_grad = output_grad @ weights.projection
            cell_grad.addcmul_(output_grad, cell_slope[step])
            grads[step, ..., :3, :].mul_(cell_grad.unsqueeze(-2))
            grads[step, ..., 3, :].mul_(output_grad)
            cell_grad.mul_(forget[step])
            hidden_grads[step].baddbmm_(grads[step].flatten(-2), weights.hidden)
        flat = grads.flatten(-2)
        return GateGrads(flat, flat)


def _empty_trace(projected: Tensor, state: State, weights: Weights) -> LstmTrace:
    """The trace before the first step. Without a projection the output is the hidden state."""
    hidden_before, cell_before = state
    gates = torch.unflatten(projected, -1, (4, -1))
    steps, directions, active, _, features = gates.shape
    cell = gates.new_empty(steps + 1, directions, active, features)
    cell[0] = cell_before
    if weights.projection is None:
        hidden = torch.empty_like(cell)
        output = hidden[1:]
    else:
        hidden = gates.new_empty(steps + 1, *hidden_before.shape)
        output = torch.empty_like(cell[1:])
    hidden[0] = hidden_before
    return LstmTrace(
        hidden=hidden,
        gates=gates,
        candidate=torch.empty_like(cell[1:]),
        cell=cell,
        cell_tanh=torch.empty_like(cell[1:]),
        output=output,
    )


def _slopes(trace: LstmTrace) -> tuple[Tensor, Tensor]:
    """What ``(dc', dc', dc', du)`` is multiplied by to give the gates' gradients, and ``dc'/du``."""
    i, _, _, o = trace.gates.unbind(-2)
    candidate, cell_tanh = trace.candidate, trace.cell_tanh
    slopes = torch.addcmul(trace.gates, trace.gates, trace.gates, value=-1)  # σ(1 - σ)
    slopes[..., 0, :].mul_(candidate)
    slopes[..., 1, :].mul_(trace.cell[:-1])
    torch.addcmul(i, i * candidate, candidate, value=-1, out=slopes[..., 2, :])
    slopes[..., 3, :].mul_(cell_tanh)
    return slopes, torch.addcmul(o, trace.output, cell_tanh, value=-1)
