import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpis.accounting.calibration import SMALLEST_PARAMETER, smallest_parameter
from dpis.errors import InputError


@given(st.floats(0.5, 4.0), st.floats(0.01, 100.0), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_inverts_a_power_from_the_private_side(power, scale, target, guess):
    def epsilon(x):
        return scale * x**-power

    found = smallest_parameter(epsilon, target, guess=guess, tolerance=1e-4)
    tightest = max(SMALLEST_PARAMETER, (scale / target) ** (1 / power))
    assert epsilon(found) <= target
    assert tightest * (1 - 1e-12) <= found <= tightest * (1 + 2e-4)


@given(st.floats(0.02, 10.0), st.floats(1e-2, 1e2))
def test_survives_infinities_and_zeros(threshold, guess):
    """A step from infinity to zero has no slope to follow."""
    found = smallest_parameter(
        lambda x: math.inf if x < threshold else 0.0, 1.0, guess=guess, tolerance=1e-3
    )
    assert threshold <= found <= threshold * 1.002


@given(st.floats(0.5, 20.0), st.floats(1.0, 400.0), st.floats(-2.0, 4.0), st.floats(1e-2, 1e2))
def test_survives_a_knee(knee, steepness, log_target, guess):
    """Epsilon falls by orders of magnitude within a few per cent of the noise: slopes on either side mislead."""
    seen = []

    def epsilon(x):
        seen.append(x)
        return 10 ** (3 * math.tanh(steepness * math.log(knee / x))) / x

    target = 10**log_target
    found = smallest_parameter(epsilon, target, guess=guess)
    assert len(seen) < 60
    assert epsilon(found) <= target
    assert found <= SMALLEST_PARAMETER * (1 + 1e-12) or epsilon(found * (1 - 2e-3)) > target


def test_a_floor_just_below_the_target_is_still_found():
    found = smallest_parameter(lambda x: 0.999 + 1 / x, 1.0, guess=1.0, tolerance=1e-3)
    assert 0.999 + 1 / found <= 1.0
    assert found <= 1000 * 1.01


def test_a_target_below_the_floor_is_refused():
    with pytest.raises(InputError, match="no noise meets"):
        smallest_parameter(lambda x: 0.5 + 1 / x, 0.4, guess=1.0)


def test_the_result_was_itself_evaluated():
    seen = []

    def epsilon(x):
        seen.append(x)
        return 1 / x

    assert smallest_parameter(epsilon, 0.3, guess=1.0, slope=-1.0) in seen
