"""The numbers of one epoch: fixed by the plan, or solved from what was released."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dpis.accounting import (
    AdaptivePlan,
    Entry,
    Event,
    NormSumBounds,
    PoissonGaussian,
    adaptive_step,
    next_grad_noise,
)
from dpis.accounting.renyi import renyi_divergence
from dpis.accounting.workload import GRADIENT
from dpis.mechanism.plan import Plan


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
    def entry(self) -> Entry:
        """The ledger's line of one step."""
        return Entry(GRADIENT, self.event)

    @property
    def grad_noise_multiplier(self) -> float:
        """The paper's ``σ_G = z·kappa``."""
        return self.noise_multiplier * self.kappa


def predeclared_terms(plan: Plan, epoch: int, clip_norm: float) -> Terms:
    """As the plan has them."""
    workload = plan.workload
    index = 0 if plan.open_ended else epoch - 1
    return Terms(
        epoch=epoch,
        sampling_rate=workload.sampling_rate[index],
        noise_multiplier=plan.noise_multiplier(epoch),
        clip_norm=math.inf if plan.accounting is None else clip_norm,
        kappa=workload.kappa[index],
        equivalent_batch=workload.equivalent_batch[index],
    )


def adaptive_terms(
    plan: Plan, epoch: int, clip_norm: float, noisy_norm_sum: float, spent: Mapping[Event, int]
) -> Terms:
    """Solved from a noisy norm sum and from what was spent before.

    Args:
        plan: the adaptive plan.
        epoch: counted from 1.
        clip_norm: ``C`` of this epoch.
        noisy_norm_sum: ``K'`` of this epoch, as the noise left it.
        spent: every event so far and how often, the release of ``K'`` included.
    """
    accounting, workload = plan.accounting, plan.workload
    assert isinstance(accounting, AdaptivePlan)
    bounds = NormSumBounds.create(
        n_public=workload.n_public,
        batch_size=workload.batch_size,
        clip_norm=clip_norm,
        pi_cap=plan.config.pi_cap,
    )
    # The division may lose a last bit, at either end.
    share = bounds.clip(noisy_norm_sum) / bounds.highest
    kappa = min(max(share, accounting.smallest_kappa), 1.0)
    costs = [times * renyi_divergence(event, accounting.order) for event, times in spent.items()]
    sigma_G = next_grad_noise(accounting, epoch=epoch, kappa=kappa, spent=math.fsum(costs))
    step = adaptive_step(workload, sigma_G, kappa)
    return Terms(
        epoch=epoch,
        sampling_rate=step.sampling_rate,
        noise_multiplier=step.noise_multiplier,
        clip_norm=clip_norm,
        kappa=kappa,
        equivalent_batch=step.sampling_rate * workload.n_public,
    )
