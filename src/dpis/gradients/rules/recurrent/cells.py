"""What one step of a recurrence does, forwards and backwards: the plain cell, the GRU and the LSTM.

Inside a recurrence all tensors of a block of steps have the shape ``[steps, directions, active,
features]``: a step is one contiguous slice, and both directions run in the same call.

Every factor of a gradient but those that come from later steps is known after the forward pass.
These factors, the slopes, are computed for all steps of a block at once, so that a backward step is
one matrix product and a few elementwise products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

# What a cell remembers from step to step: (hidden,), and for the LSTM (hidden, cell).
# Each has the shape [directions, records, features].
State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Weights:
    """The weights of one layer, its directions stacked in front.

    Attributes:
        inputs: ``weight_ih``, ``[directions, gates, input features]``.
        hidden: ``weight_hh``, ``[directions, gates, hidden features]``.
        input_bias: ``bias_ih``, ``[directions, gates]``, zero where the layer has none.
        hidden_bias: ``bias_hh``, likewise.
        projection: ``weight_hr`` of an LSTM with ``proj_size``, ``[directions, projected, hidden]``.
    """

    inputs: Tensor
    hidden: Tensor
    input_bias: Tensor
    hidden_bias: Tensor
    projection: Tensor | None = None


@dataclass(frozen=True)
class CellTrace:
    """What a forward pass over one block leaves for the backward pass.

    Attributes:
        hidden: the hidden state before the block and after each of its steps,
            ``[steps + 1, directions, active, features]``.
    """

    hidden: Tensor

    @property
    def final(self) -> State:
        """The state after the block."""
        return (self.hidden[-1],)

    @property
    def unprojected(self) -> Tensor:
        """The hidden state after each step, before ``weight_hr`` where there is one."""
        return self.hidden[1:]


class GateGrads(NamedTuple):
    """Gradients of the gate pre-activations, as the inputs and as the hidden state see them.

    They are ``x W_ihᵀ + b_ih`` and ``h W_hhᵀ + b_hh``. Where a cell simply adds the two (LSTM, RNN)
    both fields are the same tensor.
    """

    inputs: Tensor
    hidden: Tensor


class Cell(ABC):
    """One step of a recurrence, repeated over a block of steps.

    Memory is what limits a recurrence on long sequences, so cells reuse it: what they overwrite is
    stated, and nothing else changes.
    """

    gates: ClassVar[int]
    """How many there are."""

    adds_gates: ClassVar[bool] = True
    """Whether inputs and hidden state are simply added, so that their gate gradients are the same."""

    def projection_bias(self, weights: Weights) -> Tensor:
        """The bias the caller adds to the projected inputs, ``[directions, gates]``."""
        both = self.adds_gates  # they only ever appear as a sum
        return weights.input_bias + weights.hidden_bias if both else weights.input_bias

    @abstractmethod
    def forward(self, projected: Tensor, state: State, weights: Weights) -> CellTrace:
        """Run the steps of one block.

        Args:
            projected: ``x W_ihᵀ`` plus ``projection_bias`` for every step; overwritten.
            state: the state before the block.
            weights: the layer's weights.
        """

    @abstractmethod
    def backward(
        self, trace: CellTrace, hidden_grads: Sequence[Tensor], carry: State, weights: Weights
    ) -> GateGrads:
        """Run the steps of one block backwards.

        Args:
            trace: what ``forward`` left; overwritten, so that it serves once.
            hidden_grads: the gradients of ``trace.hidden``, one tensor for each of its steps,
                as far as they are known from outside; what flows back through the recurrence is
                added in place, also to the first, which belongs to the block before.
            carry: the gradients of the rest of the state after the block; replaced in place by
                those before it.
            weights: the layer's weights.
        """


@dataclass(frozen=True)
class ElmanCell(Cell):
    """``nn.RNN``: ``h' = f(x W_ihᵀ + b_ih + h W_hhᵀ + b_hh)`` with tanh or relu.

    Both derivatives follow from the output: ``1 - h²`` and ``[h > 0]``.
    """

    gates = 1

    relu: bool

    def forward(self, projected: Tensor, state: State, weights: Weights) -> CellTrace:
        """See ``Cell.forward``."""
        hidden = torch.cat([state[0].unsqueeze(0), projected])
        recurrent = weights.hidden.mT
        for before, after in pairwise(hidden):
            after.baddbmm_(before, recurrent)
            after.relu_() if self.relu else after.tanh_()
        return CellTrace(hidden)

    def backward(
        self, trace: CellTrace, hidden_grads: Sequence[Tensor], carry: State, weights: Weights
    ) -> GateGrads:
        """``dg = f' dh``, and ``dg W_hh`` flows to the step before."""
        after = trace.hidden[1:]
        grads = (after > 0).to(after.dtype) if self.relu else 1 - after.square()
        for step in reversed(range(len(grads))):
            grads[step].mul_(hidden_grads[step + 1])
            hidden_grads[step].baddbmm_(grads[step], weights.hidden)
        return GateGrads(grads, grads)


@dataclass(frozen=True)
class GruTrace(CellTrace):
    """What the backward pass needs, each for all steps of a block.

    Attributes:
        gates: ``r``, ``z`` and ``n``, ``[steps, directions, active, 3, features]``.
        recurrent_candidate: ``b_n``.
    """

    gates: Tensor
    recurrent_candidate: Tensor

    def slopes(self) -> Tensor:
        """What ``dh'`` is multiplied by to give ``(db_r, db_z, db_n, da_n)``."""
        r, z, n = self.gates.unbind(-2)
        candidate = (1 - z) * (1 - n.square())
        recurrent = candidate * r
        reset = recurrent * self.recurrent_candidate * (1 - r)
        update = (self.hidden[:-1] - n) * z * (1 - z)
        return torch.stack([reset, update, recurrent, candidate], dim=-2)


@dataclass(frozen=True)
class GruCell(Cell):
    """``nn.GRU``.

    With ``a = x W_ihᵀ + b_ih`` and ``b = h W_hhᵀ + b_hh``

        r = σ(a_r + b_r),   z = σ(a_z + b_z),   n = tanh(a_n + r b_n),   h' = n + z (h - n)

    every gradient of a pre-activation is ``dh'`` times a factor known after the forward pass:

        da_n = dh' (1-z)(1-n²),             db_n = da_n r
        da_r = db_r = da_n b_n r(1-r),      da_z = db_z = dh' (h-n) z(1-z)

    The inputs and the hidden state see different gradients in the last gate alone. As ``r``
    multiplies a part of ``b_hh``, the biases cannot be added beforehand.
    """

    gates = 3
    adds_gates = False

    def forward(self, projected: Tensor, state: State, weights: Weights) -> GruTrace:
        """See ``Cell.forward``."""
        gates = torch.unflatten(projected, -1, (3, -1))
        hidden = _room_after(state[0], gates)
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
        self, trace: CellTrace, hidden_grads: Sequence[Tensor], carry: State, weights: Weights
    ) -> GateGrads:
        """See the class."""
        assert isinstance(trace, GruTrace)
        grads = trace.slopes()
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


@dataclass(frozen=True)
class LstmTrace(CellTrace):
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

    def slopes(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the backward steps multiply by.

        Returns:
            ``(g i(1-i), c f(1-f), i(1-g²), tanh(c') o(1-o))``, which take the place of the gates;
            ``o (1 - tanh²c')``; and ``f``.
        """
        slopes = self.gates
        i, f, _, o = slopes.unbind(-2)
        forget = f.clone()
        cell_slope = torch.addcmul(o, self.output, self.cell_tanh, value=-1)
        candidate_slope = torch.addcmul(i, i * self.candidate, self.candidate, value=-1)
        slopes.addcmul_(slopes, slopes, value=-1)  # σ(1 - σ)
        slopes[..., 0, :].mul_(self.candidate)
        slopes[..., 1, :].mul_(self.cell[:-1])
        slopes[..., 2, :] = candidate_slope
        slopes[..., 3, :].mul_(self.cell_tanh)
        return slopes, cell_slope, forget


@dataclass(frozen=True)
class LstmCell(Cell):
    """``nn.LSTM``, with or without ``proj_size``.

    With the gates ``i, f, o = σ(·)`` and ``g = tanh(·)`` of the pre-activations

        c' = f c + i g,    u = o tanh(c'),    h' = u  (or u W_hrᵀ with proj_size)

    and with ``du`` the gradient of ``u``, the gradients of the pre-activations are

        dc' += du o (1 - tanh²c')
        (di, df, dg, do) = (dc' g i(1-i),  dc' c f(1-f),  dc' i(1-g²),  du tanh(c') o(1-o))
        dc   = dc' f
    """

    gates = 4

    def forward(self, projected: Tensor, state: State, weights: Weights) -> LstmTrace:
        """See ``Cell.forward``."""
        gates = torch.unflatten(projected, -1, (4, -1))
        hidden, cell = (_room_after(before, gates) for before in state)
        candidate, cell_tanh = torch.empty_like(cell[1:]), torch.empty_like(cell[1:])
        projection, recurrent = weights.projection, weights.hidden.mT
        output = hidden[1:] if projection is None else torch.empty_like(cell[1:])
        i, f, g, o = (gate.unbind() for gate in gates.unbind(-2))
        h, c, u = hidden.unbind(), cell.unbind(), output.unbind()
        g_tanh, c_tanh = candidate.unbind(), cell_tanh.unbind()
        for step, activations in enumerate(projected.unbind()):
            activations.baddbmm_(h[step], recurrent)
            torch.tanh(g[step], out=g_tanh[step])
            activations.sigmoid_()  # in place: the gates are views of it
            torch.mul(f[step], c[step], out=c[step + 1])
            c[step + 1].addcmul_(i[step], g_tanh[step])
            torch.tanh(c[step + 1], out=c_tanh[step])
            torch.mul(o[step], c_tanh[step], out=u[step])
            if projection is not None:
                torch.bmm(u[step], projection.mT, out=h[step + 1])
        return LstmTrace(hidden, gates, candidate, cell, cell_tanh, output)

    def backward(
        self, trace: CellTrace, hidden_grads: Sequence[Tensor], carry: State, weights: Weights
    ) -> GateGrads:
        """See the class."""
        assert isinstance(trace, LstmTrace)
        (cell_grad,) = carry
        grads, cell_slopes, forget = trace.slopes()
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


def _room_after(before: Tensor, gates: Tensor) -> Tensor:
    """A part of the state before the block, and room for it after each step."""
    room = gates.new_empty(len(gates) + 1, *before.shape)
    room[0] = before
    return room
