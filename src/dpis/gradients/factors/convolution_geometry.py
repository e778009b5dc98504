"""Where a convolution's kernel looks: stride, padding, dilation and groups, in any dimension.

In one dimension, output position ``p`` sees through kernel element ``k`` the input position

    q = stride·p + dilation·k − padding.

Split by its remainder, ``q = stride·u + phase``, this reads ``u = p + shift`` with a shift that
depends on ``k`` alone. A convolution with a stride is thus a sum, over the phases, of convolutions
with unit stride on every ``stride``-th input: the rest of the code knows only phases and shifts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Tap:
    """One kernel element along one dimension, and how far it looks from the output position."""

    element: int
    shift: int


@dataclass(frozen=True)
class Phase:
    """Every ``stride``-th input from ``start`` on, in every dimension, and who looks at them."""

    starts: tuple[int, ...]
    taps: tuple[tuple[Tap, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The settings of one convolution; every tuple has one entry for each spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def dimensions(self) -> int:
        """How many spatial dimensions there are."""
        return len(self.kernel)

    @lru_cache(maxsize=1024)  # noqa: B019 (a geometry is a value, and small)
    def phases(self) -> tuple[Phase, ...]:
        """The unit-stride convolutions that this one is the sum of."""
        each = product(*(self._phases_along(dim) for dim in range(self.dimensions)))
        return tuple(
            Phase(starts=tuple(start for start, _ in along), taps=tuple(taps for _, taps in along))
            for along in each
        )

    def _phases_along(self, dim: int) -> list[tuple[int, tuple[Tap, ...]]]:
        taps: dict[int, list[Tap]] = {}
        for element in range(self.kernel[dim]):
            distance = self.dilation[dim] * element - self.padding[dim]
            shift, start = divmod(distance, self.stride[dim])
            taps.setdefault(start, []).append(Tap(element, shift))
        return [(start, tuple(found)) for start, found in sorted(taps.items())]

    def parameter_gradients(
        self, inputs: Tensor, output_grads: Tensor, weight: Tensor, *, wanted: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor]:
        """Torch's own backward pass, summed over the rows: for the weight and for the bias, as far as wanted."""
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            output_grads,
            inputs,
            weight,
            [weight.shape[0]] if wanted[1] else None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            (0,) * self.dimensions,
            self.groups,
            (False, *wanted),
        )
        return found[1], found[2]

    def every(self, inputs: Tensor, phase: Phase) -> Tensor:
        """The inputs ``[rows, channels, *spatial]`` that belong to one phase."""
        steps = zip(phase.starts, self.stride, strict=True)
        for dim, (start, step) in enumerate(steps, start=2):
            whole = (slice(None),) * dim
            inputs = inputs[(*whole, slice(start, None, step))]
        return inputs


def same_padding(
    inputs: Tensor, kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """Inputs and symmetric padding that stand for ``padding='same'``.

    The padding is ``dilation·(kernel − 1)`` in all. Where that is odd the far side gets one more;
    this one is added to the inputs here.
    """
    totals = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    if any(total % 2 for total in totals):
        extra = [amount for total in reversed(totals) for amount in (0, total % 2)]
        inputs = pad(inputs, extra)
    return inputs, tuple(total // 2 for total in totals)
