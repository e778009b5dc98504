"""Sums over positions of outer products: the weights of linear layers and of recurrences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpis.gradients.aligned import filled_up
from dpis.gradients.factors.dense import Dense
from dpis.gradients.factors.factor import Factor, OverPositions
from dpis.gradients.factors.norms import (
    Squares,
    lost_in,
    product_of,
    quick_squares,
    squares_of,
    squares_of_terms,
)

# Explicit gradients are made and squared in blocks of records that stay in cache.
EXPLICIT_BLOCK_ENTRIES = 1 << 20


@dataclass(frozen=True, eq=False)
class Outer(OverPositions):
    """``G_i = Σ_l output_grads[i, l] ⊗ inputs[i, l]``, of shape ``[O, I]``.

    Example:
        >>> x, g = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0]]])
        >>> Outer(x, g).squared_norms()  # (1² + 2²) · 3²
        tensor([45.0000], dtype=torch.float64)
    """

    inputs: Tensor
    """``[records, positions, I]``."""
    output_grads: Tensor
    """``[records, positions, O]``."""

    @property
    def records(self) -> int:
        """How many records the factor holds."""
        return self.inputs.shape[0]

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight, ``[O, I]``."""
        return torch.Size((self.output_grads.shape[2], self.inputs.shape[2]))

    def squares(self) -> Squares:
        """The cheapest of three ways that are equal in exact arithmetic.

        - one position: ``||x||² ||g||²``;
        - Gram: ``Σ_{l,m} <x_l, x_m> <g_l, g_m>``, about ``L² (I + O)`` multiplications a record;
        - explicit: ``||gᵀ x||²``, about ``L I O``.
        """
        if self.inputs.shape[1] == 1:
            return product_of(squares_of(self.inputs[:, 0]), squares_of(self.output_grads[:, 0]))
        return self._explicit_squares() if self.explicit_is_smaller else self._gram_squares()

    @property
    def explicit_is_smaller(self) -> bool:
        """Whether ``I O <= L (I + O)``: then the gradients take less room than their factors.

        The same comparison, times ``L``, decides which norm takes fewer multiplications.
        """
        _, L, I = self.inputs.shape  # noqa: E741
        O = self.output_grads.shape[2]  # noqa: E741
        return I * O <= L * (I + O)

    def _gram_squares(self) -> Squares:
        grams, sent = gram(self.inputs), gram(self.output_grads)
        size = self.inputs.shape[1] ** 2 * max(self.shape)
        lost = (largest_on_diagonal(grams) + largest_on_diagonal(sent) + 1) * lost_in(size)
        grams.mul_(sent)
        diagonals = grams.diagonal(dim1=1, dim2=2).sum(1)
        return squares_of_terms(grams.flatten(1).sum(1), diagonals, lost)

    def _explicit_squares(self) -> Squares:
        """Made, squared and dropped: a sum made by another product rounds otherwise, so cancelling counts here too."""
        block = max(1, EXPLICIT_BLOCK_ENTRIES // self.shape.numel())
        inputs, output_grads = _aligned(self.inputs), _aligned(self.output_grads)
        blocks = torch.split(inputs, block), torch.split(output_grads, block)
        pairs = zip(*blocks, strict=True)
        made = torch.cat([quick_squares(torch.bmm(g.mT, x).flatten(1)) for x, g in pairs])
        diagonals = (quick_squares(self.inputs) * quick_squares(self.output_grads)).sum(1)
        return squares_of_terms(made, diagonals, lost_in(self.shape.numel()))

    def block_sum(self, weights: Tensor) -> Tensor:
        """``(w ⊙ g)ᵀ x`` over records and positions at once: one matrix product."""
        x, g = self.inputs, self.output_grads
        w = weights.to(g.dtype)[:, None, None]
        if g.shape[2] <= x.shape[2]:  # scale the smaller of the two
            return (g * w).flatten(0, 1).T @ x.flatten(0, 1)
        return g.flatten(0, 1).T @ (x * w).flatten(0, 1)

    def explicit(self) -> Tensor:
        """``gᵀ x`` for every record."""
        explicit = torch.bmm(_aligned(self.output_grads).mT, _aligned(self.inputs))
        return explicit[:, : self.shape[0], : self.shape[1]]

    def transpose(self) -> Outer:
        """The same gradients seen as those of the transposed weight."""
        return Outer(self.output_grads, self.inputs)


def smallest(factor: Outer) -> Factor:
    """The gradients themselves where they are smaller: norm and sum then need one product, not two."""
    if factor.inputs.shape[1] > 1 and factor.explicit_is_smaller:
        return Dense(factor.explicit())
    return factor


def gram(vectors: Tensor) -> Tensor:
    """``<v_l, v_m>`` for all pairs of positions of each record: ``[R, L, D] -> [R, L, L]``."""
    L, vectors = vectors.shape[1], _aligned(vectors)
    return torch.bmm(vectors, vectors.mT)[:, :L, :L]


def largest_on_diagonal(grams: Tensor) -> Tensor:
    """``max_l <v_l, v_l>`` of every record: no entry of its Gram matrix is larger."""
    return grams.diagonal(dim1=1, dim2=2).amax(1)


def _aligned(vectors: Tensor) -> Tensor:
    """Every record's matrix, and every product of two of them, begins at a multiple of the alignment."""
    return filled_up(vectors, -1, -2)
