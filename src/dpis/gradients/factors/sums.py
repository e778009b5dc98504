"""Weighted sums of gradients: in blocks of records, and in float64 where float32 does not hold the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import isfinite
from typing import TypeVar

import torch
from torch import Tensor

from dpis.gradients.factors.base import Factor
from dpis.gradients.factors.selection import contributing

F = TypeVar("F", bound=Factor)

RECORDS_AT_ONCE = 512
"""So many records are summed in float32; blocks of them are added up in float64.

A sum of ``m`` contributions of norm one has norm at most ``m``, so each addition rounds by at most ``6e-8 m`` of one
contribution. With 512 that is 3e-5, and as much was measured for whole blocks of contributions that all point the same
way. One record more may shift all blocks behind it, whose errors are independent: ``3e-5 √blocks``, 3e-4 for
`MANY_RECORDS`.
"""

MANY_RECORDS = 1 << 15
"""More than these are summed in float64 within their blocks, too."""

LEAST_WEIGHT = 1e-30
"""Smaller weights lose digits in float32."""


def summed(factor: F, weights: Tensor, of: Callable[[F, Tensor], Tensor]) -> Tensor:
    """``Σ_i weights_i G_i`` over the records of nonzero weight, block by block.

    Args:
        factor: the gradients.
        weights: one for each record.
        of: the sum of one block.

    Returns:
        In float64 where several blocks were added up, else as ``of`` gave it.
    """
    factor, weights = contributing(factor, weights)
    if factor.records <= RECORDS_AT_ONCE:
        return of(factor, weights)
    total = torch.zeros((), dtype=torch.float64, device=weights.device)
    for first in range(0, factor.records, RECORDS_AT_ONCE):
        place = slice(first, min(first + RECORDS_AT_ONCE, factor.records))
        block: F = factor.select(place)  # type: ignore[assignment]
        if factor.records > MANY_RECORDS:
            block = block.double()  # type: ignore[assignment]
        part = of(block, weights[place])
        total = total.add_(part) if total.ndim else part.double()
    return total


def summed_products(factor: F, weights: Tensor, of: Callable[[F, Tensor], Tensor]) -> Tensor:
    """The same for gradients that are products, of which one side is scaled by the weights.

    A scaled side may be too large for float32 where the other is tiny, or zero. The sum is not finite then, and made
    anew in float64.
    """

    def block_of(block: F, own: Tensor) -> Tensor:
        if not len(own):
            return of(block, own)
        if float(own.abs().amin()) >= LEAST_WEIGHT:
            total = of(block, own)
            if isfinite(float(total.sum())):
                return total
        return of(block.double(), own)  # type: ignore[arg-type]

    return summed(factor, weights, block_of)


def widest(sums: Sequence[Tensor]) -> torch.dtype:
    """A precision that holds all of them: some may be float64, others not."""
    return reduce(torch.promote_types, (total.dtype for total in sums))
