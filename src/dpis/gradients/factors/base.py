"""What a record's gradient of one parameter looks like, kept as small factors."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

# Which records are kept: their indices, or a slice of all.
Kept = Tensor | slice


class Factor(ABC):
    """The gradients of all records with respect to one parameter, without (necessarily) holding them.

    With ``G_i`` the gradient of record ``i``, a factor answers ``||G_i||²`` for every record and
    ``Σ_i w_i G_i`` for weights chosen afterwards. Both come from the same stored tensors, so a sum
    clipped by these norms is clipped exactly. Factors are values: no method changes one.
    """

    @property
    @abstractmethod
    def records(self) -> int:
        """How many records the factor holds."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The shape of the parameter (or of the view of it) these are gradients of."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """``||G_i||²`` for every record, shape ``[records]``, in float64."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """``Σ_i weights_i G_i``, of the parameter's shape. Records of weight zero cost nothing.

        In the precision of the factor, or in float64 where that does not do (see sums.py).
        """

    @abstractmethod
    def explicit(self) -> Tensor:
        """Every ``G_i``, shape ``[records, *shape]``: for tests, and cross terms of last resort."""

    @abstractmethod
    def fold(self, rows_per_record: int) -> Factor:
        """Read each run of ``rows_per_record`` rows as one record; its gradient is their sum."""

    @abstractmethod
    def select(self, kept: Kept) -> Factor:
        """The records with these indices alone."""

    @abstractmethod
    def double(self) -> Factor:
        """The same numbers in float64, which holds the squares of all products of two of them."""
