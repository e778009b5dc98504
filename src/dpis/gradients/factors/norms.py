"""Squared norms: fast, and exact to the last few bits whatever the length of a row and the size of its numbers.

Squares of float32 are lost below 1e-38 and infinite above 3e38, though the numbers themselves are ordinary gradients or
factors of some. So every way to a norm in float32 knows how much may have been lost. Where that is not far below what
was found, or where the result is not finite, those records are computed anew in float64, which holds the square of a
product of any two numbers of float32. Elsewhere a squared norm lacks at most 1e-4 of itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dpis.gradients.factors.factor import Factor

BLOCK = 1024
MOST_CANCELLED = 100
"""How much larger than their sum the diagonal terms of a Gram matrix may be."""
LEAST_LEFT = 1e-9
"""No squared norm is taken for less than this part of its diagonal terms: a sum in float32 rounds by about 6e-8 of
their root, in no particular direction, which is 2e-3 of the root of this part. What is below is rounding."""
TINY = torch.finfo(torch.float32).tiny
"""The most that one operation of float32 loses when its result is too small for it."""
LARGEST_LOSS = 1e-4
"""What a squared norm may lack, as a part of itself."""
REMADE_AT_ONCE = 8
"""So many records are computed anew together. Always so many: the last bits must not depend on how many there are."""


def squared_norms(rows: Tensor) -> Tensor:
    """``||row||²`` for every row, ``[..., length] -> [...]``, in float64, whatever the size of the numbers.

    Example:
        >>> squared_norms(torch.tensor([[3.0, 4.0], [1e-30, 0.0]]))
        tensor([2.5000e+01, 1.0000e-60], dtype=torch.float64)
    """
    squares = quick_squares(rows)
    if rows.dtype == torch.float64 or not squares.numel():
        return squares
    lost = lost_in(rows.shape[-1])
    low, high = torch.aminmax(squares)
    if lost / LARGEST_LOSS <= float(low) and float(high) < torch.inf:
        return squares
    flat = rows.reshape(-1, rows.shape[-1])
    exact = lambda some: quick_squares(flat[some].double())  # noqa: E731
    return small_made_anew(squares.flatten(), lost, flat, exact).view(squares.shape)


def quick_squares(rows: Tensor) -> Tensor:
    """The same, where squares neither vanish nor overflow.

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


def small_made_anew(
    squares: Tensor, lost: float, sent: Tensor, exact: Callable[[Tensor], Tensor]
) -> Tensor:
    """Squared norms with those replaced that may lack too much, or are not finite.

    Args:
        squares: ``[records]``, float64.
        lost: what each may lack because numbers were too small.
        sent: as for ``and_not_zero``.
        exact: as for ``made_anew``.
    """
    doubtful = too_small(squares, lost / LARGEST_LOSS)
    return made_anew(squares, and_not_zero(doubtful, squares, sent), exact)


def too_small(squares: Tensor, least: Tensor | float) -> Tensor:
    """Which records to compute anew: those whose squares are below ``least``, or not finite."""
    return ~((squares >= least) & (squares < torch.inf))


def and_not_zero(doubtful: Tensor, squares: Tensor, sent: Tensor) -> Tensor:
    """Without the records whose squared norm is zero because all of these numbers are: padding, mostly.

    Args:
        doubtful: ``[records]``.
        squares: ``[records]``.
        sent: ``[records · rows, ...]``, output gradients or gradients.
    """
    zero = (doubtful & (squares == 0)).nonzero().squeeze(1)
    if not len(zero):
        return doubtful
    moved = torch.unflatten(sent, 0, (len(squares), -1)).index_select(0, zero).flatten(1).any(1)
    return doubtful.index_put((zero,), moved)


def made_anew(squares: Tensor, doubtful: Tensor, exact: Callable[[Tensor], Tensor]) -> Tensor:
    """Squared norms with those that are doubtful replaced.

    Args:
        squares: ``[records]``, float64.
        doubtful: which of them to replace.
        exact: from indices of records, their squared norms, computed in float64.
    """
    result = squares.clone()
    places = doubtful.nonzero().squeeze(1)
    for some in torch.split(places, REMADE_AT_ONCE) if len(places) else ():
        last = some[-1:].expand(REMADE_AT_ONCE - len(some))
        result[some] = exact(torch.cat([some, last]))[: len(some)]
    return result


def from_gram_terms(
    factor: Factor,
    found: tuple[Tensor, Tensor],
    lost: Tensor | float,
    sent: Tensor,
    explicit: Callable[[], Tensor],
) -> Tensor:
    """Squared norms that were summed from the terms of Gram matrices.

    Args:
        factor: whose gradients these are.
        found: ``[records]`` each: the sum of all terms, and that of the diagonal ones, which are squares.
        lost: what the sum may lack because numbers were too small, for every record.
        sent: as for ``and_not_zero``.
        explicit: the squared norms of all records by another way; only called where terms cancel.
    """
    sums, diagonals = found
    if sums.dtype == torch.float64:
        return where_terms_cancel(sums, diagonals, explicit)
    least = lost * (MOST_CANCELLED / LARGEST_LOSS)
    doubtful = ~((diagonals >= least) & (sums < torch.inf))
    if not bool(doubtful.any()):
        return where_terms_cancel(sums, diagonals, explicit)
    squares = where_terms_cancel(sums, diagonals.masked_fill(doubtful, 0.0), explicit)
    doubtful = and_not_zero(doubtful, squares, sent)
    return made_anew(squares, doubtful, lambda some: factor.select(some).double().squared_norms())


def where_terms_cancel(sums: Tensor, diagonals: Tensor, exact: Callable[[], Tensor]) -> Tensor:
    """Squared norms that were summed from Gram terms, made anew where those terms cancel.

    The rounding error of such a sum is about 4e-8 of its diagonal terms (float32), however small the sum itself: a norm
    that is too small would let a clipped gradient through that is too large.

    Args:
        sums: ``[records]``, as summed.
        diagonals: ``[records]``, the sum of the diagonal terms, which are squares.
        exact: the squared norms of all records by another way; only called where it is needed.
    """
    cancelled = diagonals > MOST_CANCELLED * sums
    sums = sums.double()
    if not bool(cancelled.any()):
        return sums
    return torch.where(cancelled, torch.maximum(exact(), LEAST_LEFT * diagonals.double()), sums)
