"""Gradients of a convolution's kernel, kept as inputs and output gradients where that is cheaper.

Record ``i`` sends the output gradients ``g_i[p,o]`` back and saw the inputs ``x_i[q,c]``:

    G_i[o,c,k] = Σ_p g_i[p,o] · x_i[stride·p + dilation·k − padding, c].

``Convolution`` keeps ``x`` and ``g``; ``KernelGradients`` keeps ``G``. Which is cheaper depends on
the sizes alone, never on the values, so the choice tells nothing about the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, prod

import torch
from torch import Tensor

from dpis.gradients.factors import convolution_gram as gram
from dpis.gradients.factors import convolution_kernels as kernels
from dpis.gradients.factors.base import Factor, Kept
from dpis.gradients.factors.convolution_cost import cheaper_by_gram, records_in_cache
from dpis.gradients.factors.convolution_geometry import Geometry
from dpis.gradients.factors.selection import chosen
from dpis.gradients.factors.squares import from_gram_terms, lost_in
from dpis.gradients.factors.sums import summed_products

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
    factor = Convolution(inputs, output_grads, geometry)
    kept = prod(inputs.shape[1:]) + prod(output_grads.shape[1:])
    if factor.by_gram or prod(factor.shape) > 2 * kept:
        return factor
    return kernels.KernelGradients(factor.channels_last_gradients())


@dataclass(frozen=True, eq=False)
class Convolution(Factor):
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

    def squared_norms(self) -> Tensor:
        """From Gram matrices or from gradients that are made in cache and dropped."""
        if not self.by_gram:
            return self._kernel_norms()
        sums, diagonals, largest = self._summed_over_groups(gram.norms_and_diagonals).unbind(-1)
        outputs, of_output = self.rows * prod(self.output_grads.shape[2:]), prod(self.shape[1:])
        size = outputs**2 * max(of_output, self.shape[0])
        lost = (largest + self.geometry.groups) * lost_in(size)
        return from_gram_terms(self, (sums, diagonals), lost, self.output_grads, self._kernel_norms)

    def _kernel_norms(self) -> Tensor:
        return self._summed_over_groups(kernels.squared_norms)

    def _summed_over_groups(self, of: OfOneGroup) -> Tensor:
        by_group = self._over_groups(of)
        return by_group.view(self.records, self.geometry.groups, *by_group.shape[1:]).sum(dim=1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """One ordinary weight gradient, of output gradients scaled by the weights."""
        return summed_products(self, weights, Convolution._block_sum)

    def _block_sum(self, weights: Tensor) -> Tensor:
        inputs, output_grads = _widened(self.inputs, self.output_grads)
        if self.records == 0:
            return inputs.new_zeros(self.shape)
        by_row = weights.to(output_grads.dtype).repeat_interleave(self.rows)
        scaled = output_grads * by_row.view(-1, *(1,) * (output_grads.dim() - 1))
        return _summed_gradient(inputs, scaled, self.shape, self.geometry)

    def explicit(self) -> Tensor:
        """Every record's gradient, ``[records, *shape]``."""
        return self.channels_last_gradients().movedim(-1, 2)

    def channels_last_gradients(self) -> Tensor:
        """Every record's gradient, ``[records, channels_out, *kernel, channels_in / groups]``."""
        channels_out, channels_in, *kernel = self.shape
        gradients = self._over_groups(kernels.kernel_gradients)
        return gradients.reshape(self.records, channels_out, *kernel, channels_in)

    def fold(self, rows_per_record: int) -> Convolution:
        """The rows of a record lie end to end, as further positions: cross terms are exact."""
        return replace(self, rows=self.rows * rows_per_record)

    def select(self, kept: Kept) -> Convolution:
        """The records with these indices alone."""
        rows = _rows_of(kept, self.rows)
        inputs, output_grads = chosen(self.inputs, rows), chosen(self.output_grads, rows)
        return replace(self, inputs=inputs, output_grads=output_grads)

    def double(self) -> Convolution:
        """The same in float64."""
        return replace(self, inputs=self.inputs.double(), output_grads=self.output_grads.double())

    def _over_groups(self, of: OfOneGroup) -> Tensor:
        """Apply ``of`` to one-group convolutions: each group of a record is a record of its own.

        Works through equal blocks of records that fit into the cache. (An unequal last block could
        round differently, and a record's norm must not depend on its place; so the last overlaps.)
        """
        fits = records_in_cache(self.inputs.shape, self.output_grads.shape, self.rows, self.by_gram)
        if fits >= self.records:
            return self._one_block(self.inputs, self.output_grads, of)
        block = ceil(self.records / ceil(self.records / fits))
        results = None
        for first in _equal_blocks(self.records, block):
            rows = slice(first * self.rows, (first + block) * self.rows)
            part = self._one_block(self.inputs[rows], self.output_grads[rows], of)
            part = part.view(block, -1, *part.shape[1:])
            if results is None:
                results = part.new_empty(self.records, *part.shape[1:])
            results[first : first + block] = part
        assert results is not None
        return results.flatten(0, 1)

    def _one_block(
        self,
        inputs: Tensor,
        output_grads: Tensor,
        of: OfOneGroup,
    ) -> Tensor:
        groups = self.geometry.groups
        inputs, output_grads = _widened(inputs, output_grads)
        if groups > 1:
            inputs = _groups_as_records(inputs, groups, self.rows)
            output_grads = _groups_as_records(output_grads, groups, self.rows)
        return of(inputs, output_grads, self.rows, replace(self.geometry, groups=1))


def _summed_gradient(
    inputs: Tensor, output_grads: Tensor, shape: torch.Size, geometry: Geometry
) -> Tensor:
    """``Σ_i G_i``: the backward pass of the convolution, for its weight alone."""
    weight = inputs.new_empty(shape)
    return geometry.parameter_gradients(inputs, output_grads, weight, wanted=(True, False))[0]


def _equal_blocks(records: int, block: int) -> Iterator[int]:
    yield from range(0, records - block, block)
    yield records - block


def _groups_as_records(values: Tensor, groups: int, rows: int) -> Tensor:
    """``[records·rows, groups·channels, ...]`` as ``[records·groups·rows, channels, ...]``."""
    records, channels = values.shape[0] // rows, values.shape[1] // groups
    split = values.reshape(records, rows, groups, channels, *values.shape[2:])
    return split.transpose(1, 2).flatten(0, 2)


def _rows_of(records: Kept, rows: int) -> Kept:
    if rows == 1:
        return records
    if isinstance(records, slice):
        return slice((records.start or 0) * rows, records.stop * rows)
    return (records.unsqueeze(1) * rows + torch.arange(rows, device=records.device)).flatten()


def _widened(inputs: Tensor, output_grads: Tensor) -> tuple[Tensor, Tensor]:
    """Half precision is for the model's arithmetic; norms and sums are float32 or better."""
    dtype = torch.promote_types(inputs.dtype, output_grads.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    return inputs.to(dtype), output_grads.to(dtype)
