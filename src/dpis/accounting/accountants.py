"""Epsilon of a composition that is fixed beforehand: by privacy loss distributions, or by Renyi divergences.

Both are upper bounds, by dp-accounting's mathematics; PLD is the tighter one.
"""

from __future__ import annotations

import math

import dp_accounting
from dp_accounting import rdp

from dpis.accounting import pld
from dpis.accounting.events import Composition
from dpis.accounting.renyi import best_order
from dpis.errors import InputError
from dpis.options import Accountant as Accountant

WIDEST_FINAL_INTERVAL = 1e-4
"""The widest discretisation of privacy loss that a final answer may rest on."""


def epsilon_by_pld(
    composition: Composition, delta: float, interval: float = WIDEST_FINAL_INTERVAL
) -> float:
    """Epsilon at ``delta`` by privacy loss distributions, add and remove directions, pessimistic.

    Args:
        composition: Events fixed before the data is touched.
        delta: Not so small that rounding could understate epsilon; see `dpis.accounting.pld`.
        interval: Discretisation of privacy loss. A finer one is tighter.

    Returns:
        An upper bound on epsilon, at least 0; ``inf`` where none could be established.
    """
    return pld.epsilon_of(composition, delta, interval)


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


def epsilon_of_events(composition: Composition, delta: float) -> float:
    """Epsilon at ``delta`` by PLD; by Renyi divergences where delta is too small for it."""
    if not 0 < delta < 1:
        raise InputError(f"delta must lie between 0 and 1, found {delta!r}")
    if not composition.events:
        return 0.0
    try:
        return epsilon_by_pld(composition, delta)
    except InputError:
        return epsilon_by_rdp(composition, delta)
