"""What is watched in the backward pass of a layer, and the factors that follow.

A recurrent layer's output gradient does not tell the gradients of its weights; those of the gate
pre-activations do. So autograd is handed stand-ins, tensors that enter the layer as inputs:

- where a record's gradient is smaller than the positions it sums over, each record's own copy of the
  parameter, whose gradient is the record's gradient;
- otherwise an offset added to the pre-activations of every step of every record.

Their values are of no interest: they are zeros that take no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from torch import Tensor

from dpis.gradients.factors.dense import Dense
from dpis.gradients.factors.factor import Factor
from dpis.gradients.factors.outer import Outer
from dpis.gradients.layout import Layout
from dpis.gradients.rules.recurrent import collect
from dpis.gradients.rules.recurrent.call import Role
from dpis.gradients.rules.recurrent.layer import Layer, LayerGrads, LayerTrace
from dpis.gradients.rules.recurrent.padding import cut
from dpis.gradients.rules.recurrent.steps import Timetable

# What a gradient is a gradient of: x W_ihᵀ + b_ih, or h W_hhᵀ + b_hh, or u W_hrᵀ.
GradientOf = Literal["input gates", "hidden gates", "projection"]


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
        source: which gradients it collects.
        role: the weight they are multiplied out for, if they are contracted.
        shape: the shape of its gradient for one record.
    """

    form: Form
    direction: int
    source: GradientOf
    role: Role | None
    shape: tuple[int, ...]

    def tensor(self, layer: Layer) -> Tensor:
        """The tensor autograd is handed."""
        zero = layer.weights.inputs.new_zeros(())
        return zero.expand(layer.timetable.records, *self.shape).requires_grad_()

    def gradient(self, trace: LayerTrace, grads: LayerGrads) -> Tensor:
        """The gradient of that tensor, one row for each place of the batch."""
        timetable = trace.layer.timetable
        gates = 1 if self.source == "projection" else trace.layer.cell.gates
        blocks = [block[:, self.direction] for block in _grads(self.source, grads)]
        if self.form is Form.SUMMED:
            return cut(collect.summed(timetable, blocks), 1, self.shape[0], gates)
        if self.form is Form.POSITIONS:
            return cut(collect.positions(timetable, blocks), 2, self.shape[1], gates)
        assert self.role is not None
        contracted = collect.contracted(blocks, self.inputs(self.role, trace))
        return cut(cut(contracted, 2, self.shape[1]), 1, self.shape[0], gates)

    def inputs(self, role: Role, trace: LayerTrace) -> list[Tensor]:
        """What the weight of this role is multiplied with, block by block."""
        return [block[:, self.direction] for block in _inputs(role, trace)]


def stand_in_for(role: Role, direction: int, layer: Layer, parameter: Tensor) -> StandIn:
    """The stand-in that tells the gradients of one parameter."""
    source = _source(role, layer)
    if parameter.dim() == 1:
        return StandIn(Form.SUMMED, direction, source, None, tuple(parameter.shape))
    if collect.is_contracted(layer.timetable, parameter):
        return StandIn(Form.CONTRACTED, direction, source, role, tuple(parameter.shape))
    shape = (layer.timetable.steps, parameter.shape[0])
    return StandIn(Form.POSITIONS, direction, source, None, shape)


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
        inputs = collect.positions(self.timetable, self.inputs)
        return Outer(by_record(cut(inputs, 2, self.parameter.shape[1])), by_record(grad))


def _source(role: Role, layer: Layer) -> GradientOf:
    if role == "weight_hr":
        return "projection"
    if role in ("weight_ih", "bias_ih") or layer.cell.adds_gates:
        return "input gates"
    return "hidden gates"


def _grads(source: GradientOf, grads: LayerGrads) -> list[Tensor]:
    if source == "projection":
        return grads.hidden
    if source == "input gates":
        return [gates.inputs for gates in grads.gates]
    return [gates.hidden for gates in grads.gates]


def _inputs(role: Role, trace: LayerTrace) -> list[Tensor]:
    if role == "weight_ih":
        return trace.inputs
    if role == "weight_hh":
        return [block.hidden[:-1] for block in trace.traces]
    return [block.unprojected for block in trace.traces]
