"""Convolutions with a trainable kernel: ``conv1d``, ``conv2d``, ``conv3d``.

Transposed convolutions have no rule; their parameters go to the fallback.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpis.errors import CouplingError
from dpis.gradients.factors import Dense
from dpis.gradients.factors.correlation import convolution_factor
from dpis.gradients.factors.geometry import Geometry, Sizes, same_padding
from dpis.gradients.factors.phases import Phases, channels_last, worth_splitting
from dpis.gradients.rules.rule import HALF, Call, Factors, Ran, Rule, RuleTable, Watched

MANY_CHANNELS = 16
"""From so many on, data is worth turning channels last before its first convolution."""


@dataclass(frozen=True, eq=False)
class Phased:
    """A call whose inputs were split into phases."""

    call: Call
    phases: Phases


class Convolution(Rule):
    """``y[p,o] = b[o] + Σ_{c,k} W[o,c,k] x[stride·p + dilation·k − padding, c]``.

    The kernel's factor keeps ``x`` and ``g``, or the gradients; ``db = Σ_p g_p``.
    """

    reads_parameters = False

    def accepts(self, call: Call) -> bool:
        """A batch of images that is not itself a parameter (one image alone has no records)."""
        x, weight = call.argument(0, "input"), call.argument(1, "weight")
        return bool(x.ndim == weight.ndim) and not call.wants(x)

    def run(self, call: Call) -> Ran:
        """Run data by phases, or channels last.

        Both the convolution and the norms then read contiguous vectors of channels; for scattering
        features (81 channels of 7x7) this is faster even with the copy it takes. Inputs that
        another layer computed, and the result, stay in the layout they have.
        """
        x, weight = call.argument(0, "input"), call.argument(1, "weight")
        if x.requires_grad or x.ndim != 4 or x.shape[1] < MANY_CHANNELS or not x.is_contiguous():
            return super().run(call)
        inputs, geometry = _geometry(call, tuple(weight.shape[2:]))
        split = call.wants(weight) and _by_products(inputs, weight)
        if split and worth_splitting(inputs, weight, geometry):
            phases = Phases.of(inputs, geometry)
            result = phases.convolved(weight, call.argument(2, "bias"))
            kept = sum(values.nbytes for values in phases.values)
            return Ran(result, watched=(result,), saved=Phased(call, phases), bytes_inside=kept)
        last = (
            replace(call, args=(channels_last(x), *call.args[1:]))
            if call.args
            else replace(call, kwargs={**call.kwargs, "input": channels_last(x)})
        )
        result = last.result().contiguous()
        return Ran(result, watched=(result,), saved=last)

    def factors(self, saved: Call | Phased, watched: Watched) -> Factors:
        """A convolution factor for the kernel, a sum over positions for the bias."""
        grad, layout = watched[0]
        call = saved.call if isinstance(saved, Phased) else saved
        weight, bias = call.argument(1, "weight"), call.argument(2, "bias")
        if layout.dim != 0:
            raise CouplingError(
                "A convolution expects records in the first dimension of its input; found them in "
                f"dimension {layout.dim}, among channels or positions, which it mixes: the privacy "
                "guarantee would not hold. Reshape its input to [records, channels, ...]."
            )
        output_grads = layout.rows_first(grad)
        if isinstance(saved, Phased):
            phases = saved.phases.in_order(layout.rows_first)
            yield weight, phases.gradients(output_grads)
        elif call.wants(weight):
            inputs, geometry = _geometry(call, tuple(weight.shape[2:]))
            yield weight, convolution_factor(layout.rows_first(inputs), output_grads, geometry)
        if call.wants(bias):
            yield bias, Dense(output_grads.flatten(2).sum(2))


def _by_products(inputs: Tensor, weight: Tensor) -> bool:
    """Whether matrix products of the CPU would do the work, in the precision that is given."""
    on_cpu = inputs.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return on_cpu and inputs.dtype == weight.dtype and inputs.dtype not in HALF


def _geometry(call: Call, kernel: Sizes) -> tuple[Tensor, Geometry]:
    """The inputs and where the kernel looks at them."""

    def each(value: Any) -> Sizes:
        values = (value,) if isinstance(value, int) else tuple(value)
        return values * len(kernel) if len(values) == 1 else values

    inputs: Tensor = call.argument(0, "input")
    stride = each(call.argument(3, "stride", 1))
    dilation = each(call.argument(5, "dilation", 1))
    padding = call.argument(4, "padding", 0)
    if padding == "same":
        inputs, padding = same_padding(inputs, kernel, dilation)
    padding = each(0 if padding == "valid" else padding)
    groups = call.argument(6, "groups", 1)
    return inputs, Geometry(
        kernel=kernel, stride=stride, padding=padding, dilation=dilation, groups=groups
    )


RULES: RuleTable = dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), Convolution())
