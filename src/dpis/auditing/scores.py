"""How much a release looks like one that a canary took part in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Scored:
    """What an attack saw of both worlds: one number a canary, larger where it looks more like "in"."""

    with_canary: Array
    without: Array

    def __len__(self) -> int:
        """How many canaries."""
        return len(self.with_canary) + len(self.without)


def log_ratio(projections: Array, rate: float, noise_multiplier: float) -> Array:
    """``log dP/dQ`` of one release, by its projection on the canary's direction: the most powerful score.

    Args:
        projections: in units of the largest contribution of one record.
        rate: the canary's inclusion probability ``π``.
        noise_multiplier: ``z``.
    """
    drawn: Array = (projections - 0.5) / noise_multiplier**2
    if rate == 1.0:
        return drawn
    ratios: Array = np.logaddexp(math.log1p(-rate), math.log(rate) + drawn)
    return ratios
