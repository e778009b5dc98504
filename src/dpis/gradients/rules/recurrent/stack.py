"""Runs the layers of a recurrence one after the other, each watching what its parameters need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from dpis.gradients.aligned import filled_up
from dpis.gradients.rules.recurrent.call import DirectionWeights, Recurrence
from dpis.gradients.rules.recurrent.cell import Cell, State, Weights
from dpis.gradients.rules.recurrent.layer import Layer
from dpis.gradients.rules.recurrent.link import run_linked
from dpis.gradients.rules.recurrent.padding import cut, filled_gates
from dpis.gradients.rules.recurrent.stand_in import Form, WatchedParameter, stand_in_for


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
            sequence = F.dropout(sequence, recurrence.dropout, recurrence.training)
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
        (role, parameter, stand_in_for(role, direction, layer, parameter))
        for direction, own_weights in enumerate(weights)
        for role, parameter in own_weights.items()
        if wants(parameter)
    ]
    stand_ins = [(stand_in, stand_in.tensor(layer)) for _, _, stand_in in asked]
    wide_state = tuple(filled_up(part, -1) for part in state)
    trace, outputs, final = run_linked(layer, filled_up(sequence, -1), wide_state, stand_ins)
    watched = [
        WatchedParameter(
            parameter,
            tensor,
            layer.timetable,
            inputs=stand_in.inputs(role, trace) if stand_in.form is Form.POSITIONS else None,
        )
        for (role, parameter, stand_in), (_, tensor) in zip(asked, stand_ins, strict=True)
    ]
    hidden_features = state[0].shape[-1] * layer.directions
    return LayerRun(
        outputs=cut(outputs, -1, hidden_features, parts=layer.directions),
        final=tuple(cut(p, -1, given.shape[-1]) for p, given in zip(final, state, strict=True)),
        watched=watched,
        bytes_inside=trace.bytes,
    )


def _stack_directions(directions: list[DirectionWeights], gates: int) -> Weights:
    """The weights of all directions side by side, filled up; a missing bias is zero."""
    stacked = {
        role: torch.stack([_precise(weights[role].detach()) for weights in directions])
        for role in directions[0]
    }
    zero = stacked["weight_ih"].new_zeros(stacked["weight_ih"].shape[:2])
    projection = stacked.get("weight_hr")
    return Weights(
        inputs=filled_gates(stacked["weight_ih"], gates, inputs=True),
        hidden=filled_gates(stacked["weight_hh"], gates, inputs=True),
        input_bias=filled_gates(stacked.get("bias_ih", zero), gates, inputs=False),
        hidden_bias=filled_gates(stacked.get("bias_hh", zero), gates, inputs=False),
        projection=None if projection is None else filled_up(projection, -1, -2),
    )


def _precise(tensor: Tensor) -> Tensor:
    """The tensor in single precision, unless it is in double: half precision is lost step by step."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
