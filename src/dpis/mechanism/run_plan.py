"""``Config -> RunPlan``: the privacy plan, and the ledger's header, from the same numbers."""

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
    Header,
    NoPrivacy,
    Norms,
    OpenEndedPlan,
    PredeclaredPlan,
    PrivacyPlan,
    Release,
    Unit,
    Workload,
    exponential_decay,
    plan_adaptive,
    plan_predeclared,
)
from dpis.accounting.norm_sums import count_noise_multiplier, norm_noise_multiplier
from dpis.accounting.renyi import best_order
from dpis.accounting.workload import COUNT, NORM_SUM
from dpis.mechanism.config import Config
from dpis.options import Method

MOST_COUNT_CHANGE = 2.0
"""A released number of records may differ from the declared one by this factor, no more."""

LEAST_TO_FILL = 2560
"""Expected records of a step: chunks of a tenth of them, 256, are large enough not to be slow. The same number on every
machine: a ledger's header is made from it, and a run may be resumed elsewhere."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run before the data is touched: what was chosen, and what that promises and spends."""

    config: Config
    privacy: PrivacyPlan

    @property
    def workload(self) -> Workload:
        """Sampling, epoch by epoch."""
        return self.privacy.workload

    @property
    def claim(self) -> Budget | None:
        """What the run promises; None: nothing."""
        return self.privacy.claim

    @property
    def most_expected_candidates(self) -> float:
        """``min(k·b, B)`` at most: how many records a step looks at on average. Public."""
        largest = self.privacy.largest_batch
        if self.config.method.by_importance:
            return min(self.config.headroom * self.workload.batch_size, largest)
        return largest

    @property
    def too_small_to_fill(self) -> bool:
        """Whether to fill chunks of records up to one shape would cost more than 5 % of a step (rule 19)."""
        return self.most_expected_candidates < LEAST_TO_FILL

    def header(
        self,
        *,
        versions: Mapping[str, str],
        seeded: bool,
        diagnostics: bool,
        audited: bool = False,
        norms_batch_shaped: bool = False,
        user_level: bool = False,
    ) -> Header:
        """The first line of the run's ledger."""
        return replace(
            self.privacy.header(self.config.n_public_source),
            versions=versions,
            seeded=seeded,
            diagnostics=diagnostics,
            audited=audited,
            norms=Norms.BATCH_SHAPED if norms_batch_shaped else Norms.FIXED_SHAPE,
            unit=Unit.USER if user_level else Unit.RECORD,
            shards=self.config.shards,
        )


@functools.lru_cache(maxsize=8)
def make_plan(config: Config) -> RunPlan:
    """Fix everything that can be fixed before the data is touched. The same config gives the same plan."""
    workload = _workload(config, config.epochs)
    if not config.method.private:
        return RunPlan(config, NoPrivacy(workload=workload))
    if config.method is Method.DPIS_ADAPTIVE:
        return RunPlan(config, _adaptive(config, workload))
    return RunPlan(config, _predeclared(config, workload))


def open_ended_plan(config: Config, noise_multiplier: float) -> RunPlan:
    """A run without a last epoch, at a given noise; its epochs are as long as any other's."""
    privacy = OpenEndedPlan(
        workload=_workload(config, epochs=1),
        adjacency=_adjacency(config),
        noise_multiplier=noise_multiplier,
    )
    return RunPlan(config, privacy)


def plan_with_count(plan: RunPlan, noisy_count: float) -> RunPlan:
    """The adaptive plan made anew from a released number of records; its filter's order stays."""
    config = plan.config
    enough = math.floor(config.batch_size / config.rate_cap) + 1  # keeps b/n below rate_cap
    lowest = max(config.n_public / MOST_COUNT_CHANGE, enough)
    n = round(bounded_count(noisy_count, config.n_public, lowest))
    counted = replace(config, n_public=n, n_public_source=CountSource.RELEASED, release_n=False)
    return RunPlan(counted, plan.privacy.with_count(n))


def bounded_count(noisy_count: float, declared: int, lowest: float | None = None) -> float:
    """A noisy number of records within public bounds around the declared one; NaN gives that one."""
    if math.isnan(noisy_count):
        return float(declared)
    lowest = declared / MOST_COUNT_CHANGE if lowest is None else lowest
    return min(max(noisy_count, lowest), declared * MOST_COUNT_CHANGE)


def _workload(config: Config, epochs: int) -> Workload:
    return Workload.create(
        n_public=config.n_public,
        batch_size=config.batch_size,
        epochs=epochs,
        kappa=config.kappa,
        equivalent_batch=config.equivalent_batch,
    )


def _adjacency(config: Config) -> Adjacency:
    """A count that was read from the data set is public: only its records are protected, not their number."""
    read = config.n_public_source is CountSource.DATASET_LENGTH
    return Adjacency.ZERO_OUT if read else Adjacency.ADD_REMOVE


def _before_training(config: Config) -> tuple[Release, ...]:
    sigma_N = count_noise_multiplier(config.n_public)
    return (*([Release(COUNT, sigma_N)] if config.release_n else []), *config.releases)


def _adaptive(config: Config, workload: Workload) -> AdaptivePlan:
    cadences = [Cadence.EACH_EPOCH] + [Cadence.BETWEEN_EPOCHS] * (config.clipping is not None)
    return plan_adaptive(
        Budget(config.epsilon, config.delta),
        workload,
        reserve_share=config.reserve_share,
        rate_cap=config.rate_cap,
        adjacency=_adjacency(config),
        releases=_before_training(config),
        norm_releases_per_epoch=cadences,
    )


def _predeclared(config: Config, workload: Workload) -> PredeclaredPlan:
    budget, decays = Budget(config.epsilon, config.delta), config.method is Method.DP_SGD_DECAY
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
