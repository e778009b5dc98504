"""Rows of a table: the weights of embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpis.gradients.factors.base import Factor, Kept
from dpis.gradients.factors.outer import gram
from dpis.gradients.factors.selection import chosen
from dpis.gradients.factors.squares import (
    LARGEST_LOSS,
    and_not_zero,
    from_gram_terms,
    lost_in,
    made_anew,
    quick_squares,
    squared_norms,
    too_small,
)
from dpis.gradients.factors.sums import summed

# From this many positions on, sorting the indices is cheaper than comparing all pairs.
MANY_POSITIONS = 128


@dataclass(frozen=True, eq=False)
class Lookup(Factor):
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
    def records(self) -> int:
        """How many records the factor holds."""
        return self.indices.shape[0]

    @property
    def shape(self) -> torch.Size:
        """The shape of the table."""
        return torch.Size((self.table_rows, self.output_grads.shape[2]))

    def squared_norms(self) -> Tensor:
        """``Σ_{l,m} [index_l = index_m] <g_l, g_m>``, or by adding up equal indices first."""
        if self.indices.shape[1] == 1:
            return squared_norms(self.output_grads[:, 0])
        if self.indices.shape[1] < MANY_POSITIONS:
            L, D = self.output_grads.shape[1:]
            same = self.indices[:, :, None] == self.indices[:, None, :]
            grams = gram(self.output_grads)
            diagonals = grams.diagonal(dim1=1, dim2=2).sum(1)
            sums = (grams * same).sum((1, 2))
            found, lost = (sums, diagonals), lost_in(L * L * D)
            return from_gram_terms(
                self, found, lost, self.output_grads, self._norms_of_distinct_rows
            )
        return self._norms_of_distinct_rows()

    def _norms_of_distinct_rows(self) -> Tensor:
        offsets = torch.arange(self.records, device=self.indices.device)[:, None] * self.table_rows
        cells, inverse = torch.unique(self.indices + offsets, return_inverse=True)
        sums = self.output_grads.new_zeros(len(cells), self.shape[1])
        sums.index_add_(0, inverse.flatten(), self.output_grads.flatten(0, 1))
        norms = sums.new_zeros(self.records, dtype=torch.float64)
        norms.index_add_(0, cells // self.table_rows, quick_squares(sums))
        if norms.dtype == self.output_grads.dtype:
            return norms
        least = lost_in(self.output_grads[:1].numel()) / LARGEST_LOSS
        doubtful = and_not_zero(too_small(norms, least), norms, self.output_grads)
        if not bool(doubtful.any()):
            return norms
        exact = lambda some: self.select(some).double()._norms_of_distinct_rows()  # noqa: E731
        return made_anew(norms, doubtful, exact)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Weighted output gradients, added to the rows they were looked up from."""
        return summed(self, weights, Lookup._block_sum)

    def _block_sum(self, weights: Tensor) -> Tensor:
        g = self.output_grads
        scaled = g * weights.to(g.dtype)[:, None, None]
        table = g.new_zeros(self.shape)
        return table.index_add_(0, self.indices.flatten(), scaled.flatten(0, 1))

    def explicit(self) -> Tensor:
        """Whole tables: ``records x table_rows x D`` numbers, for tests and last resorts."""
        tables = self.output_grads.new_zeros(self.records, *self.shape)
        where = self.indices[:, :, None].expand_as(self.output_grads)
        return tables.scatter_add_(1, where, self.output_grads)

    def fold(self, rows_per_record: int) -> Lookup:
        """The rows of a record become positions."""
        if rows_per_record == 1:
            return self
        records = self.records // rows_per_record
        return Lookup(
            self.indices.reshape(records, -1),
            self.output_grads.reshape(records, -1, self.shape[1]),
            self.table_rows,
        )

    def select(self, kept: Kept) -> Lookup:
        """The records with these indices alone."""
        return Lookup(chosen(self.indices, kept), chosen(self.output_grads, kept), self.table_rows)

    def double(self) -> Lookup:
        """The same in float64."""
        return Lookup(self.indices, self.output_grads.double(), self.table_rows)

    def join(self, other: Lookup) -> Lookup:
        """The sum of both: the other's positions after these."""
        return Lookup(
            torch.cat([self.indices, other.indices], dim=1),
            torch.cat([self.output_grads, other.output_grads], dim=1),
            self.table_rows,
        )
