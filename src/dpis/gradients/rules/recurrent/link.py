"""Enters a recurrent layer that has run into autograd's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpis.gradients.rules.recurrent import layer as kernels
from dpis.gradients.rules.recurrent.cell import State
from dpis.gradients.rules.recurrent.layer import Layer
from dpis.gradients.rules.recurrent.stand_in import StandIn


def run_linked(
    layer: Layer, sequence: Tensor, state: State, stand_ins: Sequence[tuple[StandIn, Tensor]]
) -> tuple[kernels.LayerTrace, Tensor, State]:
    """``layer.forward``, with gradients that flow to ``sequence``, ``state`` and the stand-ins."""
    with torch.no_grad():
        trace, outputs, final = kernels.forward(layer, sequence, state)
    collected = tuple(stand_in for stand_in, _ in stand_ins)
    tensors = tuple(tensor for _, tensor in stand_ins)
    outputs, *linked_final = _Link.apply(  # type: ignore[no-untyped-call]
        trace, (outputs, *final), collected, sequence, *state, *tensors
    )
    return trace, outputs, tuple(linked_final)


class _Link(torch.autograd.Function):
    """Its forward pass hands on what was computed; its backward pass is ``layer.backward``."""

    @staticmethod
    def forward(
        ctx: Any,
        trace: kernels.LayerTrace,
        outputs: tuple[Tensor, ...],
        stand_ins: tuple[StandIn, ...],
        *_: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.trace, ctx.stand_ins = trace, stand_ins
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Tensor | None, ...]:
        trace: kernels.LayerTrace | None = ctx.trace
        if trace is None:
            raise RuntimeError("a recurrence can run backwards only once for each forward pass")
        ctx.trace = None  # backward overwrites it
        sequence_grad, *final_grads = output_grads
        unseen = torch._C.DisableTorchFunction()  # a watch that looks at every step takes time
        with unseen, torch.autocast(sequence_grad.device.type, enabled=False):
            grads = kernels.backward(
                trace, sequence_grad, tuple(final_grads), with_inputs=ctx.needs_input_grad[3]
            )
            found = {stand_in: stand_in.gradient(trace, grads) for stand_in in set(ctx.stand_ins)}
        told = [found[stand_in] for stand_in in ctx.stand_ins]
        return None, None, None, grads.inputs, *grads.state, *told
