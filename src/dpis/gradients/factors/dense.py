"""The gradients themselves: for parameters so small that nothing shorter stands for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpis.gradients.factors.base import Factor, Kept
from dpis.gradients.factors.selection import chosen
from dpis.gradients.factors.squares import squared_norms
from dpis.gradients.factors.sums import summed


@dataclass(frozen=True, eq=False)
class Dense(Factor):
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
        return self.gradients.shape[1:]

    def squared_norms(self) -> Tensor:
        """``||G_i||²``, entry by entry."""
        return squared_norms(self._flat())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """One product of the weights with the records, flattened."""
        return summed(self, weights, Dense._block_sum)

    def _block_sum(self, weights: Tensor) -> Tensor:
        flat = self._flat()
        return (weights.to(flat.dtype) @ flat).view(self.shape)

    def _flat(self) -> Tensor:
        return self.gradients.reshape(self.records, self.shape.numel())

    def explicit(self) -> Tensor:
        """The gradients."""
        return self.gradients

    def fold(self, rows_per_record: int) -> Dense:
        """Rows of one record add up."""
        if rows_per_record == 1:
            return self
        return Dense(self.gradients.reshape(-1, rows_per_record, *self.shape).sum(1))

    def select(self, kept: Kept) -> Dense:
        """The records with these indices alone."""
        return Dense(chosen(self.gradients, kept))

    def double(self) -> Dense:
        """The same in float64."""
        return Dense(self.gradients.double())
