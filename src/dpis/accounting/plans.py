"""A plan: what a run promises, what each of its epochs spends, and the guard that holds the two together.

There are four kinds. `PredeclaredPlan` and `AdaptivePlan` promise an (epsilon, delta) beforehand; `OpenEndedPlan` has
a noise and no last epoch, so epsilon is computed from what happened; `NoPrivacy` promises nothing and spends nothing.
Whoever runs a plan asks it, and never which kind it is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from dpis.accounting.budget import Adjacency, Budget
from dpis.accounting.events import Composition, Event, Gaussian, PoissonGaussian
from dpis.accounting.filter import Guard, Unguarded
from dpis.accounting.header import CountSource, Header
from dpis.accounting.ledger import Entry
from dpis.accounting.pld import epsilon_by_pld
from dpis.accounting.renyi import epsilon_by_rdp
from dpis.accounting.workload import (
    GRADIENT,
    Cadence,
    PlannedRun,
    Release,
    Workload,
    composition_of,
    planned_runs,
)
from dpis.errors import BudgetExceededError, InputError, shown_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the steps of one epoch share. Public, or released.

    Attributes:
        epoch: counted from 1.
        sampling_rate: ``π``, the largest inclusion probability of a record.
        noise_multiplier: ``z``; 0 for `sgd`.
        clip_norm: ``C``; infinite for `sgd`.
        kappa: norm utilisation.
        equivalent_batch: ``B = π·n_public``.
    """

    epoch: int
    sampling_rate: float
    noise_multiplier: float
    clip_norm: float
    kappa: float
    equivalent_batch: float

    @property
    def event(self) -> PoissonGaussian:
        """What one step spends."""
        return PoissonGaussian(
            sampling_rate=self.sampling_rate, noise_multiplier=self.noise_multiplier
        )

    @property
    def grad_noise_multiplier(self) -> float:
        """The paper's ``σ_G = z·kappa``."""
        return self.noise_multiplier * self.kappa


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyPlan(ABC):
    """What is fixed before the data is touched. One of four kinds.

    Attributes:
        workload: sampling, epoch by epoch (adaptive: as if every kappa were 1; open-ended: one epoch, repeated).
        adjacency: between which data sets records are protected.
        releases: the noisy statistics beside the gradients, with their noise.
    """

    workload: Workload
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    releases: tuple[Release, ...] = ()

    # ── the promise ──────────────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def claim(self) -> Budget | None:
        """What the run promises; None: nothing, at least not beforehand."""

    @abstractmethod
    def guard(self) -> Guard:
        """A new guard, which admits what the claim covers and refuses the rest."""

    def header(self, n_public_source: CountSource) -> Header:
        """What a ledger says of this plan; the same guard can be made from it."""
        raise InputError("a ledger needs a claim: sgd and open-ended runs have none")

    def epsilon_of(self, spent: Composition, delta: float) -> float:
        """Epsilon at ``delta`` for what was spent so far, valid for a stop that was fixed in advance."""
        return epsilon_of_events(spent, delta)

    # ── what is spent ────────────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def planned_noise(self) -> tuple[float, ...]:
        """``z`` by epoch; adaptive: as if every kappa were 1."""

    @property
    def adapts(self) -> bool:
        """Whether an epoch begins with a released norm sum, from which its terms are solved."""
        return False

    @property
    def last_epoch(self) -> int | None:
        """``E``; None: there is no last one."""
        return self.workload.epochs

    def require_epoch(self, epoch: int) -> None:
        """Refuse an epoch that the plan does not have."""
        if epoch < 1 or (self.last_epoch is not None and epoch > self.last_epoch):
            raise BudgetExceededError(
                f"the plan has {self.last_epoch} epochs and all are done: a step more is not covered by the claim. "
                "Plan for more epochs from the start, or train with a given noise and without a promise"
            )

    def terms(
        self, epoch: int, clip_norm: float, norm_sum: float | None, spent: Mapping[Event, int]
    ) -> Terms:
        """What the steps of an epoch share.

        Args:
            epoch: counted from 1.
            clip_norm: ``C`` of this epoch.
            norm_sum: ``K'`` of this epoch as the noise left it, if the plan `adapts`; else None.
            spent: every event so far and how often, the release of ``K'`` included.
        """
        self.require_epoch(epoch)
        workload, index = self.workload, min(epoch, self.workload.epochs) - 1
        return Terms(
            epoch=epoch,
            sampling_rate=workload.sampling_rate[index],
            noise_multiplier=self.planned_noise[index],
            clip_norm=clip_norm,
            kappa=workload.kappa[index],
            equivalent_batch=workload.equivalent_batch[index],
        )

    def require_noise(self, noise_multiplier: float) -> None:
        """Refuse a noise, set by hand for the steps to come, that the plan does not cover: less than it planned."""
        if self.adapts:
            raise InputError(
                "the noise of an adaptive plan is solved when an epoch begins and cannot be set: leave it, or make the "
                "run private with a given noise_multiplier"
            )
        if not noise_multiplier >= max(self.planned_noise):
            raise InputError(
                f"noise_multiplier {shown_number(noise_multiplier)} is less than the {max(self.planned_noise):g} that "
                "keeps the target: epsilon would be larger than promised. Let the noise fall by a schedule that is "
                "planned (method='dp-sgd-decay', decay_rate=...), or give the noise instead of an epsilon "
                "(make_private): then epsilon follows from the noise of every step"
            )

    def with_count(self, n_public: int) -> PrivacyPlan:
        """The plan made anew from a released number of records, if it `adapts`."""
        raise InputError(
            "what is fixed beforehand cannot follow a released number of records: use the method dpis-adaptive"
        )

    def charge(self, terms: Terms, steps: int) -> list[Entry]:
        """What so many steps of an epoch spend."""
        return [Entry(GRADIENT, terms.event)] * steps

    def release(self, label: str, cadence: Cadence = Cadence.ONCE) -> Release:
        """The planned release of that name; one that is not planned is refused."""
        for release in self.releases:
            if release.label == label and release.cadence is cadence:
                return release
        raise InputError(
            f"a release {label!r} ({cadence}) is not in the plan: nobody would pay for it. Add it to the "
            "config's releases"
        )

    @property
    def same_terms_throughout(self) -> bool:
        """Whether every step has the same rate and noise, so that the order of epochs does not matter."""
        alike = len(set(self.planned_noise)) == 1 and len(set(self.workload.kappa)) == 1
        return alike and not self.adapts

    @property
    def largest_batch(self) -> float:
        """The largest equivalent batch that a step can have."""
        return max(self.workload.equivalent_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetedPlan(PrivacyPlan):
    """A plan whose claim is a budget: what predeclared and adaptive plans share.

    Attributes:
        budget: what is promised, also after an early stop.
    """

    budget: Budget

    @property
    def claim(self) -> Budget:
        """The budget."""
        return self.budget

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        """Every event in its order (adaptive: if every kappa were 1)."""
        return tuple(planned_runs(self.workload, self.planned_noise, self.releases))

    @property
    def composition(self) -> Composition:
        """What these runs spend."""
        return composition_of(self.runs)

    @property
    def grad_noise_multipliers(self) -> tuple[float, ...]:
        """The paper's ``σ_G = z·kappa`` by epoch."""
        pairs = zip(self.planned_noise, self.workload.kappa, strict=True)
        return tuple(z * kappa for z, kappa in pairs)

    @property
    def filter_facts(self) -> dict[str, float]:
        """What a reader may want to know of the filter, by name; empty without one."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEndedPlan(PrivacyPlan):
    """A given noise and no last epoch: nothing is claimed beforehand.

    Every step is charged with the noise it had, which may be set anew for the steps to come. Without any (0, to look
    for errors in a loop) records are clipped all the same, nothing is charged, and epsilon is infinite.

    Attributes:
        noise_multiplier: ``z`` of every step, until it is set.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        if self.noise_multiplier != 0:
            Gaussian(
                noise_multiplier=self.noise_multiplier
            )  # refused if it cannot be accounted for

    def require_noise(self, noise_multiplier: float) -> None:
        """Any that can be accounted for; a run without noise stays without, and one with noise keeps some."""
        if self.noise_multiplier != 0:
            Gaussian(noise_multiplier=noise_multiplier)
        elif noise_multiplier != 0:
            raise InputError(
                f"noise_multiplier was 0 and cannot become {shown_number(noise_multiplier)}: what went before is not "
                "private, so epsilon stays infinite. Make the model private anew, with noise"
            )

    def charge(self, terms: Terms, steps: int) -> list[Entry]:
        """What so many steps spend; without noise there is no event that tells it."""
        return [] if self.noise_multiplier == 0 else PrivacyPlan.charge(self, terms, steps)

    def epsilon_of(self, spent: Composition, delta: float) -> float:
        """Of what was spent; infinite without noise."""
        if self.noise_multiplier == 0:
            return math.inf
        return PrivacyPlan.epsilon_of(self, spent, delta)

    @property
    def claim(self) -> None:
        """There is none: `epsilon_of` tells what was spent."""

    def guard(self) -> Guard:
        """Nothing is refused: every step is counted."""
        return Unguarded()

    @property
    def planned_noise(self) -> tuple[float, ...]:
        """The same for good."""
        return (self.noise_multiplier,) * self.workload.epochs

    @property
    def last_epoch(self) -> None:
        """There is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPrivacy(PrivacyPlan):
    """For `sgd`: no noise and no clipping. Nothing is claimed, and nothing is charged."""

    @property
    def claim(self) -> None:
        """There is none."""

    def guard(self) -> Guard:
        """There is nothing to keep."""
        return Unguarded()

    def epsilon_of(self, spent: Composition, delta: float) -> float:
        """Without noise no epsilon is large enough."""
        return math.inf

    @property
    def planned_noise(self) -> tuple[float, ...]:
        """None at all."""
        return (0.0,) * self.workload.epochs

    def terms(
        self, epoch: int, clip_norm: float, norm_sum: float | None, spent: Mapping[Event, int]
    ) -> Terms:
        """As planned, and nothing is clipped."""
        return PrivacyPlan.terms(self, epoch, math.inf, norm_sum, spent)

    def charge(self, terms: Terms, steps: int) -> list[Entry]:
        """Nothing."""
        return []
