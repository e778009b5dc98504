"""The rules of the recurrent functions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpis.gradients.layout import Layout
from dpis.gradients.rules.base import Call, ParameterFactor, Ran, Rule
from dpis.gradients.rules.recurrent.call import Recurrence, read_cell, read_sequence
from dpis.gradients.rules.recurrent.cell import Cell, State
from dpis.gradients.rules.recurrent.stack import run_stack
from dpis.gradients.rules.recurrent.stand_in import WatchedParameter


@dataclass(frozen=True)
class Saved:
    """What the factors are made from once the gradients of the stand-ins are known."""

    watched: list[WatchedParameter]
    place_of_record: Tensor | None


@dataclass(frozen=True)
class RecurrentRule(Rule):
    """Runs a recurrence by our own kernels, which know the gradients of the gates."""

    cell: Cell

    @abstractmethod
    def read(self, call: Call) -> Recurrence:
        """What the call is about."""

    @abstractmethod
    def result(self, outputs: Tensor, final: State) -> Any:
        """What the called function would have returned."""

    def accepts(self, call: Call) -> bool:
        """Every call with a step whose parameters are its weights, not its inputs or its state."""
        recurrence = self.read(call)
        directions = (direction for layer in recurrence.layers for direction in layer)
        weights = {id(weight) for direction in directions for weight in direction.values()}
        only_weights = all(id(parameter) in weights for parameter in call.parameters)
        return only_weights and recurrence.timetable.steps > 0

    def run(self, call: Call) -> Ran:
        """Run all layers. Nothing is held: the kernels keep copies of what the factors need."""
        recurrence = self.read(call)
        with torch.autocast(recurrence.inputs.device.type, enabled=False):
            run = run_stack(self.cell, recurrence, call.wants)
        final = tuple(part.to(recurrence.inputs.dtype) for part in run.final)
        result = self.result(recurrence.like_inputs(run.outputs), final)
        place_of_record = None if call.record_order is None else call.record_order.argsort()
        stand_ins = tuple(watched.stand_in for watched in run.watched)
        saved = Saved(run.watched, place_of_record)
        packed = recurrence.timetable.packed
        return Ran(result, stand_ins, saved, bytes_inside=run.bytes_inside, batch_shaped=packed)

    def factors(
        self, saved: Saved, grads: Sequence[Tensor], layouts: Sequence[Layout]
    ) -> Iterator[ParameterFactor]:
        """``Dense`` or ``Outer``, whichever the stand-in was chosen for."""
        for watched, grad, layout in zip(saved.watched, grads, layouts, strict=True):
            yield watched.parameter, watched.factor(grad, layout, saved.place_of_record)


@dataclass(frozen=True)
class SequenceRule(RecurrentRule):
    """``torch.lstm``, ``gru``, ``rnn_tanh``, ``rnn_relu``, padded or packed."""

    def read(self, call: Call) -> Recurrence:
        """See ``RecurrentRule.read``."""
        return read_sequence(call)

    def result(self, outputs: Tensor, final: State) -> tuple[Tensor, ...]:
        """The hidden states of the last layer, then the final state of all layers."""
        return outputs, *final


@dataclass(frozen=True)
class CellRule(RecurrentRule):
    """``torch.lstm_cell``, ``gru_cell``, ``rnn_tanh_cell``, ``rnn_relu_cell``: a single step."""

    def read(self, call: Call) -> Recurrence:
        """See ``RecurrentRule.read``."""
        return read_cell(call)

    def result(self, outputs: Tensor, final: State) -> Tensor | tuple[Tensor, ...]:
        """The hidden state, and for an LSTM the cell."""
        state = tuple(part.squeeze(0) for part in final)
        return state if len(state) > 1 else state[0]
