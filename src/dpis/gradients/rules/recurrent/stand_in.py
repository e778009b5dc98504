"""What is watched in the backward pass of a layer, and the factors that follow.

A recurrent layer's output gradient does not tell the gradients of its weights; those of the gate
pre-activations do. So autograd is handed stand-ins, tensors that enter the layer as inputs:

- where a record's gradient is smaller than the positions it sums over, each record's own copy of the
  parameter, whose gradient is the record's gradient;
- otherwise an offset added to the pre-activations of every step of every record.

Their values are of no interest: they are zeros that take no memory.

A *block list* holds one tensor ``[steps, active, features]`` for every block, in the order of the
steps. What is made of it has one row for each place of the batch in front; a step at which a record
is no longer at work counts as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from dpis.gradients.aligned import cut
from dpis.gradients.factors import Dense, Factor, Outer
from dpis.gradients.layout import Layout
from dpis.gradients.rules.recurrent.call import Role
from dpis.gradients.rules.recurrent.layer import Layer, LayerGrads, LayerTrace
from dpis.gradients.rules.recurrent.steps import Timetable

# x W_ihᵀ + b_ih, or h W_hhᵀ + b_hh, or u W_hrᵀ.
FedInto = Literal["input gates", "hidden gates", "projection"]


class Form(Enum):
    """The three forms in which gradients leave the backward pass."""

    SUMMED = "[records, O], summed over the steps: a bias"
    CONTRACTED = "[records, O, I], summed outer products: a small weight"
    POSITIONS = "[records, steps, O], every step by itself: a large weight"


@dataclass(frozen=True)
class StandIn:
    """What a stand-in collects. Parameters that need the same gradients have equal ones.

    Attributes:
        form: the form of its gradient.
        direction: 0, or 1 for the backward direction.
        of: what the gradients are gradients of.
        role: the weight they are multiplied out for, if they are contracted.
        shape: the shape of its gradient for one record.
    """

    form: Form
    direction: int
    of: FedInto
    role: Role | None
    shape: tuple[int, ...]

    @staticmethod
    def for_parameter(role: Role, direction: int, layer: Layer, parameter: Tensor) -> StandIn:
        """The stand-in that tells the gradients of one parameter."""
        of: FedInto = "hidden gates"
        if role == "weight_hr":
            of = "projection"
        elif role in ("weight_ih", "bias_ih") or layer.cell.adds_gates:
            of = "input gates"
        shape, timetable = tuple(parameter.shape), layer.timetable
        if parameter.dim() == 1:
            return StandIn(Form.SUMMED, direction, of, None, shape)
        if is_contracted(timetable, parameter):
            return StandIn(Form.CONTRACTED, direction, of, role, shape)
        return StandIn(Form.POSITIONS, direction, of, None, (timetable.steps, shape[0]))

    def tensor(self, layer: Layer) -> Tensor:
        """The tensor autograd is handed."""
        zero = layer.weights.inputs.new_zeros(())
        return zero.expand(layer.timetable.records, *self.shape).requires_grad_()

    def gradient(self, trace: LayerTrace, grads: LayerGrads) -> Tensor:
        """The gradient of that tensor, one row for each place of the batch."""
        timetable = trace.layer.timetable
        gates = 1 if self.of == "projection" else trace.layer.cell.gates
        found = {
            "projection": grads.hidden,
            "input gates": [block.inputs for block in grads.gates],
            "hidden gates": [block.hidden for block in grads.gates],
        }
        blocks = [block[:, self.direction] for block in found[self.of]]
        if self.form is Form.SUMMED:
            return cut(_summed(timetable, blocks), 1, self.shape[0], gates)
        if self.form is Form.POSITIONS:
            return cut(_positions(timetable, blocks), 2, self.shape[1], gates)
        assert self.role is not None
        contracted = _contracted(blocks, self.inputs(self.role, trace))
        return cut(cut(contracted, 2, self.shape[1]), 1, self.shape[0], gates)

    def inputs(self, role: Role, trace: LayerTrace) -> list[Tensor]:
        """What the weight of this role is multiplied with, block by block."""
        if role == "weight_ih":
            blocks = trace.inputs
        elif role == "weight_hh":
            blocks = [block.hidden[:-1] for block in trace.traces]
        else:
            blocks = [block.unprojected for block in trace.traces]
        return [block[:, self.direction] for block in blocks]


@dataclass(frozen=True)
class WatchedParameter:
    """A parameter, and the stand-in whose gradient tells its own.

    Attributes:
        parameter: the parameter as the caller gave it.
        stand_in: what to watch.
        timetable: which records are at work at each step.
        inputs: for a weight watched by positions, what it is multiplied with, block by block.
    """

    parameter: Tensor
    stand_in: Tensor
    timetable: Timetable
    inputs: list[Tensor] | None

    def factor(self, grad: Tensor, layout: Layout, place_of_record: Tensor | None) -> Factor:
        """The factor that follows from the gradient of the stand-in.

        Args:
            grad: that gradient, one row for each place of the batch.
            layout: which of its rows belong to one record.
            place_of_record: where each record stands in the batch, if the batch was sorted.
        """

        def by_record(places: Tensor) -> Tensor:
            ordered = places if place_of_record is None else places[place_of_record]
            return layout.rows_first(ordered)

        if self.inputs is None:
            return Dense(by_record(grad))
        inputs = _positions(self.timetable, self.inputs)
        return Outer(by_record(cut(inputs, 2, self.parameter.shape[1])), by_record(grad))


def is_contracted(timetable: Timetable, weight: Tensor) -> bool:
    """Whether a record's gradient of ``weight`` is smaller than the positions it is a sum over.

    It is then also the cheaper way to its norm: ``steps·I·O`` products against ``steps²·(I + O)`` for
    the Gram matrices. For a packed batch it is the only way: the steps of its longest record
    change with the batch, and nothing but the number of records may change the shape of what is watched.
    """
    return timetable.packed or weight.numel() <= timetable.steps * sum(weight.shape)


def _contracted(grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """``Σ_t grads_t ⊗ inputs_t`` for every record, ``[records, O, I]``."""
    pairs = zip(grads, inputs, strict=True)
    products = ((left.permute(1, 2, 0), right.permute(1, 0, 2)) for left, right in pairs)
    total = torch.bmm(*next(products))  # at the first step every record is at work
    for left, right in products:
        total[: len(left)].baddbmm_(left, right)
    return total


def _summed(timetable: Timetable, grads: Sequence[Tensor]) -> Tensor:
    """``Σ_t grads_t`` for every record, ``[records, O]``."""
    total = grads[0].new_zeros(timetable.records, grads[0].shape[-1])
    for block in grads:
        total[: block.shape[1]] += block.sum(0)
    return total


def _positions(timetable: Timetable, blocks: Sequence[Tensor]) -> Tensor:
    """Every step of every record, ``[records, steps, features]``."""
    result = blocks[0].new_zeros(timetable.records, timetable.steps, blocks[0].shape[-1])
    first = 0
    for block in blocks:
        steps, active, _ = block.shape
        result[:active, first : first + steps] = block.transpose(0, 1)
        first += steps
    return result
