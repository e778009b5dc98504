"""Recurrence: ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpis.gradients.rules.recurrent.call import Recurrence, read_cell, read_sequence
from dpis.gradients.rules.recurrent.cells import Cell, ElmanCell, GruCell, LstmCell
from dpis.gradients.rules.recurrent.stack import run_stack
from dpis.gradients.rules.recurrent.stand_in import WatchedParameter
from dpis.gradients.rules.rule import Call, Factors, Ran, Rule, RuleTable, Watched

# The parameters, and where each record stands in a packed batch that was sorted.
Saved = tuple[list[WatchedParameter], Tensor | None]


@dataclass(frozen=True)
class RecurrentRule(Rule):
    """Runs a recurrence by our own kernels, which know the gradients of the gates.

    Attributes:
        cell: what every step does.
        read: what a call is about.
    """

    reads_parameters = False  # its kernels keep copies

    cell: Cell
    read: Callable[[Call], Recurrence]

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
        result = recurrence.result(run.outputs, run.final)
        place_of_record = None if call.record_order is None else call.record_order.argsort()
        stand_ins = tuple(watched.stand_in for watched in run.watched)
        saved: Saved = run.watched, place_of_record
        packed = recurrence.timetable.packed
        return Ran(result, stand_ins, saved, bytes_inside=run.bytes_inside, batch_shaped=packed)

    def factors(self, saved: Saved, watched: Watched) -> Factors:
        """``Dense`` or ``Outer``, whichever the stand-in was chosen for."""
        parameters, place_of_record = saved
        for own, (grad, layout) in zip(parameters, watched, strict=True):
            yield own.parameter, own.factor(grad, layout, place_of_record)


RULES: RuleTable = {
    torch.lstm: RecurrentRule(LstmCell(), read_sequence),
    torch.gru: RecurrentRule(GruCell(), read_sequence),
    torch.rnn_tanh: RecurrentRule(ElmanCell(relu=False), read_sequence),
    torch.rnn_relu: RecurrentRule(ElmanCell(relu=True), read_sequence),
    torch.lstm_cell: RecurrentRule(LstmCell(), read_cell),
    torch.gru_cell: RecurrentRule(GruCell(), read_cell),
    torch.rnn_tanh_cell: RecurrentRule(ElmanCell(relu=False), read_cell),
    torch.rnn_relu_cell: RecurrentRule(ElmanCell(relu=True), read_cell),
}
