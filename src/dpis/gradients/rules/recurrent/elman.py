"""The plain recurrent cell, ``h' = f(x W_ihᵀ + b_ih + h W_hhᵀ + b_hh)`` with tanh or relu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dpis.gradients.rules.recurrent.cell import Cell, GateGrads, State, Trace, Weights


@dataclass(frozen=True)
class ElmanCell(Cell):
    """``nn.RNN``. Both derivatives follow from the output: ``1 - h²`` and ``[h > 0]``."""

    gates = 1

    relu: bool

    def projection_bias(self, weights: Weights) -> Tensor:
        """Both biases: they only ever appear as a sum."""
        return weights.input_bias + weights.hidden_bias

    def forward(self, projected: Tensor, state: State, weights: Weights) -> Trace:
        """See ``Cell.forward``."""
        hidden = torch.cat([state[0].unsqueeze(0), projected])
        recurrent = weights.hidden.mT
        for before, after in pairwise(hidden):
            after.baddbmm_(before, recurrent)
            after.relu_() if self.relu else after.tanh_()
        return Trace(hidden)

    def backward(
        self, trace: Trace, hidden_grads: Sequence[Tensor], carry: State, weights: Weights
    ) -> GateGrads:
        """``dg = f' dh``, and ``dg W_hh`` flows to the step before."""
        after = trace.hidden[1:]
        grads = (after > 0).to(after.dtype) if self.relu else 1 - after.square()
        for step in reversed(range(len(grads))):
            grads[step].mul_(hidden_grads[step + 1])
            hidden_grads[step].baddbmm_(grads[step], weights.hidden)
        return GateGrads(grads, grads)
