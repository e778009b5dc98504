"""The gradients of a convolution's kernel, record by record.

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

from dpis.gradients.factors.base import Factor, Kept
from dpis.gradients.factors.convolution_geometry import Geometry, Tap
from dpis.gradients.factors.convolution_positions import positions
from dpis.gradients.factors.selection import chosen
from dpis.gradients.factors.squares import squared_norms as squares_of_rows
from dpis.gradients.factors.sums import summed

FEW_CHANNELS = 8
"""Up to so many input channels, unfolding them beats one product for each kernel element."""


@dataclass(frozen=True, eq=False)
class KernelGradients(Factor):
    """Every record's gradient, kept.

    Attributes:
        gradients: ``[records, channels_out, *kernel, channels_in / groups]``: channels last, as the
            matrix products leave them.
    """

    gradients: Tensor

    @property
    def records(self) -> int:
        """How many records the factor holds."""
        return self.gradients.shape[0]

    @property
    def shape(self) -> torch.Size:
        """``[channels_out, channels_in / groups, *kernel]``."""
        return self.explicit().shape[1:]

    def squared_norms(self) -> Tensor:
        """``||G_i||²``, read off."""
        return _squared(self.gradients)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """One pass over the gradients of nonzero weight."""
        return summed(self, weights, KernelGradients._block_sum)

    def _block_sum(self, weights: Tensor) -> Tensor:
        total = weights.to(self.gradients.dtype) @ self.gradients.flatten(1)
        return total.view(self.gradients.shape[1:]).movedim(-1, 1)

    def explicit(self) -> Tensor:
        """The gradients, channels second as parameters have them."""
        return self.gradients.movedim(-1, 2)

    def fold(self, rows_per_record: int) -> KernelGradients:
        """The sum of the gradients of a record's rows."""
        if rows_per_record == 1:
            return self
        return KernelGradients(
            self.gradients.view(-1, rows_per_record, *self.gradients.shape[1:]).sum(dim=1)
        )

    def select(self, kept: Kept) -> KernelGradients:
        """The records with these indices alone."""
        return KernelGradients(chosen(self.gradients, kept))

    def double(self) -> KernelGradients:
        """The same in float64."""
        return KernelGradients(self.gradients.double())


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


def squared_norms(inputs: Tensor, output_grads: Tensor, rows: int, geometry: Geometry) -> Tensor:
    """``||G_i||²`` of every record, from gradients that are dropped at once."""
    gradients = kernel_gradients(inputs, output_grads, rows, geometry)
    return _squared(gradients)


def _by_kernel_element(
    inputs: Tensor, output_grads: Tensor, rows: int, geometry: Geometry
) -> Tensor:
    """``[records, channels_out, kernel elements, channels_in]``, one product for each element."""
    grid = _grid(output_grads.shape[2:], geometry)
    cells = [prod(grid[dim + 1 :]) for dim in range(len(grid))]
    sent = positions(
        _placed(output_grads, grid, (0,) * len(grid)), rows, pad_channels=True
    ).transpose(1, 2)
    channels_out, channels_in = output_grads.shape[1], inputs.shape[1]
    gradients = inputs.new_zeros(sent.shape[0], channels_out, prod(geometry.kernel), channels_in)
    for phase in geometry.phases():
        some = geometry.every(inputs, phase)
        firsts = tuple(min(tap.shift for tap in taps) for taps in phase.taps)
        if not _meet(some.shape[2:], grid, firsts):
            continue  # these kernel elements look at nothing but padding
        seen = positions(_placed(some, grid, firsts), rows, pad_channels=True)
        for taps in product(*phase.taps):
            element = _ravel([tap.element for tap in taps], geometry.kernel)
            shifts = [tap.shift - first for tap, first in zip(taps, firsts, strict=True)]
            offset = sum(shift * step for shift, step in zip(shifts, cells, strict=True))
            length = seen.shape[1] - offset
            gradient = torch.bmm(sent[:, :, :length], seen[:, offset:])
            gradients[:, :, element] = gradient[:, :channels_out, :channels_in]
    return gradients


def _grid(output_sizes: torch.Size, geometry: Geometry) -> tuple[int, ...]:
    """A grid that holds every output position, shifted as far as any kernel element shifts it."""
    return tuple(
        size + max(_reach(phase.taps[dim]) for phase in geometry.phases())
        for dim, size in enumerate(output_sizes)
    )


def _reach(taps: tuple[Tap, ...]) -> int:
    shifts = [tap.shift for tap in taps]
    return max(shifts) - min(shifts)


def _meet(sizes: torch.Size, grid: tuple[int, ...], firsts: tuple[int, ...]) -> bool:
    """Whether the grid whose first cell is index ``firsts`` holds any of the values."""
    each = zip(sizes, grid, firsts, strict=True)
    return all(first < size and first + cells > 0 for size, cells, first in each)


def _placed(values: Tensor, grid: tuple[int, ...], firsts: tuple[int, ...]) -> Tensor:
    """Values on the grid whose first cell is index ``firsts``: zeros around, the rest cut off."""
    sizes = zip(values.shape[2:], grid, firsts, strict=True)
    around = [(-first, first + cells - size) for size, cells, first in sizes]
    return pad(values, [amount for pair in reversed(around) for amount in pair])


def _ravel(index: list[int], sizes: tuple[int, ...]) -> int:
    flat = 0
    for element, size in zip(index, sizes, strict=True):
        flat = flat * size + element
    return flat


def _by_unfolding(inputs: Tensor, output_grads: Tensor, rows: int, geometry: Geometry) -> Tensor:
    """``[records, channels_out, kernel elements · channels_in]``, one product in all."""
    padded = pad(
        inputs, [amount for width in reversed(geometry.padding) for amount in (width, width)]
    )
    windows = _windows(padded, output_grads.shape[2:], geometry)
    unfolded = windows.reshape(inputs.shape[0], -1, prod(output_grads.shape[2:]))
    sent = positions(output_grads, rows, pad_channels=True).transpose(1, 2)
    gradients = torch.bmm(sent, positions(unfolded, rows, pad_channels=True))
    return gradients[:, : output_grads.shape[1], : unfolded.shape[1]].contiguous()


def _windows(padded: Tensor, output_sizes: torch.Size, geometry: Geometry) -> Tensor:
    """What every output position looks at, ``[rows, *kernel, channels, *output_sizes]``: a view."""
    row, channel, *steps = padded.stride()
    within = [step * apart for step, apart in zip(steps, geometry.dilation, strict=True)]
    between = [step * apart for step, apart in zip(steps, geometry.stride, strict=True)]
    return padded.as_strided(
        (padded.shape[0], *geometry.kernel, padded.shape[1], *output_sizes),
        (row, *within, channel, *between),
        padded.storage_offset(),
    )


def _squared(gradients: Tensor) -> Tensor:
    return squares_of_rows(gradients.flatten(1))
