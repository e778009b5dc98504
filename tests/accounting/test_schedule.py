import math

import pytest

from dpis.accounting import exponential_decay, kappa_schedule
from dpis.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0.4, (0.4, 0.4, 0.4)),
        ("0.4", (0.4, 0.4, 0.4)),
        ("1:0.5", (1.0, 0.75, 0.5)),
        ("0.9,0.8,0.7", (0.9, 0.8, 0.7)),
        ([0.9, 0.8, 0.7], (0.9, 0.8, 0.7)),
        (1, (1.0, 1.0, 1.0)),
    ],
    ids=str,
)
def test_kappa_by_number_line_or_list(text, expected):
    assert kappa_schedule(text, 3) == pytest.approx(expected)


def test_a_line_over_one_epoch_is_its_first_value():
    assert kappa_schedule("0.9:0.1", 1) == (0.9,)


@pytest.mark.parametrize(
    "bad", ["", "x", "1:2:3", "0.5,", "1:0", "-1", "0.5,0.5", [0.5], math.inf], ids=str
)
def test_other_kappas_are_refused(bad):
    with pytest.raises(InputError, match="kappa"):
        kappa_schedule(bad, 3)


def test_decay_is_per_epoch():
    assert exponential_decay(0.01, 3) == pytest.approx((1.0, math.exp(-0.01), math.exp(-0.02)))


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf, 30.0])
def test_other_decay_rates_are_refused(rate):
    with pytest.raises(InputError, match="decay rate"):
        exponential_decay(rate, 3)
