"""Squared norms of a convolution's gradients from Gram matrices, without unfolding the inputs.

A record's gradient is ``G[o,k,c] = Σ_p g[p,o] x[p+k,c]`` (one phase, see convolution_geometry), so

    ||G||² = Σ_{p,p'} <g_p, g_p'> · Σ_k <x_{p+k}, x_{p'+k}>.

The inner products of all pairs of inputs are one small matrix product, from the inputs as they lie
in memory. Every kernel element only reads it at a shifted place, so the kernel's size multiplies
additions alone, and these separate into one pass for every spatial dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dpis.gradients.factors.convolution_geometry import Geometry, Tap
from dpis.gradients.factors.convolution_positions import positions
from dpis.gradients.factors.outer import largest_on_diagonal


def norms_and_diagonals(
    inputs: Tensor, output_grads: Tensor, rows: int, geometry: Geometry
) -> Tensor:
    """``||G_i||²`` of every record, and the terms ``p = p'`` of it, for a convolution with one group.

    The third number is the largest of the inner products on either side: with it, what is lost can be told.

    Args:
        inputs: ``[records · rows, channels_in, *spatial]``.
        output_grads: ``[records · rows, channels_out, *spatial_out]``.
        rows: How many consecutive rows make one record.
        geometry: Where the kernel looks.

    Returns:
        Shape ``[records, 3]``.
    """
    sizes = output_grads.shape[2:]
    seen = sum_over_kernel(inputs, sizes, rows, geometry)
    sent = _gram(output_grads, rows)
    seen = seen.reshape(sent.shape)
    largest = largest_on_diagonal(seen) + largest_on_diagonal(sent)
    terms = seen * sent
    diagonals = terms.diagonal(dim1=1, dim2=2).sum(dim=1)
    return torch.stack([terms.flatten(1).sum(dim=1), diagonals, largest], dim=1)


def sum_over_kernel(
    inputs: Tensor, output_sizes: torch.Size, rows: int, geometry: Geometry
) -> Tensor:
    """``Σ_k <x_{p+k}, x_{p'+k}>`` for every pair of output positions, ``[records, (rows,*P)²]``."""
    records = inputs.shape[0] // rows
    dimensions = geometry.dimensions
    total: Tensor | None = None
    for phase in geometry.phases():
        some = geometry.every(inputs, phase)
        if some.numel() == 0 and records:
            continue  # these kernel elements look at nothing but padding
        pairs = _gram(some, rows).view(records, *(rows, *some.shape[2:]) * 2)
        for dim, taps in enumerate(phase.taps):
            left, right = 2 + dim, 3 + dim + dimensions
            pairs = _sum_shifted(pairs, left, right, taps, output_sizes[dim])
        total = pairs if total is None else total + pairs
    return inputs.new_zeros(records, *(rows, *output_sizes) * 2) if total is None else total


def _gram(values: Tensor, rows: int) -> Tensor:
    flat = positions(values, rows)
    count = flat.shape[1]
    if count % 2:  # a record's products, too, must begin at a multiple of ALIGNMENT numbers
        flat = pad(flat, (0, 0, 0, 1))
    return torch.bmm(flat, flat.transpose(1, 2))[:, :count, :count]


def _sum_shifted(pairs: Tensor, left: int, right: int, taps: tuple[Tap, ...], size: int) -> Tensor:
    """``Σ_taps pairs[.., p + shift, .., p' + shift, ..]`` for ``p``, ``p'`` below ``size``.

    What lies outside is padding, hence zero: it is skipped instead of stored.
    """

    def window(of: Tensor, start: int, length: int) -> Tensor:
        return of.narrow(left, start, length).narrow(right, start, length)

    available = pairs.shape[left]
    whole = next((tap for tap in taps if 0 <= tap.shift <= available - size), None)
    if whole is None:
        shape = list(pairs.shape)
        shape[left] = shape[right] = size
        total = pairs.new_zeros(shape)
    else:
        total = window(pairs, whole.shift, size)
        taps = tuple(tap for tap in taps if tap is not whole)
        total = total.clone() if taps else total
    for tap in taps:
        first, last = max(0, -tap.shift), min(size, available - tap.shift)
        if first < last:
            seen = window(pairs, first + tap.shift, last - first)
            window(total, first, last - first).add_(seen)
    return total
