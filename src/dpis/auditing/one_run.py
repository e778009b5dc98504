"""One run with canaries: from what the attack saw to bounds, an estimate, and the ceiling of what could be shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dpis.accounting import Budget
from dpis.auditing.bounds import (
    FALSE_ALARM,
    Guesses,
    curve_refuted,
    gaussian_estimate,
    one_run_bound,
)
from dpis.auditing.findings import LOW_FALSE_POSITIVE_RATE, Findings, attack_points, drawn_curve
from dpis.auditing.ideal import Rule, best_rule, ideal_scores
from dpis.auditing.scaling import curve_of_plan, largest_epsilon_refuted
from dpis.auditing.scores import Scored
from dpis.errors import InputError
from dpis.mechanism import RunPlan


@dataclass(frozen=True)
class Strategy:
    """What an attack will do, fixed before the run.

    Attributes:
        rule: how many canaries it will guess about, for a bound at the claimed delta.
        curve_rule: the same for a bound by trade-off curves.
        ceiling: the bound that `rule` gives to an attacker of a mechanism that leaks all that it may.
        curve_ceiling: likewise; None where the claim has no curve of its own.
    """

    rule: Rule
    curve_rule: Rule
    ceiling: float
    curve_ceiling: float | None

    @classmethod
    def of(cls, plan: RunPlan, canaries: int) -> Strategy:
        """The best for the ideal attacker of this plan."""
        return _strategy(plan, canaries)


@lru_cache(maxsize=8)
def _strategy(plan: RunPlan, canaries: int) -> Strategy:
    claim, trials = _claimed(plan), ideal_scores(plan, canaries)
    rule, ceiling = best_rule(trials, lambda guesses: one_run_bound(guesses, claim.delta))
    if curve_bound(plan, Guesses(canaries, 0, 0)) is None:
        return Strategy(rule, rule, ceiling, None)
    curve_rule, curve_ceiling = best_rule(trials, lambda g: curve_bound(plan, g) or 0.0)
    return Strategy(rule, curve_rule, ceiling, curve_ceiling)


def curve_bound(plan: RunPlan, guesses: Guesses) -> float | None:
    """Epsilon at least, by the plan's own curve with its noise scaled; None where it has none."""
    return largest_epsilon_refuted(plan, lambda curve: curve_refuted(guesses, curve))


def findings_of_canaries(
    attack: str,
    plan: RunPlan,
    scored: Scored,
    strategy: Strategy,
    accuracy: tuple[float, float] | None = None,
    notes: Sequence[str] = (),
) -> Findings:
    """What one run with canaries shows.

    Args:
        attack: its name.
        plan: of the run.
        scored: what the attack saw.
        strategy: fixed before the run.
        accuracy: of the audited model, and of one without canaries.
        notes: what else a reader must know.
    """
    claim, curve = _claimed(plan), curve_of_plan(plan)
    guesses = strategy.rule.guesses(scored)
    return Findings(
        attack=attack,
        epsilon=claim.epsilon,
        delta=claim.delta,
        bound=one_run_bound(guesses, claim.delta),
        bound_delta=claim.delta,
        claim_at_bound_delta=claim.epsilon,
        curve_bound=curve_bound(plan, strategy.curve_rule.guesses(scored)),
        estimate=gaussian_estimate(scored.with_canary, scored.without, claim.delta),
        ceiling=strategy.ceiling,
        curve_ceiling=strategy.curve_ceiling,
        confidence=1 - FALSE_ALARM,
        canaries=len(scored),
        guesses=guesses.made,
        right=guesses.right,
        advantage=curve.advantage,
        true_positives=float(curve.true_positive_rate(LOW_FALSE_POSITIVE_RATE)[0]),
        claim_curve=drawn_curve(curve),
        attack_points=attack_points(scored.with_canary, scored.without),
        accuracy=accuracy,
        notes=tuple(notes),
    )


def _claimed(plan: RunPlan) -> Budget:
    if plan.claim is None:
        raise InputError(f"{plan.config.method} claims nothing, so there is nothing to audit")
    return plan.claim
