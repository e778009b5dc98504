"""What every recurrent cell answers, and the shapes they share.

Inside a recurrence all tensors of a block of steps have the shape ``[steps, directions, active,
features]``: a step is one contiguous slice, and both directions run in the same call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

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
class Trace:
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
        """The hidden state before ``weight_hr``; only an LSTM with ``proj_size`` has one."""
        raise NotImplementedError


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

    @abstractmethod
    def projection_bias(self, weights: Weights) -> Tensor:
        """The bias the caller adds to the projected inputs, ``[directions, gates]``."""

    @abstractmethod
    def forward(self, projected: Tensor, state: State, weights: Weights) -> Trace:
        """Run the steps of one block.

        Args:
            projected: ``x W_ihᵀ`` plus ``projection_bias`` for every step; overwritten.
            state: the state before the block.
            weights: the layer's weights.
        """

    @abstractmethod
    def backward(
        self, trace: Trace, hidden_grads: Sequence[Tensor], carry: State, weights: Weights
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
