import math

import pytest
from dp_accounting import rdp
from hypothesis import given
from hypothesis import strategies as st

from dpis.accounting import Composition, Gaussian, PoissonGaussian
from dpis.accounting.renyi import (
    INTEGER_ORDERS,
    best_order,
    composed_divergence,
    conversion_offset,
    renyi_divergence,
)

from .exact import renyi_both_directions
from .strategies import compositions, events, multipliers, orders, rates


def by_dp_accounting(event, order):
    accountant = rdp.RdpAccountant([order])
    accountant.compose(event.to_dp_accounting())
    return float(accountant.rdp[0])


@given(events, orders)
def test_closed_form_equals_dp_accounting(event, order):
    """Eq. 13 at integer orders, with the factor 2 that the displays before it lack."""
    assert renyi_divergence(event, order) == pytest.approx(
        by_dp_accounting(event, order), rel=1e-9, abs=1e-12
    )


def law_both_directions_are_bounded(divergence=renyi_divergence):
    for rate in (0.003, 0.05, 0.4):
        for z in (0.6, 1.0, 3.0):
            event = PoissonGaussian(sampling_rate=rate, noise_multiplier=z)
            for order in (2, 5, 17):
                forward, reverse = renyi_both_directions(event, order)
                claimed = divergence(event, order)
                assert claimed == pytest.approx(forward, rel=1e-6, abs=1e-12)
                assert claimed >= reverse * (1 - 1e-9)


def test_both_directions_are_bounded():
    law_both_directions_are_bounded()


@given(rates, multipliers, orders, st.floats(1.01, 3.0))
def test_divergence_falls_with_noise_and_rises_with_rate_and_order(rate, z, order, factor):
    here = renyi_divergence(PoissonGaussian(sampling_rate=rate, noise_multiplier=z), order)
    noisier = PoissonGaussian(sampling_rate=rate, noise_multiplier=z * factor)
    rarer = PoissonGaussian(sampling_rate=rate / factor, noise_multiplier=z)
    assert renyi_divergence(noisier, order) <= here
    assert renyi_divergence(rarer, order) <= here
    event = PoissonGaussian(sampling_rate=rate, noise_multiplier=z)
    assert renyi_divergence(event, order + 1) >= here * (1 - 1e-12)
    assert here >= 0


def law_divergence_rises_with_the_norm_sum(divergence=renyi_divergence):
    """At fixed sigma_G a larger K_tilde (kappa) costs more: π = b/(kappa n), z = sigma_G/kappa."""
    for sigma in (0.5, 0.8, 1.5, 4.0):
        for base_rate in (0.001, 0.0085, 0.05):
            for order in (2, 3, 8, 32):
                costs = [
                    divergence(
                        PoissonGaussian(
                            sampling_rate=base_rate / kappa, noise_multiplier=sigma / kappa
                        ),
                        order,
                    )
                    for kappa in (0.2, 0.3, 0.5, 0.8, 1.0)
                ]
                assert costs == sorted(costs)


def test_divergence_rises_with_the_norm_sum():
    law_divergence_rises_with_the_norm_sum()


def test_tiny_rates_do_not_cancel_to_a_negative_divergence():
    event = PoissonGaussian(sampling_rate=1e-9, noise_multiplier=50.0)
    assert 0 < renyi_divergence(event, 64) < 1e-15


def test_rate_one_is_the_plain_gaussian():
    for order in (2, 9, 100):
        sampled = PoissonGaussian(sampling_rate=1.0, noise_multiplier=1.3)
        assert renyi_divergence(sampled, order) == renyi_divergence(
            Gaussian(noise_multiplier=1.3), order
        )


@given(compositions, orders, st.integers(2, 9))
def test_divergences_add_up(composition, order, times):
    assert composed_divergence(composition.repeat(times), order) == pytest.approx(
        times * composed_divergence(composition, order), rel=1e-12
    )


@pytest.mark.parametrize("order", [2, 7, 64, 1024])
def test_conversion_equals_dp_accounting(order):
    for delta in (1e-3, 1e-5, 1e-8):
        expected, _ = rdp.compute_epsilon([order], [0.7], delta)
        assert 0.7 + conversion_offset(order, delta) == pytest.approx(expected, rel=1e-12)


def test_epsilon_is_clamped_at_zero():
    nothing_much = Composition.of(Gaussian(noise_multiplier=1e9))
    epsilon, _ = best_order(nothing_much, 0.5)
    assert epsilon == 0.0


def test_orders_of_the_filter_are_integers():
    assert all(isinstance(order, int) and order >= 2 for order in INTEGER_ORDERS)
    assert list(INTEGER_ORDERS) == sorted(set(INTEGER_ORDERS))
    assert math.log2(INTEGER_ORDERS[-1]) == 14
