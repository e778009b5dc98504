"""Trade-off curves: how well anybody can tell two worlds apart, given what is claimed.

A test that says "in" for a record that is in with probability ``TPR``, and for one that is out with probability
``FPR``, is possible only if ``TPR <= 1 - f(FPR)``. Of a run's events, ``f`` follows from privacy loss distributions;
of an (epsilon, delta) alone, it is the envelope of two lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from dpis.accounting import Composition, Gaussian, PoissonGaussian
from dpis.accounting.pld import deltas_by_pld

Array = NDArray[np.float64]

_POINTS = 600
"""Of a curve: tangents, dense where epsilon is small."""
_INTERVAL = 1e-3
_LEAST_DELTA = 1e-12


@dataclass(frozen=True, eq=False)
class Curve:
    """The claims ``(epsilons[i], deltas[i])``, all of which hold: what they leave to an attacker.

    It is symmetric: it bounds both orders of the worlds.

    Attributes:
        epsilons: from 0, ascending.
        deltas: upper bounds, descending.

    Example:
        >>> curve = Curve.of_claim(epsilon=1.0, delta=0.0)
        >>> round(float(curve.true_positive_rate(0.1)[0]), 4)
        0.2718
        >>> round(curve.advantage, 4)
        0.4621
    """

    epsilons: Array
    deltas: Array

    @classmethod
    def of_claim(cls, epsilon: float, delta: float) -> Curve:
        """Of one claim, and what it implies at epsilon 0."""
        implied = (math.expm1(epsilon) + 2 * delta) / (math.exp(epsilon) + 1)
        return cls(np.array([0.0, epsilon]), np.array([implied, delta]))

    @classmethod
    def of_events(cls, composition: Composition, most: float = 100.0) -> Curve:
        """Of what was released, by privacy loss distributions.

        Args:
            composition: fixed before the data was touched.
            most: epsilons end here.
        """
        epsilons = np.concatenate([[0.0], np.geomspace(1e-3, most, _POINTS - 1)])
        deltas = deltas_by_pld(composition, epsilons, _LEAST_DELTA, _INTERVAL)
        return cls(epsilons, np.clip(deltas, 0.0, 1.0))

    @classmethod
    def of_gaussian(cls, shift: float) -> Curve:
        """Of one Gaussian whose means lie ``shift`` standard deviations apart."""
        epsilons = np.concatenate([[0.0], np.geomspace(1e-3, 100.0, _POINTS - 1)])
        return cls(epsilons, gaussian_deltas(epsilons, shift))

    def false_negative_rate(self, false_positive_rate: Array | float) -> Array:
        """``f``: at least so many records that are in go unnoticed, at this share of false alarms."""
        alpha = np.atleast_1d(np.asarray(false_positive_rate, dtype=np.float64))[:, None]
        room = 1 - self.deltas - np.exp(np.minimum(self.epsilons, 700.0)) * alpha
        other = np.exp(-self.epsilons) * (1 - self.deltas - alpha)
        least: Array = np.maximum(np.maximum(room, other).max(axis=1), 0.0)
        return least

    def true_positive_rate(self, false_positive_rate: Array | float) -> Array:
        """At most so many records that are in are found, at this share of false alarms."""
        return 1 - self.false_negative_rate(false_positive_rate)

    @property
    def advantage(self) -> float:
        """Of membership inference: the most that ``TPR - FPR`` can be."""
        return float(self.deltas[0])

    def epsilon(self, delta: float) -> float:
        """The claim at this delta: never less than what holds, since ``epsilons`` is a grid; inf beyond it."""
        enough = (self.deltas <= delta).nonzero()[0]
        return float(self.epsilons[enough[0]]) if len(enough) else math.inf


def gaussian_deltas(epsilons: Array, shift: float) -> Array:
    """``delta(epsilon)`` of one Gaussian of this shift: exact."""
    if shift <= 0:
        return np.zeros_like(epsilons)
    upper = norm.cdf(shift / 2 - epsilons / shift)
    lower = np.exp(epsilons + norm.logcdf(-shift / 2 - epsilons / shift))
    deltas: Array = np.maximum(upper - lower, 0.0)
    return deltas


def scaled(composition: Composition, noise: float) -> Composition:
    """The same events with so many times their noise."""

    def runs() -> Iterator[tuple[Gaussian | PoissonGaussian, int]]:
        for event, count in composition:
            z = noise * event.noise_multiplier
            if isinstance(event, Gaussian):
                yield Gaussian(noise_multiplier=z), count
            else:
                rate = event.sampling_rate
                yield PoissonGaussian(sampling_rate=rate, noise_multiplier=z), count

    return Composition(tuple(runs()))
