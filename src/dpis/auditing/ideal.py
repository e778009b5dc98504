"""The ideal attacker of a claim, simulated: how much could be guessed if the mechanism leaked all that it may.

Nothing here looks at a run. So the number of guesses that serves the ideal attacker best may be fixed from it, and
what a theorem makes of these guesses is the ceiling of an audit with so many canaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpis.auditing.bounds import Guesses
from dpis.auditing.scores import Scored, log_ratio
from dpis.mechanism import RunPlan

Array = NDArray[np.float64]

_TRIALS = 8
_MOST_NORMALS = 40_000_000
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
"""Of the canaries, to guess about."""
_IN = (1.0, 0.5)
"""Of the guesses, "in": where records are drawn rarely, there is less to be said for "out"."""


@dataclass(frozen=True)
class Rule:
    """So many canaries with the highest scores are guessed "in", so many with the lowest "out"; the rest not at all."""

    inside: int
    outside: int

    def guesses(self, scored: Scored) -> Guesses:
        """By these scores."""
        scores = np.concatenate([scored.with_canary, scored.without])
        truth = np.arange(len(scores)) < len(scored.with_canary)
        shuffled = np.random.default_rng(0).permutation(
            len(scores)
        )  # ties say nothing of the truth
        order = shuffled[np.argsort(scores[shuffled], kind="stable")]
        right = (
            truth[order[len(order) - self.inside :]].sum() + (~truth[order[: self.outside]]).sum()
        )
        return Guesses(len(scores), self.inside + self.outside, int(right))


def ideal_scores(plan: RunPlan, canaries: int, seed: int = 0) -> list[Scored]:
    """Scores of canaries of the worst case under a plan's noise and rates, from some trials."""
    workload, generator = plan.workload, np.random.default_rng(seed)
    trials = max(2, min(_TRIALS, _MOST_NORMALS // max(1, canaries * workload.steps)))
    scores = np.zeros((trials, canaries))
    inside = generator.random((trials, canaries)) < 0.5
    terms = zip(workload.sampling_rate, plan.privacy.planned_noise, strict=True)
    for rate, z in terms:
        for _ in range(workload.steps_per_epoch):
            drawn = inside & (generator.random(inside.shape) < rate)
            scores += log_ratio(drawn + z * generator.standard_normal(inside.shape), rate, z)
    return [Scored(row[own], row[~own]) for row, own in zip(scores, inside, strict=True)]


def rules(canaries: int) -> list[Rule]:
    """Those that are tried."""
    made = {max(1, round(share * canaries)) for share in _SHARES}
    return [Rule(round(n * part), n - round(n * part)) for n in sorted(made) for part in _IN]


def best_rule(trials: Sequence[Scored], bound: Callable[[Guesses], float]) -> tuple[Rule, float]:
    """The rule that gives the ideal attacker the largest bound, and that bound."""
    bounds = {rule: bound(typical(rule, trials)) for rule in rules(len(trials[0]))}
    best = max(bounds, key=lambda rule: bounds[rule])
    return best, bounds[best]


def typical(rule: Rule, trials: Sequence[Scored]) -> Guesses:
    """What the rule gets right in the middle one of the trials."""
    guesses = [rule.guesses(scored) for scored in trials]
    middle = int(np.median([one.right for one in guesses]))
    return Guesses(guesses[0].canaries, guesses[0].made, middle)
