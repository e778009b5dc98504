"""Records of weight zero are left out before anything is multiplied."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from dpis.gradients.factors.base import Factor

F = TypeVar("F", bound=Factor)


def contributing(factor: F, weights: Tensor) -> tuple[F, Tensor]:
    """The records of non-zero weight, with their weights.

    Leaving records out (instead of multiplying by zero) saves their work, and keeps a record whose
    gradient is not finite from spoiling the sum: ``0 * nan`` is ``nan``.
    """
    kept = weights.nonzero().squeeze(1)
    if len(kept) == len(weights):
        return factor, weights
    return factor.select(kept), weights[kept]  # type: ignore[return-value]
