"""Recurrence: ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells."""

from __future__ import annotations

import torch

from dpis.gradients.rules.base import RuleTable
from dpis.gradients.rules.recurrent.elman import ElmanCell
from dpis.gradients.rules.recurrent.gru import GruCell
from dpis.gradients.rules.recurrent.lstm import LstmCell
from dpis.gradients.rules.recurrent.rule import CellRule, SequenceRule

RULES: RuleTable = {
    torch.lstm: SequenceRule(LstmCell()),
    torch.gru: SequenceRule(GruCell()),
    torch.rnn_tanh: SequenceRule(ElmanCell(relu=False)),
    torch.rnn_relu: SequenceRule(ElmanCell(relu=True)),
    torch.lstm_cell: CellRule(LstmCell()),
    torch.gru_cell: CellRule(GruCell()),
    torch.rnn_tanh_cell: CellRule(ElmanCell(relu=False)),
    torch.rnn_relu_cell: CellRule(ElmanCell(relu=True)),
}
