"""Noisy sums over all records beside the gradients: norm sums and the number of records, their noise and bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpis.accounting.budget import Budget
from dpis.accounting.renyi import renyi_budget
from dpis.errors import InputError

BUDGET_SHARE = 0.02
"""Of the budget, what all norm sums together may cost."""

NOISE_SHARE, LEAST_COUNT_NOISE = 0.02, 20.0
"""Of n_public, the least noise of a norm sum and of a count; and the least of a count whatever n_public."""


def count_noise_multiplier(n_public: int) -> float:
    """``σ_N`` of a released number of records: so large that it costs next to nothing."""
    return max(LEAST_COUNT_NOISE, NOISE_SHARE * n_public)


def norm_noise_multiplier(budget: Budget, n_public: int, norm_sums: int, order: int) -> float:
    """``σ_K = max(0.02·n_public, the value at which all norm sums cost 2 % of the budget at that order)``."""
    share = BUDGET_SHARE * renyi_budget(budget, order)
    costs_its_share = math.sqrt(norm_sums * order / (2 * share))
    return max(NOISE_SHARE * n_public, costs_its_share)


def norm_sum_cost(budget: Budget, n_public: int, norm_sums: int, order: int) -> float:
    """What all norm sums together cost at that order."""
    sigma_K = norm_noise_multiplier(budget, n_public, norm_sums, order)
    return norm_sums * order / (2 * sigma_K**2)


@dataclass(frozen=True, slots=True)
class NormSumBounds:
    """The public interval a released norm sum is clipped to: ``[b·C/rate_cap, n_public·C]``."""

    lowest: float
    highest: float

    @classmethod
    def create(
        cls, *, n_public: int, batch_size: int, clip_norm: float, rate_cap: float = 0.5
    ) -> NormSumBounds:
        """Bounds that keep every inclusion probability at or below ``rate_cap`` and kappa at or below 1."""
        if not 0 < rate_cap <= 1:
            raise InputError(f"rate_cap must lie in (0, 1], found {rate_cap!r}")
        if not (math.isfinite(clip_norm) and clip_norm > 0):
            raise InputError(f"clip norm must be a finite number above 0, found {clip_norm!r}")
        if batch_size > n_public * rate_cap:
            raise InputError(
                f"batch size {batch_size} over n_public {n_public} is above rate_cap {rate_cap:g}: adaptive "
                "mode has no room to lower kappa. Use a smaller batch, a larger rate_cap, or the method dpis"
            )
        return cls(batch_size * clip_norm / rate_cap, n_public * clip_norm)

    def clip(self, noisy_norm_sum: float) -> float:
        """``K_tilde`` from ``K'``. NaN gives the upper bound, which is always safe (kappa = 1)."""
        if math.isnan(noisy_norm_sum):
            return self.highest
        return min(max(noisy_norm_sum, self.lowest), self.highest)
