"""Slow and obvious: divergences of one event by numerical integration and closed forms, nothing shared with src."""

import math

import numpy as np
from scipy import optimize
from scipy.stats import norm

from dpis.accounting import PoissonGaussian


def renyi_both_directions(event: PoissonGaussian, order: int) -> tuple[float, float]:
    """``D_α(P‖Q)`` and ``D_α(Q‖P)`` with Q = N(0, z²), P = (1-π)Q + π N(1, z²), on a fine grid."""
    z, rate = event.noise_multiplier, event.sampling_rate
    # The integrand of the forward direction peaks near x = order, that of the reverse near 0 or below.
    x = np.linspace(-14 * z - order, 14 * z + 2 * order, 400_001)
    log_q = norm.logpdf(x, 0, z)
    log_p = np.logaddexp(math.log1p(-rate) + log_q, math.log(rate) + norm.logpdf(x, 1, z))

    def divergence(log_a: np.ndarray, log_b: np.ndarray) -> float:
        log_integrand = order * log_a + (1 - order) * log_b
        top = log_integrand.max()
        return (top + math.log(np.trapezoid(np.exp(log_integrand - top), x))) / (order - 1)

    return divergence(log_p, log_q), divergence(log_q, log_p)


def hockey_stick_epsilon(event: PoissonGaussian, delta: float) -> tuple[float, float]:
    """Epsilon of one event when a record is removed, and when it is added, from normal tails."""
    z, rate = event.noise_multiplier, event.sampling_rate

    def tail(x: float, mean: float) -> float:
        return float(norm.sf((x - mean) / z))

    def delta_remove(epsilon: float) -> float:  # P = mixture against Q
        inside = (math.exp(epsilon) - 1 + rate) / rate
        x = z**2 * math.log(inside) + 0.5
        return rate * tail(x, 1) + (1 - rate) * tail(x, 0) - math.exp(epsilon) * tail(x, 0)

    def delta_add(epsilon: float) -> float:  # Q against the mixture: large where x is small
        inside = (math.exp(-epsilon) - 1 + rate) / rate
        if inside <= 0:
            return 0.0
        x = z**2 * math.log(inside) + 0.5
        below = 1 - tail(x, 0), 1 - tail(x, 1)
        return below[0] - math.exp(epsilon) * ((1 - rate) * below[0] + rate * below[1])

    def solve(delta_of) -> float:
        if delta_of(0.0) <= delta:
            return 0.0
        return optimize.brentq(lambda e: delta_of(e) - delta, 0.0, 200.0, xtol=1e-12)

    return solve(delta_remove), solve(delta_add)
