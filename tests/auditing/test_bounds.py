"""Every bound is wrong as often as stated, at most; and behaves at its edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom, norm

from dpis.accounting import Composition, Gaussian, PoissonGaussian, epsilon_by_pld
from dpis.auditing.bounds import (
    FALSE_ALARM,
    MOST,
    Guesses,
    best_threshold,
    curve_refuted,
    epsilon_of_rates,
    epsilon_of_shift,
    gaussian_estimate,
    least_probability,
    most_probability,
    one_run_bound,
    p_value,
    rates_of,
    shift_over,
)
from dpis.auditing.tradeoff import Curve, scaled
from dpis.errors import InputError

# ── many runs ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("truth", [0.001, 0.03, 0.5, 0.98])
def test_either_probability_is_missed_as_often_as_stated(truth: float) -> None:
    """Exactly: over all numbers of hits."""
    hits, error = np.arange(201), 0.025
    chances = binom.pmf(hits, 200, truth)
    assert chances[least_probability(hits.astype(float), 200, error) > truth].sum() <= error
    assert chances[most_probability(hits.astype(float), 200, error) < truth].sum() <= error


def test_probabilities_at_the_edges() -> None:
    assert least_probability(0, 10) == 0
    assert most_probability(10, 10) == 1
    assert 0 < least_probability(10, 10) < 1
    assert 0 < most_probability(0, 10) < 1


def test_nothing_is_shown_where_nothing_was_seen() -> None:
    nothing, something = np.zeros(0), np.ones(3)
    for pair in ((nothing, something), (something, nothing), (nothing, nothing)):
        event = best_threshold(*pair, lambda least, most: epsilon_of_rates(least, most, 0.0))
        rates = rates_of(event, *pair)
        assert rates.epsilon(0.0) == 0
        assert not rates.refute(Curve.of_gaussian(0.1))


@pytest.mark.parametrize("likelier", ["in", "out"])
def test_both_orders_of_the_worlds_are_tried(likelier: str) -> None:
    """What only one world does, seldom, tells it apart: high scores of the one, or low ones of the other."""
    scores = np.random.default_rng(3).standard_normal((2, 4000))
    seldom = np.arange(4000) % 10 == 0
    if likelier == "in":
        scores[0, seldom] += 9.0
    else:
        scores[1, seldom] -= 9.0
    curve = Curve.of_gaussian(0.5)
    event = best_threshold(scores[0, :2000], scores[1, :2000], shift_over(curve))
    assert rates_of(event, scores[0, 2000:], scores[1, 2000:]).refute(curve)


# ── one run ──────────────────────────────────────────────────────────────────────────────────────────


def refuted(made: int, bad: object) -> np.ndarray:
    return np.array([bool(bad(Guesses(made, made, right))) for right in range(made + 1)])


@pytest.mark.parametrize(("made", "epsilon"), [(1, 0.1), (20, 0.0), (100, 1.0), (400, 3.0)])
def test_randomised_response_is_accused_as_often_as_stated(made: int, epsilon: float) -> None:
    """Every canary says in or out, rightly with probability ``e^ε / (1 + e^ε)``: exact, over all outcomes."""
    chances = binom.pmf(np.arange(made + 1), made, expit(epsilon))
    by_theorem = refuted(made, lambda guesses: one_run_bound(guesses, 0.0) > epsilon + 1e-3)
    curve = Curve.of_claim(epsilon, 0.0)
    by_curve = refuted(made, lambda guesses: curve_refuted(guesses, curve))
    assert chances[by_theorem].sum() <= FALSE_ALARM
    assert chances[by_curve].sum() <= FALSE_ALARM
    if made >= 100:  # and they are not idle
        assert chances[by_theorem].sum() > FALSE_ALARM / 5


@pytest.mark.parametrize(("made", "shift"), [(10, 0.5), (100, 1.0), (500, 2.0)])
def test_gaussians_are_accused_as_often_as_stated(made: int, shift: float) -> None:
    """Each canary is a Gaussian of its own, guessed by its sign: right with probability ``Φ(shift / 2)``."""
    chances = binom.pmf(np.arange(made + 1), made, norm.cdf(shift / 2))
    curve = Curve.of_gaussian(shift)
    by_curve = refuted(made, lambda guesses: curve_refuted(guesses, curve))
    assert chances[by_curve].sum() <= FALSE_ALARM
    epsilon = epsilon_of_shift(shift, 1e-3)
    by_theorem = refuted(made, lambda guesses: one_run_bound(guesses, 1e-3) > epsilon)
    assert chances[by_theorem].sum() <= FALSE_ALARM


def slow_p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """As the theorem is written."""
    share = 1 / (1 + math.exp(-epsilon))

    def at_least(number: int) -> float:
        return float(
            sum(binom.pmf(w, guesses.made, share) for w in range(max(number, 0), guesses.made + 1))
        )

    beta = at_least(guesses.right)
    gains = [(at_least(guesses.right - i) - beta) / i for i in range(1, guesses.canaries + 1)]
    return min(1.0, beta + 2 * guesses.canaries * delta * max(gains))


@pytest.mark.parametrize("right", [1, 7, 15, 20])
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
def test_p_values_are_those_of_the_theorem(right: int, epsilon: float) -> None:
    guesses = Guesses(40, 20, right)
    assert p_value(guesses, epsilon, 1e-3) == pytest.approx(slow_p_value(guesses, epsilon, 1e-3))


def test_one_run_at_the_edges() -> None:
    assert one_run_bound(Guesses(1000, 0, 0), 1e-5) == 0
    assert one_run_bound(Guesses(1000, 500, 0), 1e-5) == 0
    assert one_run_bound(Guesses(1, 1, 1), 0.0) == 0  # a guess is right by luck every other time
    all_right = one_run_bound(Guesses(1000, 1000, 1000), 0.0)
    assert all_right == pytest.approx(-math.log(FALSE_ALARM ** (-1 / 1000) - 1), abs=1e-3)
    assert one_run_bound(Guesses(1000, 1000, 1000), 1e-5) < all_right
    with pytest.raises(InputError):
        Guesses(10, 5, 6)


def test_more_right_guesses_show_more() -> None:
    bounds = [one_run_bound(Guesses(500, 200, right), 1e-5) for right in range(0, 201, 10)]
    assert bounds == sorted(bounds)
    curve = Curve.of_gaussian(1.0)
    by_curve = [curve_refuted(Guesses(500, 200, right), curve) for right in range(0, 201, 10)]
    assert by_curve == sorted(by_curve)
    assert by_curve[-1]


# ── curves and estimates ─────────────────────────────────────────────────────────────────────────────


def test_the_curve_of_a_gaussian() -> None:
    rates = np.linspace(0.001, 0.999, 50)
    exact = norm.cdf(norm.ppf(rates) + 1.3)
    curve = Curve.of_gaussian(1.3)
    assert np.abs(curve.true_positive_rate(rates) - exact).max() < 1e-3
    assert (curve.true_positive_rate(rates) >= exact - 1e-9).all()  # a curve never promises more
    of_events = Curve.of_events(Composition.of(Gaussian(noise_multiplier=1 / 1.3)))
    assert np.abs(of_events.true_positive_rate(rates) - exact).max() < 1e-3
    assert curve.advantage == pytest.approx(2 * norm.cdf(0.65) - 1)


def test_a_curve_gives_back_the_claim() -> None:
    step = PoissonGaussian(sampling_rate=0.1, noise_multiplier=0.9)
    composition = Composition(((step, 50),))
    found = Curve.of_events(composition).epsilon(1e-5)
    assert found == pytest.approx(epsilon_by_pld(composition, 1e-5), rel=0.03)
    assert found >= epsilon_by_pld(composition, 1e-5)
    assert Curve.of_events(scaled(composition, 1.5)).epsilon(1e-5) < found


def test_a_budget_alone_allows_more_than_events() -> None:
    composition = Composition.of(Gaussian(noise_multiplier=1.0))
    epsilon = epsilon_by_pld(composition, 1e-5)
    rates = np.linspace(0, 1, 20)
    by_budget = Curve.of_claim(epsilon, 1e-5).true_positive_rate(rates)
    assert (by_budget >= Curve.of_events(composition).true_positive_rate(rates) - 1e-9).all()


def test_estimates() -> None:
    scores = np.random.default_rng(1).standard_normal((2, 100_000))
    found = gaussian_estimate(scores[0] + 1.0, scores[1], 1e-5)
    assert found == pytest.approx(
        epsilon_by_pld(Composition.of(Gaussian(noise_multiplier=1.0)), 1e-5), rel=0.05
    )
    assert gaussian_estimate(scores[0], scores[1] + 1.0, 1e-5) == 0
    assert math.isnan(gaussian_estimate(scores[0][:1], scores[1], 1e-5))
    assert epsilon_of_shift(1e6, 1e-5) == MOST
