"""Where a convolution's kernel looks: stride, padding, dilation and groups, in any dimension.

In one dimension, output position ``p`` sees through kernel element ``k`` the input position

    q = stride·p + dilation·k − padding.

Split by its remainder, ``q = stride·u + phase``, this reads ``u = p + shift`` with a shift that
depends on ``k`` alone. A convolution with a stride is thus a sum, over the phases, of convolutions
with unit stride on every ``stride``-th input: the rest of the code knows only phases and shifts.

Images enter matrix products as matrices: one line for each position, one column for each channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from dpis.gradients.aligned import ALIGNMENT, missing

Sizes = tuple[int, ...]
"""One number for each spatial dimension."""


@dataclass(frozen=True)
class Tap:
    """One kernel element along one dimension, and how far it looks from the output position."""

    element: int
    shift: int


@dataclass(frozen=True)
class Phase:
    """Every ``stride``-th input from ``start`` on, in every dimension, and who looks at them."""

    starts: Sizes
    taps: tuple[tuple[Tap, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The settings of one convolution."""

    kernel: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    groups: int = 1

    @lru_cache(maxsize=1024)  # noqa: B019 (a geometry is a value, and small)
    def phases(self) -> tuple[Phase, ...]:
        """The unit-stride convolutions that this one is the sum of."""
        each = product(*(self._phases_along(dim) for dim in range(len(self.kernel))))
        return tuple(Phase(*zip(*along, strict=True)) for along in each)

    def _phases_along(self, dim: int) -> list[tuple[int, tuple[Tap, ...]]]:
        taps: dict[int, list[Tap]] = {}
        for element in range(self.kernel[dim]):
            distance = self.dilation[dim] * element - self.padding[dim]
            shift, start = divmod(distance, self.stride[dim])
            taps.setdefault(start, []).append(Tap(element, shift))
        return [(start, tuple(found)) for start, found in sorted(taps.items())]

    def every(self, inputs: Tensor, phase: Phase) -> Tensor:
        """The inputs ``[rows, channels, *spatial]`` that belong to one phase."""
        steps = zip(phase.starts, self.stride, strict=True)
        for dim, (start, step) in enumerate(steps, start=2):
            inputs = inputs[(*(slice(None),) * dim, slice(start, None, step))]
        return inputs

    def sizes_of(self, phase: Phase, sizes: Sizes) -> Sizes:
        """The sizes of one phase of images of these sizes."""
        along = zip(sizes, phase.starts, self.stride, strict=True)
        return tuple(len(range(start, size, step)) for size, start, step in along)

    def output_sizes(self, sizes: Sizes) -> Sizes:
        """What comes out for images of these sizes."""
        along = zip(sizes, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in along)

    def element(self, taps: tuple[Tap, ...]) -> int:
        """A kernel element, counted as if the kernel were flat."""
        flat = 0
        for tap, length in zip(taps, self.kernel, strict=True):
            flat = flat * length + tap.element
        return flat

    def parameter_gradients(
        self, inputs: Tensor, output_grads: Tensor, weight: Tensor, *, wanted: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor]:
        """Torch's own backward pass, summed over the rows: for the weight and for the bias, as far as wanted."""
        bias_sizes = [weight.shape[0]] if wanted[1] else None
        settings = self.stride, self.padding, self.dilation, False, (0,) * len(self.kernel)
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            output_grads, inputs, weight, bias_sizes, *settings, self.groups, (False, *wanted)
        )
        return found[1], found[2]


def same_padding(inputs: Tensor, kernel: Sizes, dilation: Sizes) -> tuple[Tensor, Sizes]:
    """Inputs and symmetric padding that stand for ``padding='same'``.

    The padding is ``dilation·(kernel − 1)`` in all. Where that is odd the far side gets one more;
    this one is added to the inputs here.
    """
    totals = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    if any(total % 2 for total in totals):
        extra = [amount for total in reversed(totals) for amount in (0, total % 2)]
        inputs = pad(inputs, extra)
    return inputs, tuple(total // 2 for total in totals)


def positions(values: Tensor, rows: int, *, pad_channels: bool = False) -> Tensor:
    """``[records·rows, channels, *spatial]`` as ``[records, rows·positions, channels]``, aligned.

    A product rounds differently where its matrices begin elsewhere relative to a vector register
    (seen with MKL: 9 positions of 81 channels, records at odd multiples of 4 bytes). A record's norm
    would then depend on its place in the batch. So the matrices of every record begin at a multiple of
    ``ALIGNMENT`` numbers: channels of zeros are added where their size does not bring this about.

    A view wherever memory allows, and a copy in the order of memory elsewhere. Rows of one record
    lie end to end, as further positions.

    Args:
        values: The images.
        rows: How many consecutive images make one record.
        pad_channels: Make the number of channels a multiple of ``ALIGNMENT`` in any case.
    """
    size = rows * prod(values.shape[1:])
    zeros = missing(values.shape[1]) if pad_channels or size % ALIGNMENT else 0
    if values.stride(1) == 1:
        last = values.movedim(1, -1)
        flat = (pad(last, (0, zeros)) if zeros else last).flatten(1, -2)
    else:
        first = values.flatten(2)
        flat = (pad(first, (0, 0, 0, zeros)) if zeros else first).transpose(1, 2)
    if rows > 1:
        flat = flat.reshape(-1, rows * flat.shape[1], flat.shape[2])
    aligned = flat.stride(0) % ALIGNMENT == 0 and flat.storage_offset() % ALIGNMENT == 0
    return flat if aligned else flat.clone()
