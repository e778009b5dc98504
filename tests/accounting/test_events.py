import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpis.accounting import Composition, Gaussian, PoissonGaussian
from dpis.accounting.events import event_from_json, event_to_json
from dpis.errors import InputError

from .strategies import compositions, events, multipliers, rates


@given(events)
def test_json_gives_the_same_event_back(event):
    assert event_from_json(event_to_json(event)) == event
    assert hash(event_from_json(event_to_json(event))) == hash(event)


@pytest.mark.parametrize(
    "bad", [0, -1.0, 1e-160, 1e200, 10**400, math.nan, math.inf, True, "2", None]
)
def test_noise_multiplier_must_be_finite_and_positive(bad):
    with pytest.raises(InputError, match="noise_multiplier"):
        Gaussian(noise_multiplier=bad)
    with pytest.raises(InputError, match="noise_multiplier"):
        PoissonGaussian(sampling_rate=0.1, noise_multiplier=bad)


@pytest.mark.parametrize("bad", [0, -0.1, 1e-30, 1.0000001, 1.7, math.nan])
def test_sampling_rate_must_be_a_probability(bad):
    with pytest.raises(InputError, match="sampling_rate"):
        PoissonGaussian(sampling_rate=bad, noise_multiplier=1.0)


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "laplace", "noise_multiplier": 1.0},
        {"noise_multiplier": 1.0},
        {"kind": "gaussian"},
        {"kind": "gaussian", "noise_multiplier": 1.0, "sampling_rate": 0.1},
        {"kind": ["gaussian"], "noise_multiplier": 1.0},
        [],
        None,
    ],
    ids=str,
)
def test_unknown_events_raise(data):
    with pytest.raises((InputError, TypeError)):
        event_from_json(data)


@given(compositions, st.integers(0, 7))
def test_n_copies_are_the_n_fold_composition(composition, times):
    added = Composition()
    for _ in range(times):
        added = added + composition
    assert dict(added) == dict(composition.repeat(times))
    assert added.events == composition.repeat(times).events == times * composition.events


@given(compositions)
def test_dp_accounting_sees_every_copy(composition):
    composed = composition.to_dp_accounting()
    assert sum(part.count for part in composed.events) == composition.events


@given(rates, multipliers, st.floats(0.1, 1.0), st.floats(1.0, 3.0))
def test_a_lower_rate_or_more_noise_is_dominated(rate, z, less, more):
    planned = PoissonGaussian(sampling_rate=rate, noise_multiplier=z)
    assert planned.dominates(PoissonGaussian(sampling_rate=rate * less, noise_multiplier=z * more))
    assert not planned.dominates(PoissonGaussian(sampling_rate=rate, noise_multiplier=z * 0.999))
    assert not planned.dominates(PoissonGaussian(sampling_rate=rate * 1.001, noise_multiplier=z))
    assert not planned.dominates(Gaussian(noise_multiplier=100 * z))
    assert not Gaussian(noise_multiplier=z).dominates(planned)


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_counts_are_whole_numbers(count):
    with pytest.raises(InputError, match="count"):
        Composition(((Gaussian(noise_multiplier=1.0), count),))
