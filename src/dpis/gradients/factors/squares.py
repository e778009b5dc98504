"""Squared norms of rows: fast, and exact to the last few bits whatever their length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 1024
MOST_CANCELLED = 100
"""How much larger than their sum the diagonal terms of a Gram matrix may be."""


def squared_norms(rows: Tensor) -> Tensor:
    """``||row||²`` for every row, ``[..., length] -> [...]``, in float64: a square may exceed what float32 holds.

    ``vector_norm`` makes no copy, but adds up in the precision of its input: four million entries
    of float32 are off by 2e-4. So long rows are cut into blocks, whose squares are then summed.

    Example:
        >>> squared_norms(torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
        tensor([25.,  1.], dtype=torch.float64)
    """
    length = rows.shape[-1]
    if length <= BLOCK:
        return _norms(rows).double().square()
    whole = length - length % BLOCK
    blocks = rows[..., :whole].reshape(*rows.shape[:-1], -1, BLOCK)
    squares = _norms(blocks).double().square().sum(-1)
    return squares if whole == length else squares + squared_norms(rows[..., whole:])


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
    return torch.where(cancelled, exact(), sums) if bool(cancelled.any()) else sums


def _norms(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms
