"""The claim's own curve with its noise scaled: a family that turns "this curve is refuted" into an epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from dpis.accounting import Composition, epsilon_by_pld
from dpis.auditing.tradeoff import Curve, scaled
from dpis.mechanism import RunPlan

LEAST_SCALE, MOST_SCALE = 0.25, 16.0
_STEPS = 11
"""Of the search for the scale, in logarithms: to a fifth of a percent."""


@lru_cache(maxsize=64)
def _curve(composition: Composition) -> Curve:
    return Curve.of_events(composition)


def composition_of_plan(plan: RunPlan) -> Composition | None:
    """What a plan releases, if that is fixed beforehand."""
    fixed = plan.claim is not None and not plan.privacy.adapts
    return plan.privacy.composition if fixed else None  # type: ignore[attr-defined]


def curve_of_plan(plan: RunPlan) -> Curve:
    """What the claim leaves to an attacker: by its events where they are fixed, else by (epsilon, delta) alone."""
    composition = composition_of_plan(plan)
    if composition is None:
        assert plan.claim is not None
        return Curve.of_claim(plan.claim.epsilon, plan.claim.delta)
    return _curve(composition)


def largest_epsilon_refuted(plan: RunPlan, refuted: Callable[[Curve], bool]) -> float | None:
    """Epsilon, at the claimed delta, of the weakest claim that is refuted: the plan's events with another noise.

    Args:
        plan: whose events.
        refuted: whether what was seen contradicts a curve. Curves of more noise promise more, and are refuted sooner.

    Returns:
        None where the events are not fixed beforehand; 0 where nothing is refuted.
    """
    composition, claim = composition_of_plan(plan), plan.claim
    if composition is None or claim is None:
        return None
    promising, safe = math.log(MOST_SCALE), math.log(LEAST_SCALE)
    if not refuted(_curve(scaled(composition, MOST_SCALE))):
        return 0.0
    for _ in range(_STEPS):
        middle = (promising + safe) / 2
        if refuted(_curve(scaled(composition, math.exp(middle)))):
            promising = middle
        else:
            safe = middle
    return epsilon_by_pld(scaled(composition, math.exp(promising)), claim.delta)
