"""From what an attack got right to a lower bound on epsilon that is wrong with a stated probability.

Many runs: one event, its probabilities in both worlds bounded by Clopper and Pearson. One run with many canaries: the
theorem of Steinke, Nasr and Jagielski (2023) for (epsilon, delta), that of Mahloujifar, Melis and Chaudhuri (2024) for
trade-off curves. An estimate is no bound, and is called one nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import beta, binom, norm

from dpis.auditing.tradeoff import Curve, gaussian_deltas
from dpis.errors import InputError

Array = NDArray[np.float64]

FALSE_ALARM = 0.05
"""How often a bound may lie above the truth."""

MOST = 100.0
"""No audit shows a larger epsilon."""


# ── many runs: one event ─────────────────────────────────────────────────────────────────────────────


def least_probability(hits: Array | int, runs: int, error: float = FALSE_ALARM / 2) -> Array:
    """What the probability of an event is at least, but for a chance of ``error``."""
    hits = np.asarray(hits, dtype=np.float64)
    least: Array = np.where(hits > 0, beta.ppf(error, np.maximum(hits, 1), runs - hits + 1), 0.0)
    return least


def most_probability(hits: Array | int, runs: int, error: float = FALSE_ALARM / 2) -> Array:
    """What the probability of an event is at most, but for a chance of ``error``."""
    hits = np.asarray(hits, dtype=np.float64)
    rest = np.maximum(runs - hits, 1)
    most: Array = np.where(hits < runs, beta.isf(error, hits + 1, rest), 1.0)
    return most


def epsilon_of_rates(least: Array, most: Array, delta: float) -> Array:
    """Epsilon at least, of an event with these probabilities in the two worlds; 0 where nothing is shown."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.log(np.maximum(least - delta, 0.0)) - np.log(most)
    bounds: Array = np.clip(np.nan_to_num(found, nan=0.0, neginf=0.0), 0.0, MOST)
    return bounds


@dataclass(frozen=True)
class Threshold:
    """The event "the score is above (below) a number", which one world makes likelier."""

    value: float
    above: bool

    def hits(self, scores: Array) -> int:
        """How often it occurred."""
        return int((scores > self.value if self.above else scores < self.value).sum())


CAUTION = 1e-4
"""While an event is chosen: among many, rare ones look better than they are."""

Worth = Callable[[Array, Array], Array]
"""Of events, by their least probability in one world and their most in the other: the larger, the more they show."""


def best_threshold(scores_in: Array, scores_out: Array, worth: Worth) -> Threshold:
    """The event that shows most on these scores; to be tried on others."""
    if not len(scores_in) or not len(scores_out):
        return Threshold(math.inf, True)
    inside, outside = np.sort(scores_in), np.sort(scores_out)
    both = np.sort(np.concatenate([inside, outside]))
    places = _tail_places(len(both))
    values = both[np.union1d(places, len(both) - 1 - places)]
    n_in, n_out = len(inside), len(outside)
    above = worth(
        least_probability(n_in - _places(inside, values, "right"), n_in, CAUTION),
        most_probability(n_out - _places(outside, values, "right"), n_out, CAUTION),
    )
    below = worth(
        least_probability(_places(outside, values, "left"), n_out, CAUTION),
        most_probability(_places(inside, values, "left"), n_in, CAUTION),
    )
    if above.max() >= below.max():
        return Threshold(float(values[above.argmax()]), True)
    return Threshold(float(values[below.argmax()]), False)


def _places(ascending: Array, values: Array, side: Literal["left", "right"]) -> Array:
    return np.searchsorted(ascending, values, side=side).astype(np.float64)


def _tail_places(count: int) -> NDArray[np.int64]:
    """Places to try, dense at the beginning."""
    places = np.unique(np.geomspace(1, count, min(count, 120)).astype(np.int64)) - 1
    return places


@dataclass(frozen=True)
class Rates:
    """How often one event occurs, in either world; both hold but for a chance of `FALSE_ALARM`.

    Attributes:
        least: its probability in the world that makes it likelier, from below.
        most: in the other world, from above.
    """

    least: float
    most: float

    def epsilon(self, delta: float) -> float:
        """At least."""
        return float(epsilon_of_rates(np.array(self.least), np.array(self.most), delta))

    def refute(self, curve: Curve) -> bool:
        """Whether no mechanism under this curve does so."""
        return self.least > float(curve.true_positive_rate(self.most)[0])


def rates_of(event: Threshold, scores_in: Array, scores_out: Array) -> Rates:
    """Of an event that was chosen without looking at these scores."""
    if not len(scores_in) or not len(scores_out):
        return Rates(0.0, 1.0)
    likely, unlikely = (scores_in, scores_out) if event.above else (scores_out, scores_in)
    return Rates(
        float(least_probability(event.hits(likely), len(likely))),
        float(most_probability(event.hits(unlikely), len(unlikely))),
    )


def shift_over(curve: Curve) -> Worth:
    """How far apart Gaussians with these probabilities lie, over how far the curve lets them: above 1 it is refuted."""

    def worth(least: Array, most: Array) -> Array:
        inner = np.clip(most, 1e-12, 1 - 1e-12)
        allowed = norm.ppf(np.clip(curve.true_positive_rate(inner), 0, 1 - 1e-12)) - norm.ppf(inner)
        found = norm.ppf(np.clip(least, 1e-12, 1 - 1e-12)) - norm.ppf(inner)
        ratios: Array = np.where((least > 0) & (most < 1), found / np.maximum(allowed, 1e-9), 0.0)
        return ratios

    return worth


# ── one run: many canaries, each in by a fair coin ───────────────────────────────────────────────────


@dataclass(frozen=True)
class Guesses:
    """What an attack guessed about canaries.

    Attributes:
        canaries: ``m``: how many there are.
        made: ``r``: about how many of them it said "in" or "out".
        right: how many of these it got right.
    """

    canaries: int
    made: int
    right: int

    def __post_init__(self) -> None:
        if not 0 <= self.right <= self.made <= self.canaries:
            raise InputError(f"right <= made <= canaries is required, found {self}")


def p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are at most, if (epsilon, delta) holds (Steinke et al., theorem 5.2)."""
    share, right = expit(epsilon), guesses.right
    at_least = binom.sf(right - 1, guesses.made, share)
    if delta == 0 or right == 0:
        return float(min(1.0, at_least))
    shifts = np.arange(1, right + 1)
    gained = (binom.sf(right - shifts - 1, guesses.made, share) - at_least) / shifts
    return float(min(1.0, at_least + 2 * guesses.canaries * delta * gained.max()))


def one_run_bound(guesses: Guesses, delta: float) -> float:
    """Epsilon at least, of a mechanism that is (epsilon, delta)-private for every single canary."""
    return _largest_refuted(lambda epsilon: p_value(guesses, epsilon, delta) < FALSE_ALARM)


def _largest_refuted(refuted: Callable[[float], bool]) -> float:
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
        if high > MOST:
            return MOST
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def curve_refuted(guesses: Guesses, curve: Curve) -> bool:
    """Whether so many right guesses have a probability below `FALSE_ALARM` under a trade-off curve.

    Say ``p_w`` is the probability of ``w`` right guesses, and that those of ``right`` or more add up to
    `FALSE_ALARM`. For every ``i`` compare the events "a canary is guessed right, and at least ``i`` in all are" and
    "it is guessed wrong, and at least ``i - 1`` in all are right". They differ in the canary's coin alone, so the
    curve bounds the second from below by the first. Summed over canaries, their probabilities are
    ``right_i = Σ_{w>=i} w·p_w / m`` and ``wrong_{i-1} = Σ_{w>=i-1} (made - w)·p_w / m``. Going down in ``i``, both grow
    by what the curve demands; if in the end they exceed ``made / m``, there is no such ``p``.
    """
    m, made, right = guesses.canaries, guesses.made, guesses.right
    correct, wrong = FALSE_ALARM * right / m, FALSE_ALARM * (made - right) / m
    for i in range(right - 1, -1, -1):
        demanded = max(wrong, float(curve.false_negative_rate(1 - correct)[0]))
        if demanded == wrong:
            break
        correct = min(1.0, correct + i / (made - i) * (demanded - wrong))
        wrong = demanded
        if correct + wrong > made / m:
            return True
    return correct + wrong > made / m


# ── an estimate ──────────────────────────────────────────────────────────────────────────────────────


def gaussian_estimate(scores_in: Array, scores_out: Array, delta: float) -> float:
    """Epsilon as if scores were two Gaussians of one width: no bound, and no confidence."""
    if len(scores_in) < 2 or len(scores_out) < 2:
        return math.nan
    pooled = math.sqrt((np.var(scores_in, ddof=1) + np.var(scores_out, ddof=1)) / 2)
    shift = (np.mean(scores_in) - np.mean(scores_out)) / pooled if pooled > 0 else math.inf
    return epsilon_of_shift(float(shift), delta)


def epsilon_of_shift(shift: float, delta: float) -> float:
    """Of one Gaussian whose means lie ``shift`` standard deviations apart."""

    def excess(epsilon: float) -> float:
        return float(gaussian_deltas(np.array([epsilon]), shift)[0]) - delta

    if not shift > 0 or excess(0.0) <= 0:
        return 0.0
    if excess(MOST) > 0:
        return MOST
    return float(brentq(excess, 0.0, MOST, xtol=1e-6))
