"""Rows of a table: the weights of embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpis.gradients.factors.factor import OverPositions
from dpis.gradients.factors.norms import (
    Squares,
    lost_in,
    quick_squares,
    squares_of,
    squares_of_terms,
)
from dpis.gradients.factors.outer import gram

# From this many positions on, sorting the indices is cheaper than comparing all pairs.
MANY_POSITIONS = 128


@dataclass(frozen=True, eq=False)
class Lookup(OverPositions):
    """``G_i = Σ_l e(indices[i, l]) ⊗ output_grads[i, l]``, of shape ``[table_rows, D]``.

    ``e(v)`` is the unit vector of table row ``v``. Only rows that a record looked up are non-zero.

    Example:
        >>> twice_row_1 = Lookup(torch.tensor([[1, 1]]), torch.tensor([[[3.0], [4.0]]]), 5)
        >>> twice_row_1.squared_norms()  # (3 + 4)²
        tensor([49.], dtype=torch.float64)
    """

    indices: Tensor
    """``[records, positions]``."""
    output_grads: Tensor
    """``[records, positions, D]``."""
    table_rows: int

    @property
    def shape(self) -> torch.Size:
        """The shape of the table."""
        return torch.Size((self.table_rows, self.output_grads.shape[2]))

    def squares(self) -> Squares:
        """``Σ_{l,m} [index_l = index_m] <g_l, g_m>``, or by adding up equal indices first."""
        if self.indices.shape[1] == 1:
            return squares_of(self.output_grads[:, 0])
        if self.indices.shape[1] >= MANY_POSITIONS:
            return self._squares_of_distinct_rows()
        _, L, D = self.output_grads.shape
        same = self.indices[:, :, None] == self.indices[:, None, :]
        grams = gram(self.output_grads)
        diagonals = grams.diagonal(dim1=1, dim2=2).sum(1)
        return squares_of_terms((grams * same).sum((1, 2)), diagonals, lost_in(L * L * D))

    def _squares_of_distinct_rows(self) -> Squares:
        offsets = torch.arange(self.records, device=self.indices.device)[:, None] * self.table_rows
        cells, inverse = torch.unique(self.indices + offsets, return_inverse=True)
        sums = _added_up(self.output_grads, inverse, len(cells))
        found = sums.new_zeros(self.records)
        found.index_add_(0, cells // self.table_rows, quick_squares(sums))
        return Squares(found, lost_in(self.output_grads[:1].numel()))

    def block_sum(self, weights: Tensor) -> Tensor:
        """Weighted output gradients, added to the rows they were looked up from."""
        rows, inverse = torch.unique(self.indices, return_inverse=True)
        scaled = self.output_grads.double() * weights.double()[:, None, None]
        table = self.output_grads.new_zeros(self.shape)
        table[rows] = _added_up(scaled, inverse, len(rows)).to(table.dtype)
        return table

    def explicit(self) -> Tensor:
        """Whole tables: ``records x table_rows x D`` numbers, for tests and last resorts."""
        tables = self.output_grads.new_zeros(self.records, *self.shape)
        where = self.indices[:, :, None].expand_as(self.output_grads)
        return tables.scatter_add_(1, where, self.output_grads)


def _added_up(gradients: Tensor, rows: Tensor, count: int) -> Tensor:
    """``[records, positions, D]`` added up by row, in float64.

    In float32, one position after the other, more is rounded than is left where many of them cancel: contributions were
    up to 3.7 times as long as their norms said.
    """
    sums = gradients.new_zeros(count, gradients.shape[2], dtype=torch.float64)
    return sums.index_add_(0, rows.flatten(), gradients.flatten(0, 1).double())
