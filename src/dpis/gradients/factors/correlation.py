"""Gradients of a convolution's kernel, kept as inputs and output gradients where that is cheaper.

Record ``i`` sends the output gradients ``g_i[p,o]`` back and saw the inputs ``x_i[q,c]``. The
gradient of the kernel is their correlation,

    G_i[o,c,k] = Σ_p g_i[p,o] · x_i[stride·p + dilation·k − padding, c].

``Correlation`` keeps ``x`` and ``g``; ``KernelGradients`` keeps ``G``. Which is cheaper depends on
the sizes alone, never on the values, so the choice tells nothing about the data.

Norms need no ``G``. In one phase (see geometry.py) ``G[o,k,c] = Σ_p g[p,o] x[p+k,c]``, so

    ||G||² = Σ_{p,p'} <g_p, g_p'> · Σ_k <x_{p+k}, x_{p'+k}>.

The inner products of all pairs of inputs are one small matrix product, from the inputs as they lie
in memory. Every kernel element only reads it at a shifted place, so the kernel's size multiplies
additions alone, and these separate into one pass for every spatial dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from dpis.gradients.factors.factor import Factor, Kept, Stored
from dpis.gradients.factors.geometry import Geometry, Tap, positions
from dpis.gradients.factors.kernels import KernelGradients, kernel_gradients, windows_of
from dpis.gradients.factors.norms import Squares, lost_in, quick_squares, squares_of_terms
from dpis.gradients.factors.outer import largest_on_diagonal

# The unit of cost is one multiply-add inside a large matrix product. The constants are fitted to measured times of the
# two ways over the convolutions of benchmarks/per_example.py (see its README).
GRAM_ENTRY = 25
"""Multiply-adds that take as long as adding one shifted entry of a Gram matrix to another."""

KERNEL_ENTRY = 50
"""Multiply-adds that take as long as writing and squaring one entry of an explicit gradient."""

CACHE_FLOATS = 2**22
"""Numbers that a block of records may occupy while its norms are computed (16 MiB in float32)."""

# Something for every record of a convolution with one group, from inputs, output gradients and rows.
OfOneGroup = Callable[[Tensor, Tensor, int, Geometry], Tensor]


def convolution_factor(inputs: Tensor, output_grads: Tensor, geometry: Geometry) -> Factor:
    """The cheaper factor for these sizes.

    Where the norms are cheaper from the gradients themselves, and the gradients take little more
    room than what they are made of, they are computed once and kept: the weighted sum then costs
    one pass over them.

    Args:
        inputs: ``[records, channels_in, *spatial]``.
        output_grads: ``[records, channels_out, *spatial_out]``.
        geometry: Where the kernel looks.
    """
    factor = Correlation(inputs, output_grads, geometry)
    kept = prod(inputs.shape[1:]) + prod(output_grads.shape[1:])
    if factor.by_gram or prod(factor.shape) > 2 * kept:
        return factor
    return KernelGradients(factor.channels_last_gradients())


@lru_cache(maxsize=1024)
def cheaper_by_gram(
    inputs: torch.Size, output_grads: torch.Size, rows: int, geometry: Geometry
) -> bool:
    """Whether Gram matrices cost less than the gradients themselves, by the shapes alone."""
    channels_in = inputs[1] // geometry.groups
    channels_out = output_grads[1] // geometry.groups
    outputs = rows * prod(output_grads[2:])
    gram = outputs**2 * (channels_out + GRAM_ENTRY)
    for phase in geometry.phases():
        seen = rows * prod(geometry.sizes_of(phase, inputs[2:]))
        gram += seen**2 * channels_in
        gram += GRAM_ENTRY * outputs**2 * sum(len(taps) for taps in phase.taps)
    entries = channels_in * channels_out * prod(geometry.kernel)
    return gram < (outputs + KERNEL_ENTRY) * entries


@dataclass(frozen=True, eq=False)
class Correlation(Stored):
    """Inputs and output gradients of a convolution.

    Attributes:
        inputs: ``[records · rows, channels_in, *spatial]``.
        output_grads: ``[records · rows, channels_out, *spatial_out]``.
        geometry: Where the kernel looks.
        rows: How many consecutive rows make one record; its gradient is their sum.
    """

    inputs: Tensor
    output_grads: Tensor
    geometry: Geometry
    rows: int = 1

    @property
    def records(self) -> int:
        """How many records the factor holds."""
        return self.inputs.shape[0] // self.rows

    @property
    def shape(self) -> torch.Size:
        """``[channels_out, channels_in / groups, *kernel]``."""
        channels_in = self.inputs.shape[1] // self.geometry.groups
        return torch.Size((self.output_grads.shape[1], channels_in, *self.geometry.kernel))

    @property
    def by_gram(self) -> bool:
        """Whether Gram matrices are the cheaper way to the norms of these sizes."""
        return cheaper_by_gram(self.inputs.shape, self.output_grads.shape, self.rows, self.geometry)

    def squares(self) -> Squares:
        """From Gram matrices or from gradients that are made in cache and dropped."""
        if not self.by_gram:
            found, diagonals = self._summed_over_groups(explicit_norms).unbind(-1)
            return squares_of_terms(found, diagonals, lost_in(prod(self.shape)))
        sums, diagonals, largest = self._summed_over_groups(gram_norms).unbind(-1)
        outputs, of_output = self.rows * prod(self.output_grads.shape[2:]), prod(self.shape[1:])
        size = outputs**2 * max(of_output, self.shape[0])
        lost = (largest + self.geometry.groups) * lost_in(size)
        return squares_of_terms(sums, diagonals, lost)

    def _summed_over_groups(self, of: OfOneGroup) -> Tensor:
        by_group = self._over_groups(of)
        return by_group.view(self.records, self.geometry.groups, *by_group.shape[1:]).sum(dim=1)

    def block_sum(self, weights: Tensor) -> Tensor:
        """One ordinary weight gradient, of output gradients scaled by the weights."""
        inputs, output_grads = _widened(self.inputs, self.output_grads)
        if self.records == 0:
            return inputs.new_zeros(self.shape)
        by_row = weights.to(output_grads.dtype).repeat_interleave(self.rows)
        scaled = output_grads * by_row.view(-1, *(1,) * (output_grads.dim() - 1))
        weight = inputs.new_empty(self.shape)
        return self.geometry.parameter_gradients(inputs, scaled, weight, wanted=(True, False))[0]

    def explicit(self) -> Tensor:
        """Every record's gradient, ``[records, *shape]``."""
        return self.channels_last_gradients().movedim(-1, 2)

    def channels_last_gradients(self) -> Tensor:
        """Every record's gradient, ``[records, channels_out, *kernel, channels_in / groups]``."""
        channels_out, channels_in, *kernel = self.shape
        gradients = self._over_groups(kernel_gradients)
        return gradients.reshape(self.records, channels_out, *kernel, channels_in)

    def fold(self, rows_per_record: int) -> Correlation:
        """The rows of a record lie end to end, as further positions: cross terms are exact."""
        return replace(self, rows=self.rows * rows_per_record)

    def select(self, kept: Kept) -> Correlation:
        """All rows of the records with these indices."""
        if self.rows == 1:
            return super().select(kept)
        if isinstance(kept, slice):
            return super().select(slice((kept.start or 0) * self.rows, kept.stop * self.rows))
        own = torch.arange(self.rows, device=kept.device)
        return super().select((kept.unsqueeze(1) * self.rows + own).flatten())

    def _over_groups(self, of: OfOneGroup) -> Tensor:
        """Apply ``of`` to one-group convolutions: each group of a record is a record of its own.

        Works through equal blocks of records that fit into the cache. (An unequal last block could
        round differently, and a record's norm must not depend on its place; so the last overlaps.)
        """
        fits = self._records_in_cache()
        if fits >= self.records:
            return self._one_block(slice(None), of)
        block = ceil(self.records / ceil(self.records / fits))
        last = self.records - block
        results = None
        for first in (*range(0, last, block), last):
            rows = slice(first * self.rows, (first + block) * self.rows)
            part = self._one_block(rows, of)
            part = part.view(block, -1, *part.shape[1:])
            if results is None:
                results = part.new_empty(self.records, *part.shape[1:])
            results[first : first + block] = part
        assert results is not None
        return results.flatten(0, 1)

    def _records_in_cache(self) -> int:
        tensors = self.inputs, self.output_grads
        positions = [self.rows * prod(tensor.shape[2:]) for tensor in tensors]
        floats = sum(n * tensor.shape[1] for n, tensor in zip(positions, tensors, strict=True))
        if self.by_gram:
            floats += 2 * sum(n**2 for n in positions)
        return max(1, CACHE_FLOATS // max(1, floats))

    def _one_block(self, rows: slice, of: OfOneGroup) -> Tensor:
        inputs, output_grads = (
            _groups_as_records(values, self.geometry.groups, self.rows)
            for values in _widened(self.inputs[rows], self.output_grads[rows])
        )
        return of(inputs, output_grads, self.rows, replace(self.geometry, groups=1))


def _groups_as_records(values: Tensor, groups: int, rows: int) -> Tensor:
    """``[records·rows, groups·channels, ...]`` as ``[records·groups·rows, channels, ...]``."""
    if groups == 1:
        return values
    records, channels = values.shape[0] // rows, values.shape[1] // groups
    split = values.reshape(records, rows, groups, channels, *values.shape[2:])
    return split.transpose(1, 2).flatten(0, 2)


def _widened(inputs: Tensor, output_grads: Tensor) -> tuple[Tensor, Tensor]:
    """Half precision is for the model's arithmetic; norms and sums are float32 or better."""
    dtype = torch.promote_types(inputs.dtype, output_grads.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    return inputs.to(dtype), output_grads.to(dtype)


def explicit_norms(inputs: Tensor, output_grads: Tensor, rows: int, geometry: Geometry) -> Tensor:
    """``||G_i||²`` of every record, from gradients that are dropped at once, and what single positions would give.

    A sum made by another product rounds otherwise, so terms that cancel count here, too.

    Returns:
        Shape ``[records, 2]``, float64.
    """
    made = quick_squares(kernel_gradients(inputs, output_grads, rows, geometry).flatten(1))
    seen = inputs.double().square().sum(1, keepdim=True)
    around = [amount for width in reversed(geometry.padding) for amount in (width, width)]
    windows = windows_of(pad(seen, around), output_grads.shape[2:], geometry)
    each = windows.flatten(1, -len(geometry.kernel) - 1).sum(1)  # kernel elements
    diagonals = (each * output_grads.double().square().sum(1)).flatten(1).sum(1)
    return torch.stack([made, diagonals.view(-1, rows).sum(1)], dim=1)


def gram_norms(inputs: Tensor, output_grads: Tensor, rows: int, geometry: Geometry) -> Tensor:
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
    seen = _sum_over_kernel(inputs, output_grads.shape[2:], rows, geometry)
    sent = _gram(output_grads, rows)
    seen = seen.reshape(sent.shape)
    largest = largest_on_diagonal(seen) + largest_on_diagonal(sent)
    terms = seen * sent
    diagonals = terms.diagonal(dim1=1, dim2=2).sum(dim=1)
    return torch.stack([terms.flatten(1).sum(dim=1), diagonals, largest], dim=1)


def _sum_over_kernel(
    inputs: Tensor, output_sizes: torch.Size, rows: int, geometry: Geometry
) -> Tensor:
    """``Σ_k <x_{p+k}, x_{p'+k}>`` for every pair of output positions, ``[records, (rows,*P)²]``."""
    records = inputs.shape[0] // rows
    total: Tensor | None = None
    for phase in geometry.phases():
        some = geometry.every(inputs, phase)
        if some.numel() == 0 and records:
            continue  # these kernel elements look at nothing but padding
        pairs = _gram(some, rows).view(records, *(rows, *some.shape[2:]) * 2)
        for dim, taps in enumerate(phase.taps):
            left, right = 2 + dim, 3 + dim + len(phase.taps)
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
