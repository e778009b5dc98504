"""The predeclared plan: every event of a run fixed before the data is touched, with the least noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpis.accounting.accountants import (
    FINEST_COARSE_INTERVAL,
    Accountant,
    epsilon_by_pld,
    epsilon_by_rdp,
)
from dpis.accounting.budget import Adjacency, Budget
from dpis.accounting.calibration import smallest_parameter
from dpis.accounting.events import Composition
from dpis.accounting.renyi import best_order
from dpis.accounting.workload import (
    PlannedRun,
    Release,
    Workload,
    composition_of,
    planned_runs,
)
from dpis.errors import InputError

_ROUGH_ORDERS = (*range(2, 13), 14, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096)
_DISCRETISATION_SHARE = 2e-4
"""How much of epsilon the discretisation of privacy loss may cost in a final answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredeclaredPlan:
    """Every ``(π, z)`` of a run and every other release, and the epsilon they add up to."""

    budget: Budget
    adjacency: Adjacency
    accountant: Accountant
    workload: Workload
    noise_multipliers: tuple[float, ...]
    releases: tuple[Release, ...]
    epsilon: float
    """Achieved, by the plan's accountant: never above the budget's."""

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        """Every event, in its order."""
        return tuple(planned_runs(self.workload, self.noise_multipliers, self.releases))

    @property
    def composition(self) -> Composition:
        """What the run spends."""
        return composition_of(self.runs)

    @property
    def grad_noise_multipliers(self) -> tuple[float, ...]:
        """The paper's ``σ_G = z · kappa`` by epoch."""
        pairs = zip(self.noise_multipliers, self.workload.kappa, strict=True)
        return tuple(z * kappa for z, kappa in pairs)


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
    alone = Composition(tuple((r.event, r.times(workload.epochs)) for r in releases))
    if not alone.events:
        return
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
    """A coarse search finds the place and the discretisation that matters there; fine answers decide."""
    rough = 0.94 * _rough_noise(composition, budget)  # PLD asks for a few percent less than Renyi
    start, slope, interval = _coarse_noise(composition, budget, rough)
    evaluated: dict[float, float] = {}

    def epsilon_of(z: float) -> float:
        evaluated[z] = epsilon_by_pld(composition(z), budget.delta, interval)
        return evaluated[z]

    z = smallest_parameter(epsilon_of, budget.epsilon, guess=start, slope=slope)
    return z, evaluated[z]


def _coarse_noise(
    composition: CompositionOf, budget: Budget, guess: float
) -> tuple[float, float, float]:
    """Noise that is right to a percent or so, epsilon's slope there, and the discretisation it needs.

    The pessimism of the discretisation falls with its square, so two coarse answers at one place tell what a
    finer one costs. The interval returned is 1e-4 or finer and costs at most `_DISCRETISATION_SHARE` of epsilon.
    """
    interval = 1e-3
    slope = _renyi_slope(composition, budget.delta, guess)
    for _ in range(12):
        evaluated: dict[float, float] = {}

        def epsilon_of(
            z: float, interval: float = interval, seen: dict[float, float] = evaluated
        ) -> float:
            seen[z] = epsilon_by_pld(composition(z), budget.delta, interval)
            return seen[z]

        guess = smallest_parameter(
            epsilon_of, budget.epsilon, guess=guess, slope=slope, tolerance=0.02
        )
        slope = _local_slope(evaluated, guess, slope)
        wide, narrow = evaluated[guess], epsilon_of(guess, interval / 2, {})
        cost = (wide - narrow) / 3
        interval /= 2
        if narrow > 0 and cost <= 0.02 * narrow:
            exact = narrow - cost
            shrink = math.sqrt(_DISCRETISATION_SHARE * exact / cost) if cost > 0 else math.inf
            nearer = guess * (budget.epsilon / exact) ** (1 / slope)
            return nearer, slope, min(FINEST_COARSE_INTERVAL, interval * shrink)
        interval /= 2
    return guess, slope, interval


def _local_slope(evaluated: dict[float, float], z: float, otherwise: float) -> float:
    """``d log epsilon / d log z`` through ``z`` and its nearest neighbour that says something."""
    others = [x for x, e in evaluated.items() if x != z and 0 < e < math.inf]
    if not others or evaluated[z] <= 0:
        return otherwise
    nearest = min(others, key=lambda x: abs(math.log(x / z)))
    slope = math.log(evaluated[nearest] / evaluated[z]) / math.log(nearest / z)
    return slope if slope < -0.1 else otherwise


def _renyi_slope(composition: CompositionOf, delta: float, z: float) -> float:
    """``d log epsilon / d log z``: epsilon falls at least in proportion, so never flatter than -1."""
    here, above = (
        best_order(composition(x), delta, _ROUGH_ORDERS)[0] for x in (z, z * math.exp(0.01))
    )
    return min(-1.0, math.log(above / here) / 0.01) if above > 0 else -1.0


def _rough_noise(composition: CompositionOf, budget: Budget) -> float:
    """A first guess by few Renyi orders. Only a guess: very small epsilons are searched for from a larger one."""
    reachable = max(budget.epsilon, 0.01)
    return smallest_parameter(
        lambda z: best_order(composition(z), budget.delta, _ROUGH_ORDERS)[0],
        reachable,
        guess=1.0,
        tolerance=1e-2,
    )
