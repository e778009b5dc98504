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

    gates = 4

    def projection_bias(self, weights: Weights) -> Tensor:
        """Both biases: they only ever appear as a sum."""
        return weights.input_bias + weights.hidden_bias

    def forward(self, projected: Tensor, state: State, weights: Weights) -> LstmTrace:
        """See ``Cell.forward``."""
        trace = _empty_trace(projected, state, weights)
        recurrent = weights.hidden.mT
        i, f, g, o = (gate.unbind() for gate in trace.gates.unbind(-2))
        hidden, cell, output = trace.hidden.unbind(), trace.cell.unbind(), trace.output.unbind()
        candidate, cell_tanh = trace.candidate.unbind(), trace.cell_tanh.unbind()
        for step, activations in enumerate(projected.unbind()):
            activations.baddbmm_(hidden[step], recurrent)
            torch.tanh(g[step], out=candidate[step])
            activations.sigmoid_()  # in place: the gates are views of it
            torch.mul(f[step], cell[step], out=cell[step + 1])
            cell[step + 1].addcmul_(i[step], candidate[step])
            torch.tanh(cell[step + 1], out=cell_tanh[step])
            torch.mul(o[step], cell_tanh[step], out=output[step])
            if weights.projection is not None:
                torch.bmm(output[step], weights.projection.mT, out=hidden[step + 1])
        return trace

    def backward(
        self, trace: Trace, hidden_grads: Sequence[Tensor], carry: State, weights: Weights
    ) -> GateGrads:
        """See the top of this file."""
        assert isinstance(trace, LstmTrace)
        (cell_grad,) = carry
        grads, cell_slopes, forget = _slopes(trace)
        flat = grads.flatten(-2)
        through_cell, through_output = grads[..., :3, :].unbind(), grads[..., 3, :].unbind()
        by_step = zip(flat.unbind(), cell_slopes.unbind(), forget.unbind(), strict=True)
        for step, (grad, cell_slope, kept) in reversed(list(enumerate(by_step))):
            output_grad = hidden_grads[step + 1]
            if weights.projection is not None:
                output_grad = output_grad @ weights.projection
            cell_grad.addcmul_(output_grad, cell_slope)
            through_cell[step].mul_(cell_grad.unsqueeze(-2))
            through_output[step].mul_(output_grad)
            cell_grad.mul_(kept)
            hidden_grads[step].baddbmm_(grad, weights.hidden)
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


def _slopes(trace: LstmTrace) -> tuple[Tensor, Tensor, Tensor]:
    """What the backward steps multiply by.

    Returns:
        ``(g i(1-i), c f(1-f), i(1-g²), tanh(c') o(1-o))``, which take the place of the gates;
        ``o (1 - tanh²c')``; and ``f``.
    """
    slopes = trace.gates
    i, f, _, o = slopes.unbind(-2)
    candidate, cell_tanh = trace.candidate, trace.cell_tanh
    forget = f.clone()
    cell_slope = torch.addcmul(o, trace.output, cell_tanh, value=-1)
    candidate_slope = torch.addcmul(i, i * candidate, candidate, value=-1)
    slopes.addcmul_(slopes, slopes, value=-1)  # σ(1 - σ)
    slopes[..., 0, :].mul_(candidate)
    slopes[..., 1, :].mul_(trace.cell[:-1])
    slopes[..., 2, :] = candidate_slope
    slopes[..., 3, :].mul_(cell_tanh)
    return slopes, cell_slope, forget
