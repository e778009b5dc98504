"""Runs the layers of a recurrence one after the other, each watching what its parameters need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dpis.errors import GradientError
from dpis.gradients.aligned import cut, filled_up
from dpis.gradients.rules.recurrent.call import DirectionWeights, Recurrence
from dpis.gradients.rules.recurrent.cells import Cell, State, Weights
from dpis.gradients.rules.recurrent.layer import Layer, LayerTrace
from dpis.gradients.rules.recurrent.stand_in import Form, StandIn, WatchedParameter


@dataclass(frozen=True)
class LayerRun:
    """What running one layer, or several, gave.

    Attributes:
        outputs: the sequence of hidden states.
        final: the state of every record after its last step.
        watched: the parameters whose gradients are asked for.
        bytes_inside: what is kept for the backward pass.
    """

    outputs: Tensor
    final: State
    watched: list[WatchedParameter]
    bytes_inside: int


def run_stack(cell: Cell, recurrence: Recurrence, wants: Callable[[Tensor], bool]) -> LayerRun:
    """Run every layer, in single precision or better.

    Args:
        cell: the cell all layers share.
        recurrence: inputs, first state and weights.
        wants: whether a parameter's gradients are asked for.
    """
    sequence = _precise(recurrence.sequence())
    runs: list[LayerRun] = []
    for index, weights in enumerate(recurrence.layers):
        if index:
            sequence = functional.dropout(sequence, recurrence.dropout, recurrence.training)
        layer = Layer(cell, _stack_directions(weights, cell.gates), recurrence.timetable)
        own = slice(index * len(weights), (index + 1) * len(weights))
        state = tuple(_precise(part[own]) for part in recurrence.state)
        runs.append(_run_layer(layer, weights, sequence, state, wants))
        sequence = runs[-1].outputs
    finals = zip(*(run.final for run in runs), strict=True)
    return LayerRun(
        outputs=sequence,
        final=tuple(torch.cat(parts) for parts in finals),
        watched=[watched for run in runs for watched in run.watched],
        bytes_inside=sum(run.bytes_inside for run in runs),
    )


def _run_layer(
    layer: Layer,
    weights: list[DirectionWeights],
    sequence: Tensor,
    state: State,
    wants: Callable[[Tensor], bool],
) -> LayerRun:
    asked = [
        (role, parameter, StandIn.for_parameter(role, direction, layer, parameter))
        for direction, own_weights in enumerate(weights)
        for role, parameter in own_weights.items()
        if wants(parameter)
    ]
    stand_ins = tuple(stand_in for *_, stand_in in asked)
    tensors = [stand_in.tensor(layer) for stand_in in stand_ins]
    wide = filled_up(sequence, -1), *(filled_up(part, -1) for part in state)
    with torch.no_grad():
        trace, outputs, final = layer.forward(wide[0], wide[1:])
    computed = outputs, *final
    outputs, *final = _Link.apply(trace, computed, stand_ins, *wide, *tensors)  # type: ignore[no-untyped-call]
    watched = []
    for (role, parameter, stand_in), tensor in zip(asked, tensors, strict=True):
        inputs = stand_in.inputs(role, trace) if stand_in.form is Form.POSITIONS else None
        watched.append(WatchedParameter(parameter, tensor, layer.timetable, inputs))
    hidden_features = state[0].shape[-1] * layer.directions
    return LayerRun(
        outputs=cut(outputs, -1, hidden_features, parts=layer.directions),
        final=tuple(cut(p, -1, given.shape[-1]) for p, given in zip(final, state, strict=True)),
        watched=watched,
        bytes_inside=trace.bytes,
    )


class _Link(torch.autograd.Function):
    """A layer that has run enters autograd's graph: gradients flow to its sequence, its state and the stand-ins.

    The forward pass hands on what was computed; the backward pass is that of the layer's trace.
    """

    @staticmethod
    def forward(
        ctx: Any,
        trace: LayerTrace,
        outputs: tuple[Tensor, ...],
        stand_ins: tuple[StandIn, ...],
        *_: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.trace, ctx.stand_ins = trace, stand_ins
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Tensor | None, ...]:
        trace: LayerTrace | None = ctx.trace
        if trace is None:
            raise GradientError(
                "A recurrence can run backwards only once for each forward pass, and was asked to run again: what the "
                "first pass overwrote would give wrong gradients, clipped too little. Run the model once more."
            )
        ctx.trace = None  # backward overwrites it
        sequence_grad, *final_grads = output_grads
        unseen = torch._C.DisableTorchFunction()  # a watch that looks at every step takes time
        with unseen, torch.autocast(sequence_grad.device.type, enabled=False):
            grads = trace.backward(sequence_grad, tuple(final_grads), ctx.needs_input_grad[3])
            found = {stand_in: stand_in.gradient(trace, grads) for stand_in in set(ctx.stand_ins)}
        told = [found[stand_in] for stand_in in ctx.stand_ins]
        return None, None, None, grads.inputs, *grads.state, *told


def _stack_directions(directions: list[DirectionWeights], gates: int) -> Weights:
    """The weights of all directions side by side, filled up (see aligned.py); a missing bias is zero.

    Gates stand side by side in one dimension, and each is filled up by itself. A feature that is not
    there has zeros for weights: its gates, its state and its gradients stay zero at every step.
    """
    stacked = {
        role: torch.stack([_precise(weights[role].detach()) for weights in directions])
        for role in directions[0]
    }
    zero = stacked["weight_ih"].new_zeros(stacked["weight_ih"].shape[:2])

    def filled(weight: Tensor, *dims: int) -> Tensor:
        return filled_up(torch.unflatten(weight, 1, (gates, -1)), *dims).flatten(1, 2)

    projection = stacked.get("weight_hr")
    return Weights(
        inputs=filled(stacked["weight_ih"], -1, -2),
        hidden=filled(stacked["weight_hh"], -1, -2),
        input_bias=filled(stacked.get("bias_ih", zero), -1),
        hidden_bias=filled(stacked.get("bias_hh", zero), -1),
        projection=None if projection is None else filled_up(projection, -1, -2),
    )


def _precise(tensor: Tensor) -> Tensor:
    """The tensor in single precision, unless it is in double: half precision is lost step by step."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
