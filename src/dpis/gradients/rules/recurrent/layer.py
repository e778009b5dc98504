"""One recurrent layer, all its directions at once: forward, backward, no weight gradients.

The steps are run in blocks whose tensors fit the processor's cache. Within a block everything that
is not recurrent (projecting the inputs, the slopes of the gates, the gradients of the inputs)
is done for all its steps together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dpis.gradients.rules.recurrent.cells import Cell, CellTrace, GateGrads, State, Weights
from dpis.gradients.rules.recurrent.steps import Block, Timetable

# Blocks of 2 to 4 MB were the fastest of those tried (from one step to the whole sequence).
BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class Layer:
    """A cell with its weights and the records it works on."""

    cell: Cell
    weights: Weights
    timetable: Timetable

    @property
    def directions(self) -> int:
        """1, or 2 for a bidirectional layer."""
        return self.weights.inputs.shape[0]

    @cached_property
    def blocks(self) -> list[Block]:
        """The steps, cut so that neither gates nor repeated weights outgrow the cache."""
        gates = self.weights.inputs.shape[:2].numel() * self.timetable.records
        largest = max(1, gates, self.weights.inputs.numel()) * self.weights.inputs.element_size()
        return list(self.timetable.blocks(most_steps=max(1, BLOCK_BYTES // largest)))

    def forward(self, sequence: Tensor, state: State) -> tuple[LayerTrace, Tensor, State]:
        """Run over a sequence (see ``Timetable``) from ``state``.

        Returns:
            What the backward pass needs; the sequence of hidden states, the directions side by side;
            and the state of every record after its last step.
        """
        inputs = self.split_directions([sequence] * self.directions)
        most_steps = max(block.steps for block in self.blocks)
        projection = self.weights.inputs.mT.repeat(most_steps, 1, 1)
        bias = self.cell.projection_bias(self.weights).unsqueeze(1).repeat(most_steps, 1, 1)
        final = tuple(part.clone() for part in state)
        traces = []
        for block, block_inputs in zip(self.blocks, inputs, strict=True):
            flat = block_inputs.flatten(0, 1)
            projected = torch.baddbmm(bias[: len(flat)], flat, projection[: len(flat)])
            projected = torch.unflatten(projected, 0, (block.steps, self.directions))
            trace = self.cell.forward(projected, _first(final, block.active), self.weights)
            for part, after in zip(final, trace.final, strict=True):
                part[:, : block.active] = after
            traces.append(trace)
        outputs = self.join_directions([trace.hidden[1:] for trace in traces])
        return LayerTrace(self, inputs, traces), outputs.flatten(-2), final

    def split_directions(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """One sequence a direction, in the order that direction meets it, by block."""
        take, both = self.timetable.take, list(enumerate(sequences))
        return [
            torch.stack([take(values, block, direction == 1) for direction, values in both], dim=1)
            for block in self.blocks
        ]

    def join_directions(self, blocks: list[Tensor]) -> Tensor:
        """The inverse of ``split_directions``, a sequence of ``[directions, features]``."""
        shape = (*self.timetable.shape, self.directions, blocks[0].shape[-1])
        joined = blocks[0].new_empty(shape)
        for block, values in zip(self.blocks, blocks, strict=True):
            for direction, sequence in enumerate(joined.unbind(-2)):
                self.timetable.put(sequence, block, direction == 1, values[:, direction])
        return joined


@dataclass(frozen=True)
class LayerGrads:
    """What a backward pass over one layer gives.

    Attributes:
        gates: the gradients of the gate pre-activations, block by block.
        hidden: the gradients of the hidden states, block by block.
        inputs: the gradients of the sequence the layer was given, if they were asked for.
        state: the gradients of the state before the first step.
    """

    gates: list[GateGrads]
    hidden: list[Tensor]
    inputs: Tensor | None
    state: State


@dataclass(frozen=True)
class LayerTrace:
    """What a forward pass over one layer leaves for the backward pass.

    Attributes:
        layer: the layer.
        inputs: the inputs of every block, ``[steps, directions, active, features]``.
        traces: what the cell left, block by block.
    """

    layer: Layer
    inputs: list[Tensor]
    traces: list[CellTrace]

    @property
    def bytes(self) -> int:
        """What these tensors take."""
        kept = [*self.inputs, *(tensor for trace in self.traces for tensor in vars(trace).values())]
        memory = {tensor.untyped_storage().data_ptr(): tensor for tensor in kept}
        return sum(tensor.untyped_storage().nbytes() for tensor in memory.values())

    def backward(self, output_grads: Tensor, final_grads: State, with_inputs: bool) -> LayerGrads:
        """Run the layer backwards. The trace is overwritten, so that it serves once.

        Args:
            output_grads: the gradients of the sequence of hidden states.
            final_grads: the gradients of the final state.
            with_inputs: whether the gradients of the inputs are asked for.
        """
        layer, blocks = self.layer, self.layer.blocks
        hidden = layer.split_directions(output_grads.chunk(layer.directions, dim=-1))
        still_active = [block.active for block in blocks[1:]] + [0]
        for grads, block, stay in zip(hidden, blocks, still_active, strict=True):
            grads[-1][:, stay:] += final_grads[0][:, stay : block.active]  # where records end
        first_hidden = torch.zeros_like(final_grads[0])
        rest = tuple(part.clone() for part in final_grads[1:])
        gates: list[GateGrads] = []
        for index in reversed(range(len(blocks))):
            active = blocks[index].active
            before = hidden[index - 1][-1] if index else first_hidden
            known = [before[:, :active], *hidden[index]]
            carry = _first(rest, active)
            gates.append(layer.cell.backward(self.traces[index], known, carry, layer.weights))
        gates.reverse()
        inputs = self._input_grads([block.inputs for block in gates]) if with_inputs else None
        return LayerGrads(gates, hidden, inputs, (first_hidden, *rest))

    def _input_grads(self, gates: list[Tensor]) -> Tensor:
        """``dx = dg W_ih`` at every step, summed over the directions."""
        layer = self.layer
        weight = layer.weights.inputs.repeat(max(len(block) for block in gates), 1, 1)
        flat = [block.flatten(0, 1) for block in gates]
        grads = [
            torch.unflatten(torch.bmm(grad, weight[: len(grad)]), 0, (-1, layer.directions))
            for grad in flat
        ]
        by_direction = layer.join_directions(grads).unbind(-2)
        return by_direction[0] if layer.directions == 1 else by_direction[0] + by_direction[1]


def _first(state: State, active: int) -> State:
    """The part of a state that belongs to the first ``active`` records (views)."""
    return tuple(part[:, :active] for part in state)
