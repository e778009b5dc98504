"""Reads the calls that ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from dpis.gradients.rules.recurrent.cells import State
from dpis.gradients.rules.recurrent.steps import Timetable
from dpis.gradients.rules.rule import Call

# The arguments of the functions, in torch's order; the last of them may be missing.
_OPTIONS = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
_PADDED = ("input", "hx", *_OPTIONS, "batch_first")
_PACKED = ("data", "batch_sizes", "hx", *_OPTIONS)
_CELL = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")

Role = Literal["weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr"]
# The weights of one direction of one layer, by the order in which torch lists them.
DirectionWeights = dict[Role, Tensor]


@dataclass(frozen=True)
class Recurrence:
    """What a recurrent call is about, whichever function was called.

    Attributes:
        inputs: the inputs as given.
        steps_dim: the dimension of ``inputs`` that counts steps; None if they are packed.
        timetable: which records are at work at each step.
        state: the first state, each part ``[layers * directions, records, features]``.
        layers: the weights, layer by layer and direction by direction.
        one_step: whether a cell was called, not a sequence.
        dropout: the probability with which an entry between two layers is dropped.
        training: whether entries are dropped.
    """

    inputs: Tensor
    steps_dim: int | None
    timetable: Timetable
    state: State
    layers: list[list[DirectionWeights]]
    one_step: bool = False
    dropout: float = 0.0
    training: bool = False

    def sequence(self) -> Tensor:
        """The inputs as a sequence, steps in front."""
        return self.inputs if self.steps_dim is None else self.inputs.movedim(self.steps_dim, 0)

    def result(self, outputs: Tensor, final: State) -> Tensor | tuple[Tensor, ...]:
        """What the called function would have returned, in the layout and precision of the inputs.

        Args:
            outputs: the hidden states of the last layer, as a sequence.
            final: the final state of all layers.
        """
        state = tuple(part.to(self.inputs.dtype) for part in final)
        if self.one_step:
            state = tuple(part.squeeze(0) for part in state)
            return state if len(state) > 1 else state[0]
        given = outputs.to(self.inputs.dtype)
        return given if self.steps_dim is None else given.movedim(0, self.steps_dim), *state


def read_sequence(call: Call) -> Recurrence:
    """Read a call of ``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``."""
    packed = "batch_sizes" in call.kwargs or not isinstance(call.argument(3, "has_biases"), bool)
    given = _arguments(call, _PACKED if packed else _PADDED)
    inputs = given["data" if packed else "input"]
    if packed:
        steps_dim, timetable = None, Timetable(tuple(given["batch_sizes"].tolist()), packed=True)
    else:
        steps_dim = int(given["batch_first"])
        timetable = Timetable((inputs.shape[1 - steps_dim],) * inputs.shape[steps_dim])
    directions = 2 if given["bidirectional"] else 1
    weights = _by_direction(given["params"], given["has_biases"], given["num_layers"] * directions)
    return Recurrence(
        inputs=inputs,
        steps_dim=steps_dim,
        timetable=timetable,
        state=_state(given["hx"]),
        layers=[weights[i : i + directions] for i in range(0, len(weights), directions)],
        dropout=given["dropout"],
        training=given["train"],
    )


def read_cell(call: Call) -> Recurrence:
    """Read a call of ``torch.lstm_cell``, ``gru_cell``, ``rnn_tanh_cell`` or ``rnn_relu_cell``."""
    given = _arguments(call, _CELL)
    weights: DirectionWeights = {"weight_ih": given["w_ih"], "weight_hh": given["w_hh"]}
    if given.get("b_ih") is not None:
        weights |= {"bias_ih": given["b_ih"], "bias_hh": given["b_hh"]}
    return Recurrence(
        inputs=given["input"].unsqueeze(0),
        steps_dim=0,
        timetable=Timetable((given["input"].shape[0],)),
        state=tuple(part.unsqueeze(0) for part in _state(given["hx"])),
        layers=[[weights]],
        one_step=True,
    )


def _arguments(call: Call, names: Sequence[str]) -> dict[str, Any]:
    return dict(zip(names, call.args, strict=False)) | call.kwargs


def _state(given: Tensor | tuple[Tensor, ...]) -> State:
    return (given,) if isinstance(given, Tensor) else tuple(given)


def _by_direction(
    params: list[Tensor], has_biases: bool, directions: int
) -> list[DirectionWeights]:
    """Cut torch's flat list of weights: each direction of each layer has equally many."""
    roles: list[Role] = ["weight_ih", "weight_hh"]
    if has_biases:
        roles += ["bias_ih", "bias_hh"]
    each = len(params) // directions
    if each > len(roles):
        roles.append("weight_hr")
    starts = range(0, len(params), each)
    return [dict(zip(roles, params[i : i + each], strict=True)) for i in starts]
