"""The adaptive mode: noise solved epoch by epoch from released norm sums, under a Renyi filter.

This is the paper's schedule (section 4.2) on sound ground: one integer order fixed from a public plan, every
data-dependent scalar an event, the rest of the run reserved before an epoch may spend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dpis.accounting.budget import Adjacency, Budget
from dpis.accounting.calibration import smallest_parameter
from dpis.accounting.events import Composition, Event, PoissonGaussian
from dpis.accounting.filter import Guard, RenyiFilter
from dpis.accounting.header import CountSource, Header, Mode
from dpis.accounting.norm_sums import NormSumBounds, norm_noise_multiplier, norm_sum_cost
from dpis.accounting.plans import BudgetedPlan, Terms
from dpis.accounting.renyi import (
    INTEGER_ORDERS,
    best_order,
    composed_divergence,
    conversion_offset,
    renyi_budget,
    renyi_divergence,
)
from dpis.accounting.workload import (
    GRADIENT,
    NORM_SUM,
    Cadence,
    Release,
    Workload,
    releases_over_run,
)
from dpis.errors import BudgetExceededError, InputError
from dpis.options import Accountant, Privacy

_ROUNDING_RESERVE = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptivePlan(BudgetedPlan):
    """What is fixed before an adaptive run: the filter's terms, every release, and the kappa = 1 schedule."""

    order: int
    """``α``, the one Renyi order of the filter."""
    reserve_share: float
    """``a_E``: the share of epochs that budget for the rest of the run as if kappa were 1."""
    rate_cap: float
    """The largest inclusion probability that a released norm sum may lead to."""
    norm_noise_multiplier: float
    """``σ_K``."""
    noise_multiplier: float
    """``z`` of every epoch if every kappa were 1; then ``z = σ_G``."""

    def guard(self) -> Guard:
        """The filter at its one order."""
        return RenyiFilter(self.budget, self.order)

    def header(self, n_public_source: CountSource) -> Header:
        """With the filter's order."""
        return Header(
            claim=self.budget,
            adjacency=self.adjacency,
            n_public=self.workload.n_public,
            n_public_source=n_public_source,
            mode=Mode.ADAPTIVE,
            filter_order=self.order,
        )

    def epsilon_of(self, spent: Composition, delta: float) -> float:
        """The claim: a smaller number, computed from noise that was chosen on the way, would not be sound."""
        if delta < self.budget.delta:
            raise InputError(
                f"the adaptive mode claims epsilon at delta = {self.budget.delta:g} or larger, found {delta:g}"
            )
        return self.budget.epsilon

    @property
    def accountant(self) -> Accountant:
        """The filter adds up Renyi divergences."""
        return Accountant.RDP

    @property
    def epsilon(self) -> float:
        """Of the run with every kappa 1, at the filter's order."""
        return best_order(self.composition, self.budget.delta, [self.order])[0]

    @property
    def filter_facts(self) -> dict[str, float]:
        """In the words of `dpis plan --json`."""
        return {
            "reserve_share": self.reserve_share,
            "alpha": self.order,
            "rho_budget": self.rho_budget,
            "norm_noise_multiplier": self.norm_noise_multiplier,
        }

    @property
    def adapts(self) -> bool:
        """Every epoch anew."""
        return True

    @property
    def planned_noise(self) -> tuple[float, ...]:
        """If every kappa were 1."""
        return (self.noise_multiplier,) * self.workload.epochs

    @property
    def largest_batch(self) -> float:
        """As far as ``rate_cap`` lets it grow."""
        return self.rate_cap * self.workload.n_public

    def with_count(self, n_public: int) -> AdaptivePlan:
        """Made anew; the filter's order was fixed before the count was released, and stays."""
        workload = Workload.create(
            n_public=n_public,
            batch_size=self.workload.batch_size,
            epochs=self.workload.epochs,
        )
        return plan_adaptive(
            self.budget,
            workload,
            reserve_share=self.reserve_share,
            rate_cap=self.rate_cap,
            order=self.order,
            adjacency=self.adjacency,
            releases=[r for r in self.releases if r.label != NORM_SUM],
            norm_releases_per_epoch=[r.cadence for r in self.releases if r.label == NORM_SUM],
        )

    def terms(
        self, epoch: int, clip_norm: float, norm_sum: float | None, spent: Mapping[Event, int]
    ) -> Terms:
        """Solved from the noisy norm sum and from what was spent before."""
        assert norm_sum is not None
        self.require_epoch(epoch)
        workload = self.workload
        bounds = NormSumBounds.create(
            n_public=workload.n_public,
            batch_size=workload.batch_size,
            clip_norm=clip_norm,
            rate_cap=self.rate_cap,
        )
        # The division may lose a last bit, at either end.
        kappa = min(max(bounds.clip(norm_sum) / bounds.highest, self.smallest_kappa), 1.0)
        cost = math.fsum(n * renyi_divergence(event, self.order) for event, n in spent.items())
        sigma_G = next_grad_noise(self, epoch=epoch, kappa=kappa, spent=cost)
        step = adaptive_step(workload, sigma_G, kappa)
        return Terms(
            epoch=epoch,
            sampling_rate=step.sampling_rate,
            noise_multiplier=step.noise_multiplier,
            clip_norm=clip_norm,
            kappa=kappa,
            equivalent_batch=step.sampling_rate * workload.n_public,
        )

    @property
    def rho_budget(self) -> float:
        """``ε - off(α)``: what the run may spend at the filter's order."""
        return renyi_budget(self.budget, self.order)

    @property
    def first_phase(self) -> int:
        """``floor(a_E · E)``: so many epochs budget for the rest of the run as if kappa were 1."""
        return math.floor(self.reserve_share * self.workload.epochs + 1e-9)

    @property
    def smallest_kappa(self) -> float:
        """Below it the sampling rate would pass 1; `NormSumBounds` keeps kappa above it (at ``rate_cap`` 1 just so)."""
        return self.workload.batch_size / self.workload.n_public


def plan_adaptive(
    budget: Budget,
    workload: Workload,
    *,
    reserve_share: float = Privacy.reserve_share,
    rate_cap: float = 0.5,
    order: int | None = None,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    releases: Sequence[Release] = (),
    norm_releases_per_epoch: Sequence[Cadence] = (Cadence.EACH_EPOCH,),
) -> AdaptivePlan:
    """Fix the filter's order and the releases from a public plan with kappa = 1.

    ``σ_K = max(0.02·n_public, the value that costs 2 % of the budget)``, over all norm sums together.

    Args:
        budget: The promise to keep.
        workload: Its kappa must be 1: the real one is released, epoch by epoch.
        reserve_share: The share of epochs that budget for the future as if kappa were 1.
        rate_cap: The largest inclusion probability that released norm sums may lead to.
        order: The filter's order, if it is fixed already: a plan made anew from a noisy count must keep the order that
            was chosen before the count was released.
        adjacency: Which data sets are kept apart.
        releases: Further noisy statistics with their noise (a noisy N, K* has its own cadence below).
        norm_releases_per_epoch: One cadence for each norm sum: K' each epoch; with adaptive clipping K* too.
    """
    if not 0 <= reserve_share <= 1:
        raise InputError(f"reserve_share must lie in [0, 1], found {reserve_share!r}")
    if any(kappa != 1 for kappa in workload.kappa):
        raise InputError(
            "the adaptive mode releases kappa during the run: leave kappa out, or use the method dpis"
        )
    NormSumBounds.create(
        n_public=workload.n_public, batch_size=workload.batch_size, clip_norm=1.0, rate_cap=rate_cap
    )
    unit = [Release(NORM_SUM, 1.0, cadence) for cadence in norm_releases_per_epoch]
    norm_sums = releases_over_run(workload, unit).events
    others = releases_over_run(workload, releases)
    fixed_costs = {
        a: norm_sum_cost(budget, workload.n_public, norm_sums, a) + composed_divergence(others, a)
        for a in (INTEGER_ORDERS if order is None else (order,))
        if renyi_budget(budget, a) > 0
    }
    order, z = _public_plan(budget, workload, fixed_costs)
    sigma_k = norm_noise_multiplier(budget, workload.n_public, norm_sums, order)
    norm_releases = [Release(NORM_SUM, sigma_k, cadence) for cadence in norm_releases_per_epoch]
    return AdaptivePlan(
        budget=budget,
        adjacency=adjacency,
        workload=workload,
        order=order,
        reserve_share=reserve_share,
        rate_cap=rate_cap,
        releases=(*releases, *norm_releases),
        norm_noise_multiplier=sigma_k,
        noise_multiplier=z,
    )


def _public_plan(
    budget: Budget, workload: Workload, fixed_costs: dict[int, float]
) -> tuple[int, float]:
    """The order at which the kappa = 1 run needs the least noise, and that noise."""
    if all(renyi_budget(budget, order) <= cost for order, cost in fixed_costs.items()):
        raise InputError(
            f"no noise meets epsilon = {budget.epsilon:g}, delta = {budget.delta:g} in the adaptive mode: "
            "converting from Renyi divergence, and what is released beside the gradients, already costs that "
            "much. Ask for a larger epsilon, or use the method dpis"
        )

    def epsilon_at(z: float) -> tuple[float, int]:
        step = PoissonGaussian(sampling_rate=workload.sampling_rate[0], noise_multiplier=z)
        return min(
            (
                workload.steps * renyi_divergence(step, order)
                + cost
                + conversion_offset(order, budget.delta),
                order,
            )
            for order, cost in fixed_costs.items()
        )

    z = smallest_parameter(
        lambda z: max(0.0, epsilon_at(z)[0]), budget.epsilon, guess=1.0, tolerance=1e-4
    )
    return epsilon_at(z)[1], z


def next_grad_noise(plan: AdaptivePlan, *, epoch: int, kappa: float, spent: float) -> float:
    """``σ_G`` for the coming epoch: the smallest that leaves enough for the rest of the run.

    Requires ``spent + this epoch + remaining epochs + reserved releases <= rho_budget``, where the remaining
    epochs use the same σ_G, with kappa = 1 while in the first phase and the current kappa after it.

    Args:
        plan: The public plan.
        epoch: Counted from 1.
        kappa: ``K_tilde / (n_public·C)`` as released for this epoch.
        spent: ``Σ ρ`` of everything released so far, this epoch's norm sum included.
    """
    workload = plan.workload
    if not 1 <= epoch <= workload.epochs:
        raise InputError(f"epoch must lie in 1..{workload.epochs}, found {epoch}")
    if not plan.smallest_kappa <= kappa <= 1:
        raise InputError(f"kappa must lie in [{plan.smallest_kappa:g}, 1], found {kappa!r}")
    later = workload.epochs - epoch
    later_kappa = 1.0 if epoch <= plan.first_phase else kappa
    affordable = plan.rho_budget * (1 - _ROUNDING_RESERVE) - spent - _reserved(plan, epoch)
    if affordable <= 0:
        raise BudgetExceededError(
            f"nothing is left for epoch {epoch}: {spent:.6g} of {plan.rho_budget:.6g} spent and the rest reserved"
        )

    def step_cost(sigma: float, kappa: float) -> float:
        return renyi_divergence(adaptive_step(workload, sigma, kappa), plan.order)

    def cost(sigma: float) -> float:
        return workload.steps_per_epoch * (
            step_cost(sigma, kappa) + later * step_cost(sigma, later_kappa)
        )

    return smallest_parameter(cost, affordable, guess=plan.noise_multiplier, tolerance=1e-6)


def adaptive_step(
    workload: Workload, grad_noise_multiplier: float, kappa: float
) -> PoissonGaussian:
    """One iteration in normal form: ``π = b/(kappa·n_public)``, ``z = σ_G/kappa``."""
    return PoissonGaussian(
        sampling_rate=min(1.0, workload.batch_size / (kappa * workload.n_public)),
        noise_multiplier=grad_noise_multiplier / kappa,
    )


def _reserved(plan: AdaptivePlan, epoch: int) -> float:
    """What the releases after this epoch's steps will cost."""
    epochs_begun = 0
    reserved = []
    for run in plan.runs:
        if run.label == GRADIENT:
            epochs_begun += 1
        elif epochs_begun >= epoch:
            reserved.append(run.count * renyi_divergence(run.event, plan.order))
    return math.fsum(reserved)
