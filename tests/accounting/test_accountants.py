import math
from functools import partial

import numpy as np
import pytest
from dp_accounting import pld, rdp
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from hypothesis import given, settings
from hypothesis import strategies as st

from dpis.accounting import (
    Accountant,
    Composition,
    Gaussian,
    PoissonGaussian,
    epsilon_by_pld,
    epsilon_by_rdp,
)
from dpis.accounting.pld import divergence_added, divergence_removed
from dpis.errors import InputError

from .exact import hockey_stick_epsilon

DELTA = 1e-5
coarse_pld = partial(epsilon_by_pld, interval=1e-3)


def law_pld_bounds_both_directions(epsilon_of=coarse_pld):
    """One event: never below the exact answer of either direction, and close to the larger one."""
    for rate in (0.01, 0.1, 0.6):
        for z in (0.7, 1.5, 4.0):
            event = PoissonGaussian(sampling_rate=rate, noise_multiplier=z)
            exact = max(hockey_stick_epsilon(event, DELTA))
            claimed = epsilon_of(Composition.of(event), DELTA)
            assert exact <= claimed + 1e-9
            assert claimed <= exact * 1.001 + 2e-3


def test_pld_bounds_both_directions():
    law_pld_bounds_both_directions()


@given(
    st.sampled_from([coarse_pld, epsilon_by_rdp]),
    st.floats(1e-4, 0.1),
    st.floats(1.0, 20.0),
    st.integers(1, 300),
    st.floats(1.05, 2.0),
)
@pytest.mark.slow
@settings(max_examples=25)
def test_epsilon_is_monotone_in_steps_noise_and_rate(epsilon_of, rate, z, steps, factor):
    def epsilon(rate, z, steps):
        event = PoissonGaussian(sampling_rate=rate, noise_multiplier=z)
        return epsilon_of(Composition(((event, steps),)), DELTA)

    here = epsilon(rate, z, steps)
    slack = 1e-3 + 1e-3 * here  # the discretisation of privacy loss
    assert here >= 0
    assert epsilon(rate, z, steps + 25) >= here - slack
    assert epsilon(rate, z * factor, steps) <= here + slack
    assert epsilon(rate / factor, z, steps) <= here + slack


@given(st.floats(2.0, 20.0), st.integers(1, 40))
@settings(max_examples=15)
def test_n_copies_cost_what_the_composition_costs(z, count):
    """n Gaussians of multiplier z are one of multiplier z/sqrt(n)."""
    copies = Composition(((Gaussian(noise_multiplier=z), count),))
    one = Composition.of(Gaussian(noise_multiplier=z / math.sqrt(count)))
    for epsilon_of in (coarse_pld, epsilon_by_rdp):
        assert epsilon_of(copies, DELTA) == pytest.approx(epsilon_of(one, DELTA), rel=1e-6)


def test_rdp_is_never_below_pld():
    for z in (0.7, 1.2, 3.0):
        composition = Composition(((PoissonGaussian(sampling_rate=0.01, noise_multiplier=z), 500),))
        assert coarse_pld(composition, DELTA) < epsilon_by_rdp(composition, DELTA)


def test_a_fractional_order_that_does_not_converge_never_decides(monkeypatch):
    composition = Composition(((PoissonGaussian(sampling_rate=0.3, noise_multiplier=0.4), 3),))
    monkeypatch.setattr(rdp.RdpAccountant, "get_epsilon", lambda self, delta: math.nan)
    assert math.isfinite(epsilon_by_rdp(composition, DELTA))


def test_nothing_released_costs_nothing():
    assert epsilon_by_pld(Composition(), DELTA) == 0.0
    assert epsilon_by_rdp(Composition(), DELTA) == 0.0


def test_pld_refuses_a_delta_where_rounding_could_understate():
    many = Composition(((PoissonGaussian(sampling_rate=1e-5, noise_multiplier=0.5), 10**6),))
    with pytest.raises(InputError, match="rdp"):
        epsilon_by_pld(many, 1e-9)


def law_rounding_never_understates(epsilon_of=epsilon_by_pld):
    """20,000 steps at delta = 1e-9. The reference was composed by exponentially tilted transforms (2.08406)."""
    steps = Composition(((PoissonGaussian(sampling_rate=1e-4, noise_multiplier=0.6), 20_000),))
    assert epsilon_of(steps, 1e-9) >= 2.08406


def test_rounding_never_understates():
    law_rounding_never_understates()


@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("z", [0.5, 2.0, 30.0])
def test_our_divergences_equal_those_of_dp_accounting(rate, z):
    """The whole grid at once against dp-accounting point by point, both directions."""
    for direction, ours in [
        (AdjacencyType.REMOVE, divergence_removed),
        (AdjacencyType.ADD, divergence_added),
    ]:
        if rate == 1.0 and direction is AdjacencyType.ADD:
            continue  # symmetric: one direction serves both
        theirs = GaussianPrivacyLoss(z, sampling_prob=rate, adjacency_type=direction)
        bounds = theirs.connect_dots_bounds()
        epsilons = np.linspace(bounds.epsilon_lower, bounds.epsilon_upper, 501)
        expected = theirs.get_delta_for_epsilon(epsilons)
        assert np.clip(ours(epsilons, rate, z), 0, 1) == pytest.approx(
            expected, abs=1e-14, rel=1e-9
        )


@pytest.mark.parametrize("steps", [1, 500])
def test_our_epsilon_equals_that_of_dp_accounting(steps):
    for event in (
        PoissonGaussian(sampling_rate=0.01, noise_multiplier=0.8),
        PoissonGaussian(sampling_rate=0.2, noise_multiplier=3.0),
        Gaussian(noise_multiplier=20.0),
    ):
        composition = Composition(((event, steps),))
        accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
        accountant.compose(composition.to_dp_accounting())
        assert coarse_pld(composition, DELTA) == pytest.approx(
            accountant.get_epsilon(DELTA), rel=5e-5
        )


def law_unknown_accountants_raise():
    with pytest.raises(InputError, match="pld, rdp"):
        Accountant.parse("gdp")


def test_unknown_accountants_raise():
    law_unknown_accountants_raise()
