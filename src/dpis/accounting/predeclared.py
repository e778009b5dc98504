"""The predeclared plan: every event of a run fixed before the data is touched, with the least noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpis.accounting.budget import Adjacency, Budget
from dpis.accounting.calibration import smallest_parameter
from dpis.accounting.events import Composition
from dpis.accounting.filter import Guard, PlannedSequence
from dpis.accounting.header import CountSource, Header, Mode
from dpis.accounting.plans import BudgetedPlan
from dpis.accounting.pld import WIDEST_FINAL_INTERVAL, epsilon_by_pld
from dpis.accounting.renyi import best_order, epsilon_by_rdp
from dpis.accounting.workload import (
    Release,
    Workload,
    composition_of,
    planned_runs,
    releases_over_run,
)
from dpis.errors import InputError
from dpis.options import Accountant

_ROUGH_ORDERS = (*range(2, 13), 14, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096)
_DISCRETISATION_SHARE = 2e-4
"""How much of epsilon the discretisation of privacy loss may cost in a final answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredeclaredPlan(BudgetedPlan):
    """Every ``(π, z)`` of a run and every other release, and the epsilon they add up to."""

    accountant: Accountant
    noise_multipliers: tuple[float, ...]
    epsilon: float
    """Achieved, by the plan's accountant: never above the budget's."""

    @property
    def planned_noise(self) -> tuple[float, ...]:
        """As it will be."""
        return self.noise_multipliers

    def guard(self) -> Guard:
        """Follows the plan event by event."""
        return PlannedSequence(self.runs, self.budget.delta)

    def header(self, n_public_source: CountSource) -> Header:
        """With every planned event."""
        return Header(
            claim=self.budget,
            adjacency=self.adjacency,
            n_public=self.workload.n_public,
            n_public_source=n_public_source,
            mode=Mode.PREDECLARED,
            planned=self.runs,
        )

    @property
    def order(self) -> int:
        """The Renyi order at which the run spends least: it shares out what is spent among events."""
        return best_order(self.composition, self.budget.delta)[1]


def plan_predeclared(
    budget: Budget,
    workload: Workload,
    *,
    accountant: Accountant = Accountant.PLD,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    noise_shape: Sequence[float] | None = None,
    releases: Sequence[Release] = (),
) -> PredeclaredPlan:
    """The least noise that keeps ``budget``, never less private than asked.

    Args:
        budget: The promise to keep.
        workload: Sampling rates and step counts.
        accountant: How epsilon is computed.
        adjacency: Which data sets are kept apart; both are accounted for alike.
        noise_shape: ``z`` of each epoch relative to the others; constant if not given.
        releases: Other noisy statistics, with the noise they are given. They are paid for first.

    Raises:
        InputError: The releases alone cost more than the budget.
    """
    shape = (1.0,) * workload.epochs if noise_shape is None else tuple(noise_shape)
    if len(shape) != workload.epochs or not all(math.isfinite(s) and s > 0 for s in shape):
        raise InputError(
            f"the noise shape needs {workload.epochs} finite values above 0, found {shape!r}"
        )

    def composition(z: float) -> Composition:
        return composition_of(tuple(planned_runs(workload, [z * s for s in shape], releases)))

    _check_releases(budget, workload, releases, accountant)
    solve = _least_noise_by_pld if accountant is Accountant.PLD else _least_noise_by_rdp
    z, epsilon = solve(composition, budget)
    return PredeclaredPlan(
        budget=budget,
        adjacency=adjacency,
        accountant=accountant,
        workload=workload,
        noise_multipliers=tuple(z * s for s in shape),
        releases=tuple(releases),
        epsilon=epsilon,
    )


def _check_releases(
    budget: Budget, workload: Workload, releases: Sequence[Release], accountant: Accountant
) -> None:
    alone = releases_over_run(workload, releases)
    spent = epsilon_by_rdp(alone, budget.delta)
    if spent >= budget.epsilon and accountant is Accountant.PLD:
        spent = epsilon_by_pld(alone, budget.delta, 1e-3)
    if spent >= budget.epsilon:
        names = ", ".join(sorted({r.label for r in releases}))
        raise InputError(
            f"no noise meets epsilon = {budget.epsilon:g}: the releases beside the gradients ({names}) "
            f"already cost {spent:.4g}. Give them more noise, release less, or ask for a larger epsilon"
        )


CompositionOf = Callable[[float], Composition]


def _least_noise_by_rdp(composition: CompositionOf, budget: Budget) -> tuple[float, float]:
    def epsilon_of(z: float) -> float:
        return epsilon_by_rdp(composition(z), budget.delta)

    z = smallest_parameter(epsilon_of, budget.epsilon, guess=_rough_noise(composition, budget))
    return z, epsilon_of(z)


def _least_noise_by_pld(composition: CompositionOf, budget: Budget) -> tuple[float, float]:
    """Coarse answers find the place and the discretisation that matters there; fine ones decide."""
    rough = 0.95 * _rough_noise(composition, budget)  # PLD asks for a few percent less than Renyi
    curve = _PldCurve(composition, budget.delta, _renyi_slope(composition, budget.delta, rough))
    interval, guess = _fine_interval(curve, budget.epsilon, rough)
    z = smallest_parameter(
        lambda z: curve.epsilon(z, interval),
        budget.epsilon,
        guess=guess
        * (1 + 1.5e-4),  # a hair on the private side: the first fine answer mostly is the last
        slope=curve.slope_near(guess),
    )
    return z, curve.epsilon(z, interval)


class _PldCurve:
    """Epsilon as a function of noise, at several discretisations; nothing is computed twice."""

    def __init__(self, composition: CompositionOf, delta: float, slope: float):
        self._composition = composition
        self._delta = delta
        self._slope = slope  # a first idea of it
        self._known: dict[tuple[float, float], float] = {}

    def epsilon(self, z: float, interval: float) -> float:
        if (z, interval) not in self._known:
            self._known[z, interval] = epsilon_by_pld(self._composition(z), self._delta, interval)
        return self._known[z, interval]

    def slope_near(self, z: float) -> float:
        """``d log epsilon / d log z``, from the two nearest points at the finest discretisation that has two."""
        by_interval: dict[float, list[tuple[float, float]]] = {}
        for (x, interval), epsilon in self._known.items():
            if 0 < epsilon < math.inf:
                by_interval.setdefault(interval, []).append((x, epsilon))
        for interval in sorted(by_interval):
            points = sorted(by_interval[interval], key=lambda point: abs(math.log(point[0] / z)))
            if len(points) > 1:
                (x1, e1), (x2, e2) = points[:2]
                return min(-0.1, math.log(e1 / e2) / math.log(x1 / x2))
        return self._slope


def _fine_interval(curve: _PldCurve, target: float, guess: float) -> tuple[float, float]:
    """A discretisation that costs at most `_DISCRETISATION_SHARE` of epsilon, and noise near the answer.

    The pessimism of the discretisation falls with its square, so two coarse answers at one place tell what a
    finer one costs.
    """
    interval = 1e-3
    for _ in range(12):
        guess = smallest_parameter(
            lambda z, h=interval: curve.epsilon(z, h),  # type: ignore[misc]
            target,
            guess=guess,
            slope=curve.slope_near(guess),
            tolerance=2e-3,
        )
        narrow = curve.epsilon(guess, interval)
        cost = (curve.epsilon(guess, 2 * interval) - narrow) / 3
        if narrow > 0 and cost <= 0.02 * narrow:
            exact = narrow - cost
            shrink = math.sqrt(_DISCRETISATION_SHARE * exact / cost) if cost > 0 else math.inf
            nearer = guess * (target / exact) ** (1 / curve.slope_near(guess))
            return min(WIDEST_FINAL_INTERVAL, interval * shrink), nearer
        interval /= 4
    return interval, guess


def _renyi_slope(composition: CompositionOf, delta: float, z: float) -> float:
    """``d log epsilon / d log z`` by Renyi; epsilon falls at least in proportion to the noise."""
    here, above = (
        best_order(composition(x), delta, _ROUGH_ORDERS)[0] for x in (z, z * math.exp(0.01))
    )
    return min(-1.0, math.log(above / here) / 0.01) if above > 0 else -1.0


def _rough_noise(composition: CompositionOf, budget: Budget) -> float:
    """A first guess by few Renyi orders. Only a guess: what Renyi cannot reach is searched for from there."""
    try:
        return smallest_parameter(
            lambda z: best_order(composition(z), budget.delta, _ROUGH_ORDERS)[0],
            max(budget.epsilon, 0.01),
            guess=1.0,
            tolerance=1e-2,
        )
    except InputError:
        return 1.0
