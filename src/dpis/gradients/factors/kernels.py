"""The per-example gradients of a convolution's kernel themselves.

One kernel element's gradient is a matrix product over positions, ``G[:,k,:] = Σ_p g_p x_{p+k}ᵀ``.
With inputs and output gradients laid on one grid, padded so that nothing looked at is missing,
shifting by ``k`` is a plain offset into the flattened grid: every product reads a *view*, nothing
is unfolded. Grid cells that are no output position hold a zero output gradient and add nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from dpis.gradients.factors.dense import Dense
from dpis.gradients.factors.geometry import Geometry, Sizes, positions

FEW_CHANNELS = 8
"""Up to so many input channels, unfolding them beats one product for each kernel element."""


@dataclass(frozen=True, eq=False)
class KernelGradients(Dense):
    """Every record's gradient, kept channels last, as the matrix products leave it.

    Attributes:
        gradients: ``[records, channels_out, *kernel, channels_in / groups]``.
    """

    def block_sum(self, weights: Tensor) -> Tensor:
        """Channels second, as parameters have them."""
        return super().block_sum(weights).movedim(-1, 1)

    def explicit(self) -> Tensor:
        """Channels second, as parameters have them."""
        return self.gradients.movedim(-1, 2)


def kernel_gradients(inputs: Tensor, output_grads: Tensor, rows: int, geometry: Geometry) -> Tensor:
    """Every record's gradient, channels last, for a convolution with one group.

    Args:
        inputs: ``[records · rows, channels_in, *spatial]``.
        output_grads: ``[records · rows, channels_out, *spatial_out]``.
        rows: How many consecutive rows make one record.
        geometry: Where the kernel looks.

    Returns:
        Shape ``[records, channels_out, *kernel, channels_in]``.
    """
    by = _by_unfolding if inputs.shape[1] <= FEW_CHANNELS else _by_kernel_element
    gradients = by(inputs, output_grads, rows, geometry)
    shape = (*geometry.kernel, inputs.shape[1])
    return gradients.view(inputs.shape[0] // rows, output_grads.shape[1], *shape)


def _by_kernel_element(
    inputs: Tensor, output_grads: Tensor, rows: int, geometry: Geometry
) -> Tensor:
    """``[records, channels_out, kernel elements, channels_in]``, one product for each element."""
    grid = _grid(output_grads.shape[2:], geometry)
    cells = [prod(grid[dim + 1 :]) for dim in range(len(grid))]
    on_grid = _placed(output_grads, grid, (0,) * len(grid))
    sent = positions(on_grid, rows, pad_channels=True).transpose(1, 2)
    channels_out, channels_in = output_grads.shape[1], inputs.shape[1]
    gradients = inputs.new_zeros(sent.shape[0], channels_out, prod(geometry.kernel), channels_in)
    for phase in geometry.phases():
        some = geometry.every(inputs, phase)
        firsts = tuple(min(tap.shift for tap in taps) for taps in phase.taps)
        along = zip(some.shape[2:], grid, firsts, strict=True)
        if not all(first < size and first + cells > 0 for size, cells, first in along):
            continue  # these kernel elements look at nothing but padding
        seen = positions(_placed(some, grid, firsts), rows, pad_channels=True)
        for taps in product(*phase.taps):
            shifts = [tap.shift - first for tap, first in zip(taps, firsts, strict=True)]
            offset = sum(shift * step for shift, step in zip(shifts, cells, strict=True))
            length = seen.shape[1] - offset
            gradient = torch.bmm(sent[:, :, :length], seen[:, offset:])
            gradients[:, :, geometry.element(taps)] = gradient[:, :channels_out, :channels_in]
    return gradients


def _grid(output_sizes: Sizes, geometry: Geometry) -> Sizes:
    """A grid that holds every output position, shifted as far as any kernel element shifts it."""

    def reach(dim: int) -> int:
        shifts = [[tap.shift for tap in phase.taps[dim]] for phase in geometry.phases()]
        return max(max(of_phase) - min(of_phase) for of_phase in shifts)

    return tuple(size + reach(dim) for dim, size in enumerate(output_sizes))


def _placed(values: Tensor, grid: Sizes, firsts: Sizes) -> Tensor:
    """Values on the grid whose first cell is index ``firsts``: zeros around, the rest cut off."""
    along = reversed(list(zip(values.shape[2:], grid, firsts, strict=True)))
    around = ((-first, first + cells - size) for size, cells, first in along)
    return pad(values, [amount for pair in around for amount in pair])


def _by_unfolding(inputs: Tensor, output_grads: Tensor, rows: int, geometry: Geometry) -> Tensor:
    """``[records, channels_out, kernel elements · channels_in]``, one product in all."""
    around = [amount for width in reversed(geometry.padding) for amount in (width, width)]
    windows = windows_of(pad(inputs, around), output_grads.shape[2:], geometry)
    unfolded = windows.reshape(inputs.shape[0], -1, prod(output_grads.shape[2:]))
    sent = positions(output_grads, rows, pad_channels=True).transpose(1, 2)
    gradients = torch.bmm(sent, positions(unfolded, rows, pad_channels=True))
    return gradients[:, : output_grads.shape[1], : unfolded.shape[1]].contiguous()


def windows_of(padded: Tensor, output_sizes: Sizes, geometry: Geometry) -> Tensor:
    """What every output position looks at, ``[rows, *kernel, channels, *output_sizes]``: a view."""
    row, channel, *steps = padded.stride()
    within = [step * apart for step, apart in zip(steps, geometry.dilation, strict=True)]
    between = [step * apart for step, apart in zip(steps, geometry.stride, strict=True)]
    return padded.as_strided(
        (padded.shape[0], *geometry.kernel, padded.shape[1], *output_sizes),
        (row, *within, channel, *between),
        padded.storage_offset(),
    )
