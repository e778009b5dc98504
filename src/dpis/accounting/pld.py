"""Epsilon of a composition that is fixed beforehand, by privacy loss distributions: tighter than Renyi.

dp-accounting discretises, composes and answers; what is ours is the hockey-stick divergence of a Poisson-sampled
Gaussian on a whole grid at once. dp-accounting evaluates it point by point, which took most of the time of a plan.
A test holds the two against each other; `dpis verify` uses dp-accounting's own.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from dpis.accounting.events import Composition, Event, Gaussian
from dpis.errors import InputError

Array = NDArray[np.float64]

ROUNDING_OF_ONE_COMPOSITION = 2.0**-52
"""What rounding in the convolutions may hide of delta, for each event composed.

Measured against composition by exponentially tilted transforms, which are exact in the tail: about 5e-17 an event, of
either sign. At a rate of 1e-5, z = .5 and a million steps, epsilon at delta = 1e-9 came out 0.6 % too small.
"""

TRUNCATED_SHARE = 1e-4
"""Of delta, for the tails of all events together. What is cut off counts as an infinite loss, so it can only cost
epsilon (about 1e-5 of it); the grids are half as long."""

WIDEST_FINAL_INTERVAL = 1e-4
"""The widest discretisation of privacy loss that a final answer may rest on."""

LARGEST_ROUNDING_SHARE = 0.005
"""Of delta: beyond it the correction would cost tightness, so the answer is refused."""


def delta_to_ask_for(delta: float, events: int) -> float:
    """A delta so much smaller that rounding in the convolutions cannot understate epsilon.

    Raises:
        InputError: Rounding would take more than `LARGEST_ROUNDING_SHARE` of delta.
    """
    hidden = events * ROUNDING_OF_ONE_COMPOSITION
    if hidden > LARGEST_ROUNDING_SHARE * delta:
        raise InputError(
            f"delta = {delta:g} is too small for {events:,} events by the pld accountant: rounding could understate "
            f"epsilon. Use the rdp accountant, or a delta of at least {hidden / LARGEST_ROUNDING_SHARE:.1g}"
        )
    return delta - hidden


def epsilon_by_pld(
    composition: Composition, delta: float, interval: float = WIDEST_FINAL_INTERVAL
) -> float:
    """Epsilon at ``delta`` by privacy loss distributions, add and remove directions, pessimistic.

    Args:
        composition: Events fixed before the data is touched.
        delta: Not so small that rounding could understate epsilon.
        interval: Discretisation of privacy loss. A finer one is tighter.

    Returns:
        An upper bound on epsilon, at least 0; ``inf`` where none could be established.
    """
    asked = delta_to_ask_for(delta, composition.events)
    epsilon = float(_composed(composition, delta, interval).get_epsilon_for_delta(asked))
    return math.inf if math.isnan(epsilon) else max(0.0, epsilon)


def deltas_by_pld(
    composition: Composition, epsilons: Array, least_delta: float, interval: float
) -> Array:
    """Delta at each epsilon, an upper bound, the worse of add and remove.

    Args:
        composition: Events fixed before the data is touched.
        epsilons: From 0.
        least_delta: What is below does not matter.
        interval: Discretisation of privacy loss.
    """
    total = _composed(composition, least_delta, interval)
    hidden = composition.events * ROUNDING_OF_ONE_COMPOSITION
    deltas: Array = np.asarray(total.get_delta_for_epsilon(epsilons), dtype=np.float64) + hidden
    return deltas


def _composed(
    composition: Composition, delta: float, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Of all events; a small part of ``delta`` is cut off and counts as an infinite loss."""
    log_tail = math.log(TRUNCATED_SHARE * delta / max(1, composition.events))
    total = privacy_loss_distribution.identity(value_discretization_interval=interval)
    for event, count in composition:
        total = total.compose(_distribution(event, count, interval, log_tail))
    return total


def _distribution(
    event: Event, count: int, interval: float, log_tail: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Of ``count`` copies. Unsampled, they are one Gaussian of multiplier ``z/√count``, in both directions alike."""
    z = event.noise_multiplier
    if isinstance(event, Gaussian) or event.sampling_rate == 1.0:
        both = _discretised(AdjacencyType.REMOVE, 1.0, z / math.sqrt(count), interval, log_tail)
        return privacy_loss_distribution.PrivacyLossDistribution(both)
    removed, added = (
        _discretised(direction, event.sampling_rate, z, interval, log_tail)
        for direction in (AdjacencyType.REMOVE, AdjacencyType.ADD)
    )
    return privacy_loss_distribution.PrivacyLossDistribution(removed, added).self_compose(count)


def _discretised(
    direction: AdjacencyType, rate: float, z: float, interval: float, log_tail: float
) -> pld_pmf.PLDPmf:
    """dp-accounting's pessimistic discretisation ("connect the dots") of one direction."""
    bounds = GaussianPrivacyLoss(
        z, sampling_prob=rate, adjacency_type=direction, log_mass_truncation_bound=log_tail
    ).connect_dots_bounds()
    first = math.floor(bounds.epsilon_lower / interval)
    last = math.ceil(bounds.epsilon_upper / interval)
    epsilons = np.arange(first, last + 1) * interval
    divergence = divergence_removed if direction is AdjacencyType.REMOVE else divergence_added
    deltas = np.clip(divergence(epsilons, rate, z), 0.0, 1.0)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, first, last, deltas)


def divergence_removed(epsilons: Array, rate: float, z: float) -> Array:
    """``sup_S M(S) - exp(ε) N(S)`` for ``N = Normal(0, z²)``, ``M = (1-π)N + π Normal(1, z²)``.

    The best ``S`` is ``x >= x*`` with ``x* = z² log((exp(ε) - 1 + π)/π) + 1/2``; everything, where there is no ``x*``.
    """
    deltas = -np.expm1(epsilons)
    inside = epsilons > math.log1p(-rate) if rate < 1 else np.full(epsilons.shape, True)
    e = epsilons[inside]
    cut = z**2 * (_log_of_shifted(e, rate) - math.log(rate)) + 0.5
    mixture = (1 - rate) * ndtr(-cut / z) + rate * ndtr((1 - cut) / z)
    deltas[inside] = mixture - np.exp(e + log_ndtr(-cut / z))
    return deltas


def divergence_added(epsilons: Array, rate: float, z: float) -> Array:
    """``sup_S N(S) - exp(ε) M(S)``: the best ``S`` is ``x <= x*``, with ``-ε`` in ``x*``.

    From ``ε = -log(1-π)`` on there is nothing to gain: 0.
    """
    deltas = np.zeros_like(epsilons)
    inside = epsilons < -math.log1p(-rate)
    e = epsilons[inside]
    cut = z**2 * (_log_of_shifted(-e, rate) - math.log(rate)) + 0.5
    mixture = (1 - rate) * ndtr(cut / z) + rate * ndtr((cut - 1) / z)
    deltas[inside] = ndtr(cut / z) - np.exp(e) * mixture
    return deltas


def _log_of_shifted(epsilons: Array, rate: float) -> Array:
    """``log(exp(ε) - (1 - π))``, without overflow; ``-inf`` where rounding leaves nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        small = np.log(np.expm1(epsilons) + rate)
        large = epsilons + np.log1p(-(1 - rate) * np.exp(-np.abs(epsilons)))
    logs: Array = np.where(epsilons > 1, large, small)
    return np.where(np.isnan(logs), -np.inf, logs)
