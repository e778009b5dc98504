"""``Config -> Plan``: the accounting plan, and the ledger's header, from the same numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dpis.accounting import (
    Accountant,
    AdaptivePlan,
    Adjacency,
    Budget,
    Cadence,
    CountSource,
    Entry,
    Gaussian,
    Guard,
    Header,
    Mode,
    Norms,
    PlannedSequence,
    PredeclaredPlan,
    Release,
    RenyiFilter,
    Unit,
    Workload,
    exponential_decay,
    plan_adaptive,
    plan_predeclared,
)
from dpis.accounting.adaptive import NORM_SUM, count_noise_multiplier, norm_noise_multiplier
from dpis.accounting.renyi import best_order
from dpis.accounting.verify import COUNT
from dpis.errors import InputError
from dpis.mechanism.config import Config, Method

MOST_COUNT_CHANGE = 2.0
"""A released number of records may differ from the declared one by this factor, no more."""


@dataclass(frozen=True, slots=True)
class OpenEnded:
    """A given noise and no horizon: nothing is claimed beforehand, epsilon is computed from what happened.

    Attributes:
        noise_multiplier: ``z`` of every step.
    """

    noise_multiplier: float
    releases: tuple[Release, ...] = ()

    @property
    def budget(self) -> None:
        """There is none."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run before the data is touched.

    Attributes:
        config: what was chosen.
        workload: sampling, epoch by epoch (in adaptive mode as if every kappa were 1).
        accounting: what the claim rests on; None for `sgd`, which claims nothing.
    """

    config: Config
    workload: Workload
    accounting: PredeclaredPlan | AdaptivePlan | OpenEnded | None

    @property
    def open_ended(self) -> bool:
        """Whether there is no last epoch."""
        return isinstance(self.accounting, OpenEnded)

    def noise_multiplier(self, epoch: int) -> float:
        """``z`` of an epoch that is fixed beforehand; 0 for `sgd`."""
        plan = self.accounting
        if isinstance(plan, OpenEnded):
            return plan.noise_multiplier
        assert plan is None or isinstance(plan, PredeclaredPlan)
        return 0.0 if plan is None else plan.noise_multipliers[epoch - 1]

    def guard(self) -> Guard | None:
        """What must admit every event; None where nothing is claimed beforehand."""
        plan = self.accounting
        if isinstance(plan, AdaptivePlan):
            return RenyiFilter(plan.budget, plan.order)
        if isinstance(plan, PredeclaredPlan):
            return PlannedSequence(plan.runs, plan.budget.delta)
        return None

    @property
    def claim(self) -> Budget | None:
        """What the run promises; None: nothing."""
        return None if self.accounting is None else self.accounting.budget

    @property
    def same_terms_throughout(self) -> bool:
        """Whether every step has the same rate and noise, so that the order of epochs does not matter."""
        plan = self.accounting
        if isinstance(plan, AdaptivePlan):
            return False
        noise = plan.noise_multipliers if isinstance(plan, PredeclaredPlan) else ()
        return len(set(noise)) <= 1 and len(set(self.workload.kappa)) == 1

    @property
    def most_expected_candidates(self) -> float:
        """``min(k·b, B)`` at most: how many records a step looks at on average. Public."""
        batch_size = self.workload.batch_size
        largest = max(self.workload.equivalent_batch)
        if isinstance(self.accounting, AdaptivePlan):
            largest = self.config.pi_cap * self.workload.n_public
        if self.config.method.by_importance:
            return min(self.config.headroom * batch_size, largest)
        return largest

    def header(
        self,
        *,
        versions: Mapping[str, str],
        seeded: bool,
        diagnostics: bool,
        norms_batch_shaped: bool = False,
        user_level: bool = False,
    ) -> Header:
        """The first line of the run's ledger."""
        plan = self.accounting
        if plan is None or isinstance(plan, OpenEnded):
            raise InputError("a ledger needs a claim: sgd and open-ended runs have none")
        adaptive = isinstance(plan, AdaptivePlan)
        return Header(
            claim=plan.budget,
            adjacency=plan.adjacency,
            n_public=plan.workload.n_public,
            n_public_source=self.config.n_public_source,
            mode=Mode.ADAPTIVE if adaptive else Mode.PREDECLARED,
            planned=() if isinstance(plan, AdaptivePlan) else plan.runs,
            filter_order=plan.order if isinstance(plan, AdaptivePlan) else None,
            versions=versions,
            seeded=seeded,
            diagnostics=diagnostics,
            norms=Norms.BATCH_SHAPED if norms_batch_shaped else Norms.FIXED_SHAPE,
            unit=Unit.USER if user_level else Unit.RECORD,
        )


@functools.lru_cache(maxsize=8)
def make_plan(config: Config) -> Plan:
    """Fix everything that can be fixed before the data is touched. The same config gives the same plan."""
    workload = Workload.create(
        n_public=config.n_public,
        batch_size=config.batch_size,
        epochs=config.epochs,
        kappa=config.kappa,
        equivalent_batch=config.equivalent_batch,
    )
    if not config.method.private:
        return Plan(config, workload, None)
    budget = Budget(config.epsilon, config.delta)
    if config.method is Method.DPIS_ADAPTIVE:
        return Plan(config, workload, _adaptive(config, budget, workload, order=None))
    return Plan(config, workload, _predeclared(config, budget, workload))


def open_ended_plan(config: Config, noise_multiplier: float) -> Plan:
    """A run without a horizon, at a given noise; its epochs are as long as any other's."""
    workload = Workload.create(
        n_public=config.n_public,
        batch_size=config.batch_size,
        epochs=1,
        kappa=config.kappa,
        equivalent_batch=config.equivalent_batch,
    )
    noise = Gaussian(
        noise_multiplier=noise_multiplier
    )  # refused here if it cannot be accounted for
    return Plan(config, workload, OpenEnded(noise.noise_multiplier))


def plan_with_count(plan: Plan, noisy_count: float) -> Plan:
    """The adaptive plan made anew from a released number of records; its filter's order stays."""
    before = plan.accounting
    assert isinstance(before, AdaptivePlan)
    declared = plan.config.n_public
    enough = math.floor(plan.config.batch_size / plan.config.pi_cap) + 1  # keeps b/n below pi_cap
    lowest = max(declared / MOST_COUNT_CHANGE, enough)
    n = round(bounded_count(noisy_count, declared, lowest))
    workload = Workload.create(
        n_public=n, batch_size=plan.config.batch_size, epochs=plan.config.epochs
    )
    return Plan(
        _with_count(plan.config, n),
        workload,
        _adaptive(plan.config, before.budget, workload, before.order),
    )


def planned_count(plan: Plan) -> Entry:
    """The event that pays for a released number of records."""
    assert plan.accounting is not None
    release = next(release for release in plan.accounting.releases if release.label == COUNT)
    return Entry(COUNT, release.event)


def bounded_count(noisy_count: float, declared: int, lowest: float | None = None) -> float:
    """A noisy number of records within public bounds around the declared one; NaN gives that one."""
    if noisy_count != noisy_count:
        return float(declared)
    lowest = declared / MOST_COUNT_CHANGE if lowest is None else lowest
    return min(max(noisy_count, lowest), declared * MOST_COUNT_CHANGE)


def _with_count(config: Config, n: int) -> Config:
    return replace(config, n_public=n, n_public_source=CountSource.RELEASED, release_n=False)


def _adjacency(config: Config) -> Adjacency:
    """A count that was read from the data set is public: only its records are protected, not their number."""
    read = config.n_public_source is CountSource.DATASET_LENGTH
    return Adjacency.ZERO_OUT if read else Adjacency.ADD_REMOVE


def _before_training(config: Config) -> tuple[Release, ...]:
    sigma_N = count_noise_multiplier(config.n_public)
    return (*([Release(COUNT, sigma_N)] if config.release_n else []), *config.releases)


def _adaptive(
    config: Config, budget: Budget, workload: Workload, order: int | None
) -> AdaptivePlan:
    cadences = [Cadence.EACH_EPOCH] + [Cadence.BETWEEN_EPOCHS] * (config.clipping is not None)
    return plan_adaptive(
        budget,
        workload,
        a_e=config.a_e,
        pi_cap=config.pi_cap,
        order=order,
        adjacency=_adjacency(config),
        releases=_before_training(config),
        norm_releases_per_epoch=cadences,
    )


def _predeclared(config: Config, budget: Budget, workload: Workload) -> PredeclaredPlan:
    decays = config.method is Method.DP_SGD_DECAY
    return plan_predeclared(
        budget,
        workload,
        accountant=config.accountant,
        adjacency=_adjacency(config),
        noise_shape=exponential_decay(config.decay_rate, workload.epochs) if decays else None,
        releases=(*_before_training(config), *_clip_releases(config, budget, workload)),
    )


def _clip_releases(config: Config, budget: Budget, workload: Workload) -> tuple[Release, ...]:
    """K* at the end of every epoch but the last, with noise that costs at most 2 % of the budget."""
    times = workload.epochs - 1
    if config.clipping is None or times == 0:
        return ()
    steps = plan_predeclared(budget, workload, accountant=Accountant.RDP).composition
    order = best_order(steps, budget.delta)[1]
    multiplier = norm_noise_multiplier(budget, workload.n_public, times, order)
    return (Release(NORM_SUM, multiplier, Cadence.BETWEEN_EPOCHS),)
