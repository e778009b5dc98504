"""The mechanism under attack: as many runs of the worst case as there are coordinates, in one run.

Every record has a gradient along a coordinate of its own. Coins are tossed by record, noise is made by coordinate, and
nobody else's contribution is there; so the coordinates are independent runs with one canary each. Half of the records,
by secret fair coins, are left out: their coordinates are runs without. Sampler, weights, sum, noise and journal are
the product's own, and all coordinates pass through them at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpis.accounting import Budget
from dpis.auditing.bounds import (
    FALSE_ALARM,
    Rates,
    Worth,
    best_threshold,
    epsilon_of_rates,
    gaussian_estimate,
    rates_of,
    shift_over,
)
from dpis.auditing.canaries import CANARY_NORM
from dpis.auditing.findings import LOW_FALSE_POSITIVE_RATE, Findings, attack_points, drawn_curve
from dpis.auditing.scaling import curve_of_plan, largest_epsilon_refuted
from dpis.auditing.scores import Scored, log_ratio
from dpis.errors import InputError
from dpis.mechanism import Config, EventCounter, Mechanism, RunPlan, make_plan
from dpis.randomness import Key

Array = NDArray[np.float64]

AT_ONCE = 1 << 20
"""Coordinates of one mechanism."""


@dataclass(frozen=True)
class Diagonal:
    """Gradients of some records, each along a coordinate of its own: what a tape of the real engine is asked for.

    Attributes:
        places: the coordinate of each.
        lengths: of the gradients.
        coordinates: how many there are in all.
    """

    places: Tensor
    lengths: Tensor
    coordinates: int

    def norms(self) -> Tensor:
        """Of every record."""
        return self.lengths

    def weighted_sums(self, weights: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The weighted gradients, each in its place."""
        total = torch.zeros(self.coordinates)
        total[self.places] = (weights * self.lengths).to(total.dtype)
        yield "canaries", total


def mechanism_scores(
    plan: RunPlan, coordinates: int, key: Key, norm: float = CANARY_NORM
) -> Scored:
    """One whole run of a mechanism over canaries, scored by coordinate.

    Args:
        plan: what is tried.
        coordinates: how many runs with one canary, or without.
        key: of the run; it tosses the canaries' coins, too.
        norm: of the canaries' gradients, in units of the first clip norm.
    """
    inside = key.stream("audit-canaries", 0).uniforms(coordinates) < 0.5
    places = torch.from_numpy(inside.nonzero()[0])
    length = norm * plan.config.clip_norm
    lengths = torch.full((len(places),), length, dtype=torch.float64)
    journal = EventCounter(plan.privacy.guard())
    mechanism = Mechanism(plan, len(places), key, journal)
    parameters = {"canaries": torch.zeros(coordinates)}
    scores = np.zeros(coordinates)
    for _ in range(plan.workload.epochs):
        terms = mechanism.begin_epoch(lengths if mechanism.wants_all_norms else None)
        unit = mechanism.update_scale * terms.clip_norm / terms.equivalent_batch
        while mechanism.steps_left:
            draw = mechanism.draw()
            total = mechanism.start_sum(draw, parameters)
            mechanism.add(total, Diagonal(places[draw.indices], lengths[draw.indices], coordinates))
            released = mechanism.release_sum(total)["canaries"].double().numpy() / unit
            scores += log_ratio(released, terms.sampling_rate, terms.noise_multiplier)
        mechanism.end_epoch()
    return Scored(scores[inside], scores[~inside])


def audit_mechanism(
    config: Config, *, runs: int = 1_000_000, delta: float | None = None, key: Key | None = None
) -> Findings:
    """Attack the mechanism of a config: the real sampler, contribution, noise and journal, on their worst case.

    Args:
        config: what is tried, with its claim.
        runs: of the mechanism, a third of them to choose the attack, the rest to try it.
        delta: of the bound; by default the claimed one, or the least that so many runs can say much about.
        key: for tests; by default fresh.

    Example:
        >>> config = Config(epsilon=2.0, delta=1e-2, n_public=10, batch_size=10, epochs=1)
        >>> found = audit_mechanism(config, runs=20_000, key=Key.from_seed(1))
        >>> 1.6 < found.curve_bound < 2.0, found.refuted
        (True, False)
    """
    plan = make_plan(config)
    if plan.claim is None:
        raise InputError(f"{config.method} claims nothing, so there is nothing to audit")
    if runs < 100:
        raise InputError(f"an audit needs at least 100 runs, found {runs}")
    key = Key.fresh() if key is None else key
    delta = max(plan.claim.delta, min(LEAST_EVENTS / runs, 0.05)) if delta is None else delta
    parts = [
        mechanism_scores(plan, min(AT_ONCE, runs - begin), _child(key, begin))
        for begin in range(0, runs, AT_ONCE)
    ]
    seen = Scored(
        np.concatenate([part.with_canary for part in parts]),
        np.concatenate([part.without for part in parts]),
    )
    return findings_of_scores("mechanism", plan, seen, delta)


LEAST_EVENTS = 2000.0
"""Runs in which an event of probability delta occurs: fewer make a bound that is mostly caution."""


def _child(key: Key, number: int) -> Key:
    """A key of its own for every part; seeded, if the first one is."""
    return Key(key.stream("audit-part", number).bytes(32), key.seed)


def findings_of_scores(attack: str, plan: RunPlan, seen: Scored, delta: float) -> Findings:
    """Choose an event on a third of the scores of each world, try it on the rest, and say what that shows."""
    claim = plan.claim
    assert claim is not None
    first_in, last_in = _parts(seen.with_canary)
    first_out, last_out = _parts(seen.without)
    curve = curve_of_plan(plan)

    def rates(worth: Worth) -> Rates:
        return rates_of(best_threshold(first_in, first_out, worth), last_in, last_out)

    at_delta = rates(lambda least, most: epsilon_of_rates(least, most, delta))
    by_curve = rates(shift_over(curve))
    return Findings(
        attack=attack,
        epsilon=claim.epsilon,
        delta=claim.delta,
        bound=at_delta.epsilon(delta),
        bound_delta=delta,
        claim_at_bound_delta=_claimed(claim, curve.epsilon(delta), delta),
        curve_bound=largest_epsilon_refuted(plan, by_curve.refute),
        estimate=gaussian_estimate(seen.with_canary, seen.without, claim.delta),
        confidence=1 - FALSE_ALARM,
        canaries=len(seen.with_canary) + len(seen.without),
        advantage=curve.advantage,
        true_positives=float(curve.true_positive_rate(LOW_FALSE_POSITIVE_RATE)[0]),
        claim_curve=drawn_curve(curve),
        attack_points=attack_points(seen.with_canary, seen.without),
    )


def _claimed(claim: Budget, by_curve: float, delta: float) -> float:
    return claim.epsilon if delta <= claim.delta else min(claim.epsilon, by_curve)


def _parts(scores: Array) -> tuple[Array, Array]:
    third = math.ceil(len(scores) / 3)
    return scores[:third], scores[third:]
