"""Renyi divergences of the two events at integer orders, and their conversion to epsilon.

The closed form of the paper's Eq. 13 in the normal form of docs/notation.md. It is here because a run must
solve for its next noise in milliseconds; tests hold it against dp-accounting, and `dpis verify` uses
dp-accounting alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import dp_accounting
import numpy as np
from dp_accounting import rdp
from numpy.typing import NDArray
from scipy.special import gammaln

from dpis.accounting.budget import Budget
from dpis.accounting.events import Composition, Event, Gaussian

INTEGER_ORDERS: tuple[int, ...] = tuple(range(2, 129)) + tuple(
    sorted({round(128 * 2 ** (i / 8)) for i in range(1, 57)})
)
"""2 to 128 one by one, then eight an octave up to 16384 (small epsilons want large orders)."""


@lru_cache(maxsize=len(INTEGER_ORDERS))
def _subset_sizes(order: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """``m = 2..order`` and ``log C(order, m)``."""
    m = np.arange(2.0, order + 1.0)
    return m, gammaln(order + 1.0) - gammaln(m + 1.0) - gammaln(order - m + 1.0)


def renyi_divergence(event: Event, order: int) -> float:
    """``ρ(α)``: the Renyi divergence of an event at integer ``order`` α >= 2, both directions bounded.

    Gaussian: ``α / (2 z²)``. Poisson-sampled Gaussian of rate ``π`` and multiplier ``z``::

        ρ(α) = 1/(α-1) · log Σ_{m=0..α} C(α,m) (1-π)^(α-m) π^m exp(m(m-1) / (2z²))

    summed as ``log1p(Σ_{m>=2} ... expm1(·))``: every term is positive, so nothing cancels and the value is
    never negative. The reverse direction is never larger (docs/soundness.md).
    """
    if isinstance(event, Gaussian):
        return order / (2.0 * event.noise_multiplier**2)
    rate, z = event.sampling_rate, event.noise_multiplier
    if rate == 1.0:
        return order / (2.0 * z**2)
    m, log_choose = _subset_sizes(order)
    exponent = m * (m - 1.0) / (2.0 * z**2)
    log_expm1 = exponent + np.log(-np.expm1(-exponent))
    terms = log_choose + m * math.log(rate) + (order - m) * math.log1p(-rate) + log_expm1
    largest = float(terms.max())
    log_excess = largest + math.log(float(np.exp(terms - largest).sum()))
    return float(np.logaddexp(0.0, log_excess)) / (order - 1)


def composed_divergence(composition: Composition, order: int) -> float:
    """Renyi divergences add up: ``Σ count · ρ_event(order)``, summed exactly."""
    return math.fsum(count * renyi_divergence(event, order) for event, count in composition)


def conversion_offset(order: int, delta: float) -> float:
    """``off(α) = log(1 - 1/α) - (log δ + log α)/(α - 1)``: a divergence ρ at order α gives epsilon ``ρ + off(α)``."""
    return math.log1p(-1.0 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def renyi_budget(budget: Budget, order: int) -> float:
    """``ε - off(α)``: the Renyi divergence at ``order`` that a budget has room for (may be below 0)."""
    return budget.epsilon - conversion_offset(order, budget.delta)


def best_order(
    composition: Composition, delta: float, orders: Iterable[int] = INTEGER_ORDERS
) -> tuple[float, int]:
    """The smallest epsilon (not below 0) over integer orders, and the order that gives it.

    The minimum is sound for a composition fixed beforehand; a run whose events depend on what it
    released must stay at one order (`dpis.accounting.filter`).
    """
    merged = tuple(composition)
    epsilon, order = min(
        (
            math.fsum(count * renyi_divergence(event, order) for event, count in merged)
            + conversion_offset(order, delta),
            order,
        )
        for order in orders
    )
    return max(0.0, epsilon), order


def epsilon_by_rdp(composition: Composition, delta: float) -> float:
    """Epsilon at ``delta`` by Renyi divergences, the smallest over orders (not below 0).

    Integer orders first; where the best of them is small, fractional orders around it too. A
    fractional order that does not converge counts as ``inf``, so it never decides.
    """
    if not composition.events:
        return 0.0
    epsilon, order = best_order(composition, delta)
    if order > 16:
        return epsilon
    around = [
        order + tenths / 10 for tenths in range(-8, 9, 2) if tenths and order + tenths / 10 > 1
    ]
    accountant = rdp.RdpAccountant(around, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(composition.to_dp_accounting())
    fractional = float(accountant.get_epsilon(delta))
    return min(epsilon, math.inf if math.isnan(fractional) else max(0.0, fractional))
