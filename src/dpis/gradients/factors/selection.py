"""Records of weight zero are left out before anything is multiplied."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from dpis.gradients.factors.base import Factor, Kept

F = TypeVar("F", bound=Factor)


def chosen(tensor: Tensor, kept: Kept) -> Tensor:
    """The rows of a tensor that are kept: a view where they are a slice."""
    return tensor[kept] if isinstance(kept, slice) else tensor.index_select(0, kept)


def kept_by(weights: Tensor) -> Kept | None:
    """The records of non-zero weight; None: all. If only the last ones have none, what is kept is a slice."""
    if bool(weights.all()):
        return None
    kept = weights.nonzero().squeeze(1)
    first = slice(len(kept))
    return first if bool(weights[first].all()) else kept


def contributing(factor: F, weights: Tensor) -> tuple[F, Tensor]:
    """The records of non-zero weight, with their weights.

    Leaving records out (instead of multiplying by zero) saves their work, and keeps a record whose
    gradient is not finite from spoiling the sum: ``0 * nan`` is ``nan``.
    """
    kept = kept_by(weights)
    if kept is None:
        return factor, weights
    return factor.select(kept), chosen(weights, kept)  # type: ignore[return-value]
