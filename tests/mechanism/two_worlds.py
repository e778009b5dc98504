"""Two worlds, with and without a canary: how large epsilon must at least be, by what can be told apart.

A claim (epsilon, delta) says ``P(S) <= exp(epsilon)·Q(S) + delta`` for every event S and both orders of the
worlds. So any event whose probabilities are bounded by runs, one from below and one from above, bounds epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import beta

from dpis.group import Group
from dpis.mechanism import Config
from dpis.randomness import Key

from .systems import PlainSums, Small

FALSE_ALARM = 1e-3
"""How likely a lower bound is wrong, at most: half of it for either probability (Clopper and Pearson)."""
OTHERS = 7
CANARY, AWAY = 0, 1


@dataclass(frozen=True)
class Scenario:
    """What is tried.

    Attributes:
        config: the run, and its claim.
        runs: how many test the chosen event in each world; a third as many choose it.
        canary_norm: of the canary's gradient, in all steps.
        last_norm: what was seen of the canary before the run; inf is nothing.
        engine: the real one, instead of the stand-in.
    """

    config: Config
    runs: int
    canary_norm: float = 3.0
    last_norm: float = math.inf
    engine: Any = None


def released(
    scenario: Scenario, canary: bool, seed: int, group: Group | None = None
) -> list[float]:
    """What one run gives away: projections on the canary's direction, and the terms of its epochs."""
    records = torch.zeros(OTHERS + canary, 2, dtype=torch.float64)
    records[:OTHERS, AWAY] = 0.7
    if canary:
        records[OTHERS, CANARY] = scenario.canary_norm
    gradients = PlainSums(2) if scenario.engine is None else scenario.engine
    key = Key.from_seed(seed)
    system = Small(scenario.config, records, key, gradients=gradients, group=group)
    if canary and OTHERS in system.mechanism.own_records:
        last = torch.tensor([scenario.last_norm])
        system.mechanism.sampler.observe(torch.tensor([OTHERS]), last)
    projections, kappas, clip_norms = [], [], []
    for _ in range(scenario.config.epochs):
        terms = system.begin()
        kappas.append(terms.kappa)
        clip_norms.append(terms.clip_norm)
        unit = terms.clip_norm / terms.equivalent_batch * terms.noise_multiplier
        while system.mechanism.steps_left:
            projections.append(float(system.step()[CANARY]) / unit)
        system.mechanism.end_epoch()
    return [sum(projections), max(projections), max(kappas), clip_norms[-1]]


def observe(
    scenario: Scenario, runs: int, first_seed: int, group: Group | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Runs without the canary, and with it."""
    return tuple(
        np.array(
            [released(scenario, canary, first_seed + 2 * i + canary, group) for i in range(runs)]
        )
        for canary in (False, True)
    )


def bound(hits: int, false_hits: int, runs: int, delta: float) -> float:
    """Epsilon at least, from how often an event occurred in either world; -inf: nothing is known."""
    tail = FALSE_ALARM / 2
    least = beta.ppf(tail, hits, runs - hits + 1) if hits else 0.0
    most = beta.isf(tail, false_hits + 1, runs - false_hits) if false_hits < runs else 1.0
    return math.log((least - delta) / most) if least > delta else -math.inf


def events(worlds: tuple[np.ndarray, np.ndarray], column: int, threshold: float, above: bool):
    """How often the number is beyond the threshold, in either world."""
    return [
        int((world[:, column] > threshold if above else world[:, column] < threshold).sum())
        for world in worlds
    ]


Observe = Callable[[int, int], tuple[np.ndarray, np.ndarray]]
"""``observe(runs, first_seed)``: rows of numbers from runs without the canary, and from runs with it."""


def lower_bound(scenario: Scenario, group: Group | None = None) -> float:
    """Of what the mechanism releases; over several ranks, the same on each."""

    def observed(runs: int, first_seed: int) -> tuple[np.ndarray, np.ndarray]:
        return observe(scenario, runs, first_seed, group)

    return lower_bound_of(observed, scenario.runs, scenario.config.delta)


def lower_bound_of(observe: Observe, runs: int, delta: float) -> float:
    """The event is chosen on some runs and tried on others: one bound, one chance to err."""
    few = max(60, runs // 3)
    worlds = observe(few, 10_000_000)
    best, chosen = -math.inf, None
    for column in range(worlds[0].shape[1]):
        values = np.unique(np.quantile(np.concatenate(worlds)[:, column], np.linspace(0, 1, 60)))
        for threshold in (values[1:] + values[:-1]) / 2:
            for above in (True, False):
                counts = events(worlds, column, threshold, above)
                for order in (counts, counts[::-1]):
                    found = bound(order[1], order[0], few, delta)
                    if found > best:
                        best, chosen = found, (column, threshold, above, order is counts)
    if chosen is None:
        return 0.0
    column, threshold, above, forwards = chosen
    counts = events(observe(runs, 0), column, threshold, above)
    without, with_canary = counts if forwards else counts[::-1]
    return max(0.0, bound(with_canary, without, runs, delta))
