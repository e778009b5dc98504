"""Why an adaptive run's noise falls: importance sampling, or budget moved to late epochs?

Three noise levels by epoch, in the paper's ``σ_G``, all by Renyi divergence at the run's one fixed order ``α``:

* uniform: DP-SGD with the same batch and epochs, spending the whole budget evenly and nothing on other releases;
* importance: what the run spent on gradients, evenly over its epochs, each at the kappa that was released for it;
* actual: what the run did.

Between the first two lies the gain of importance sampling (less the cost of the releases it needs); between the last
two what the schedule moved from early epochs to late ones. That second part a DP-SGD could do as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpis.accounting import (
    Budget,
    Cadence,
    PoissonGaussian,
    Release,
    Workload,
    adaptive_step,
    plan_adaptive,
)
from dpis.accounting.calibration import smallest_parameter
from dpis.accounting.norm_sums import count_noise_multiplier
from dpis.accounting.renyi import renyi_budget, renyi_divergence
from dpis.accounting.workload import COUNT
from dpis.errors import InputError
from reproduction.rows import Row, clips_adaptively, option

_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class NoiseCauses:
    """``σ_G`` by epoch, three times."""

    uniform: tuple[float, ...]
    importance: tuple[float, ...]
    actual: tuple[float, ...]


def noise_causes(
    budget: Budget,
    workload: Workload,
    order: int,
    kappa: Sequence[float],
    grad_noise_multipliers: Sequence[float],
) -> NoiseCauses:
    """Split the fall of an adaptive run's noise into its two causes.

    Args:
        budget: The run's claim.
        workload: With kappa = 1, as the run's public plan has it.
        order: ``α`` of the run's filter.
        kappa: As released, by epoch.
        grad_noise_multipliers: ``σ_G`` as applied, by epoch.
    """
    epochs, steps = workload.epochs, workload.steps_per_epoch
    if not len(kappa) == len(grad_noise_multipliers) == epochs:
        raise InputError(
            f"one kappa and one noise for each of {epochs} epochs are required, "
            f"found {len(kappa)} and {len(grad_noise_multipliers)}"
        )
    actual = tuple(grad_noise_multipliers)
    spent = math.fsum(
        steps * renyi_divergence(adaptive_step(workload, sigma, k), order)
        for sigma, k in zip(actual, kappa, strict=True)
    )

    def least_noise(cost_of_step: float, kappa: float) -> float:
        def cost(sigma: float) -> float:
            return renyi_divergence(adaptive_step(workload, sigma, kappa), order)

        return smallest_parameter(cost, cost_of_step, guess=actual[0], tolerance=_TOLERANCE)

    whole = renyi_budget(budget, order)
    uniform = least_noise(whole / (epochs * steps), 1.0)
    return NoiseCauses(
        uniform=(uniform,) * epochs,
        importance=tuple(least_noise(spent / (epochs * steps), k) for k in kappa),
        actual=actual,
    )


def workload_of(n_public: int, history: Sequence[tuple[float, float]]) -> Workload:
    """The public plan's workload from released values: ``b = π · kappa · n_public``.

    Args:
        n_public: As the claim has it.
        history: Sampling rate and kappa of every epoch.
    """
    if not history:
        raise InputError("a run without epochs has no noise to explain")
    rate, kappa = history[0]
    event = PoissonGaussian(sampling_rate=rate, noise_multiplier=1.0)  # refused if it is no rate
    batch_size = round(event.sampling_rate * kappa * n_public)
    return Workload.create(n_public=n_public, batch_size=batch_size, epochs=len(history))


def causes_of(row: Row) -> NoiseCauses:
    """The two causes of an adaptive row's noise.

    Raises:
        InputError: The row does not say enough.
    """
    if option(row, "normalise") == "channel":
        raise InputError("channel statistics were released too, at a cost that a row does not tell")
    claim, history = row.get("claim") or {}, row.get("history") or []
    budget = Budget(_number(claim, "epsilon"), _number(claim, "delta"))
    rates, kappas, sigmas = (
        [_number(epoch, name) for epoch in history]
        for name in ("sampling_rate", "kappa", "grad_noise_multiplier")
    )
    workload = workload_of(int(_number(claim, "n_public")), list(zip(rates, kappas, strict=True)))
    return noise_causes(budget, workload, _filter_order(row, budget, workload), kappas, sigmas)


def _number(said: Mapping[str, Any], name: str) -> float:
    value = said.get(name)
    if not isinstance(value, int | float):
        raise InputError(f"{name} must be a number, found {value!r}")
    return float(value)


def _filter_order(row: Row, budget: Budget, workload: Workload) -> int:
    """The Renyi order of the run's filter, which follows from its public plan."""
    releases = []
    if row["claim"].get("n_public_source") == "released":
        releases.append(Release(COUNT, count_noise_multiplier(workload.n_public)))
    cadences = [Cadence.EACH_EPOCH] + [Cadence.BETWEEN_EPOCHS] * clips_adaptively(row)
    plan = plan_adaptive(budget, workload, releases=releases, norm_releases_per_epoch=cadences)
    return plan.order
