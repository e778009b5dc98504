"""The gradients themselves: for parameters so small that nothing shorter stands for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dpis.gradients.factors.factor import Stored
from dpis.gradients.factors.norms import Squares, squares_of

RECORDS_IN_A_ROW = 64


@dataclass(frozen=True, eq=False)
class Dense(Stored):
    """``G_i = gradients[i]``.

    Example:
        >>> Dense(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).squared_norms()
        tensor([25.,  4.], dtype=torch.float64)
    """

    gradients: Tensor
    """``[records, *shape]``."""

    @property
    def records(self) -> int:
        """How many records the factor holds."""
        return self.gradients.shape[0]

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter."""
        return self.explicit().shape[1:]

    def squares(self) -> Squares:
        """``||G_i||²``, entry by entry."""
        return squares_of(self._flat())

    def block_sum(self, weights: Tensor) -> Tensor:
        """Products of the weights with the gradients, flattened, a few records at a time.

        A product of a vector and a matrix may add up one record after the other, by the kernel of one machine and not
        of another: over 512 records that rounded by 2e-4 of a contribution, over 64 at a time by 2e-5.
        """
        flat = self._flat()
        weights, whole = weights.to(flat.dtype), len(weights) // RECORDS_IN_A_ROW * RECORDS_IN_A_ROW
        total = weights[whole:] @ flat[whole:]
        if whole:
            rows = weights[:whole].view(-1, 1, RECORDS_IN_A_ROW)
            several = flat[:whole].view(-1, RECORDS_IN_A_ROW, flat.shape[1])
            total += torch.bmm(rows, several).sum((0, 1))
        return total.view(self.gradients.shape[1:])

    def explicit(self) -> Tensor:
        """The gradients."""
        return self.gradients

    def fold(self, rows_per_record: int) -> Self:
        """Rows of one record add up."""
        if rows_per_record == 1:
            return self
        own = self.gradients.shape[1:]
        return self.each_tensor(lambda rows: rows.reshape(-1, rows_per_record, *own).sum(1))

    def _flat(self) -> Tensor:
        return self.gradients.reshape(self.records, self.gradients.shape[1:].numel())
