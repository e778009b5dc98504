"""Squared norms: found fast, with a bound on what they lack, and made anew where that is too much.

Squares of float32 are lost below 1e-38 and infinite above 3e38, though the numbers themselves are ordinary gradients or
factors of some; and sums of Gram terms may cancel. So every way to a squared norm also says how much may be missing.
Squared norms and bounds of all parts of a gradient are added up first. Only where the bound is not far below the total,
or the total is not finite, is a record computed again, in float64, which holds the square of a product of any two
numbers of float32. A squared norm lacks at most 1e-4 of itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1024
TINY = torch.finfo(torch.float32).tiny
"""The most that one operation of float32 loses when its result is too small for it."""
LARGEST_LOSS = 1e-4
"""What a squared norm may lack, as a part of itself."""
CANCELLED = 1e-6
"""What a sum of Gram terms in float32 may be off by, as a part of its diagonal terms; about 4e-8 was measured."""
LEAST_LEFT = 1e-9
"""No squared norm is taken for less than this part of its diagonal terms: a sum in float32 rounds by about 6e-8 of
their root, in no particular direction, which is 2e-3 of the root of this part. What is below is rounding."""


class Squares(NamedTuple):
    """Squared norms of all records, as fast as they can be had."""

    found: Tensor
    """``[records]``, float64."""
    lost: Tensor | float
    """The most that each may be off by in float32, as long as it is finite."""


def squares_of(rows: Tensor) -> Squares:
    """``||row||²`` for every row, ``[rows, length] -> [rows]``."""
    return Squares(quick_squares(rows), lost_in(rows.shape[-1]))


def product_of(one: Squares, other: Squares) -> Squares:
    """``||x||² ||g||²``, the squared norms of outer products."""
    lost = one.found * other.lost + other.found * one.lost + one.lost * other.lost
    return Squares(one.found * other.found, lost)


def squares_of_terms(terms: Tensor, diagonals: Tensor, lost: Tensor | float) -> Squares:
    """Squared norms that were summed from products of inner products: such terms may cancel.

    A norm that is too small would let a clipped gradient through that is too large.

    Args:
        terms: ``[records]``, the sums of all terms.
        diagonals: ``[records]``, the sums of those that are squares.
        lost: what a sum may lack because numbers were too small for float32.
    """
    diagonals = diagonals.double()
    found = torch.maximum(terms.double(), LEAST_LEFT * diagonals)
    return Squares(found, CANCELLED * diagonals + lost)


def total_of(squares: list[Squares]) -> Squares:
    """Added up, over parts that do not overlap."""
    if len(squares) == 1:
        return squares[0]
    found = torch.stack([each.found for each in squares]).sum(0)
    constant = sum(each.lost for each in squares if isinstance(each.lost, float))
    return Squares(
        found, sum((each.lost for each in squares if isinstance(each.lost, Tensor)), constant)
    )


def quick_squares(rows: Tensor) -> Tensor:
    """``||row||²``, ``[..., length] -> [...]``, in float64, where squares neither vanish nor overflow.

    ``vector_norm`` makes no copy, but adds up in the precision of its input: four million entries
    of float32 are off by 2e-4. So long rows are cut into blocks, whose squares are then summed.
    """
    length = rows.shape[-1]
    if length <= BLOCK:
        return torch.linalg.vector_norm(rows, dim=-1).double().square()  # type: ignore[no-any-return]
    whole = length - length % BLOCK
    blocks = rows[..., :whole].reshape(*rows.shape[:-1], -1, BLOCK)
    squares: Tensor = torch.linalg.vector_norm(blocks, dim=-1).double().square().sum(-1)
    return squares if whole == length else squares + quick_squares(rows[..., whole:])


def lost_in(products: int) -> float:
    """The most that a sum of so many products of float32 loses because they are too small."""
    return products * TINY


def doubtful(squares: Squares) -> Tensor:
    """Where squared norms lack too much, or are not finite."""
    return ~((squares.found * LARGEST_LOSS >= squares.lost) & (squares.found < torch.inf))
