"""Noise: the right scale is accepted and its neighbours are rejected; nothing is used twice."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from dpis.errors import InputError
from dpis.noise import add_noise, on_grid
from dpis.randomness import Key

FALSE_ALARM = 1e-6  # of every statistical assertion; seeds are fixed
KEY = Key.from_seed(4)
SUMS = {
    "weight": torch.linspace(-3, 3, 12_000).reshape(100, 120),
    "bias": torch.full((5_000,), 1e4, dtype=torch.float64),
    "half": torch.ones(10, 30, 10, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.0),
    "nothing": torch.zeros(0, 4),
}


def noise_of(noisy: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value - SUMS[name].double() for name, value in noisy.items()}


def accept_scale(noise: dict[str, Tensor], std: float) -> None:
    """Every parameter's noise, and all of it, has this standard deviation and mean zero."""
    for part in (*noise.values(), torch.cat([value.flatten() for value in noise.values()])):
        if part.numel() < 2:
            continue
        squares = stats.chi2(part.numel()).cdf(float((part / std).square().sum()))
        assert FALSE_ALARM / 2 < squares < 1 - FALSE_ALARM / 2
        score = float(part.sum()) / (std * math.sqrt(part.numel()))
        assert abs(score) < stats.norm.isf(FALSE_ALARM / 2)


@pytest.mark.parametrize("std", [1e-3, 1.0, 250.0])
def test_the_scale_is_accepted_and_its_neighbours_are_rejected(std: float) -> None:
    noise = noise_of(add_noise(SUMS, std, KEY.stream("noise", 0)))
    accept_scale(noise, std)
    for factor in (2 / 3, 3 / 2):
        broken = noise_of(add_noise(SUMS, factor * std, KEY.stream("noise", 0)))
        with pytest.raises(AssertionError):
            accept_scale(broken, std)


def test_noise_on_one_parameter_only_is_rejected() -> None:
    noise = noise_of(add_noise(SUMS, 1.0, KEY.stream("noise", 0)))
    with pytest.raises(AssertionError):
        accept_scale(noise | {"bias": torch.zeros_like(noise["bias"])}, 1.0)


def test_no_number_is_used_twice() -> None:
    noisy = add_noise({name: torch.zeros(1000) for name in "abc"}, 1.0, KEY.stream("noise", 1))
    again = add_noise({name: torch.zeros(1000) for name in "abc"}, 1.0, KEY.stream("noise", 2))
    drawn = torch.cat([*noisy.values(), *again.values()])
    assert len(drawn.unique()) > 5980  # on a grid some meet by chance


def test_the_order_of_the_mapping_does_not_matter() -> None:
    forwards = add_noise(SUMS, 1.0, KEY.stream("noise", 3))
    backwards = add_noise(dict(reversed(SUMS.items())), 1.0, KEY.stream("noise", 3))
    assert list(forwards) == list(backwards) == sorted(SUMS)
    assert all(torch.equal(forwards[name], backwards[name]) for name in SUMS)


def test_shapes_stay_and_everything_is_float64() -> None:
    before = {name: value.clone() for name, value in SUMS.items()}
    for name, value in add_noise(SUMS, 1.0, KEY.stream("noise", 0)).items():
        assert value.shape == SUMS[name].shape
        assert value.dtype == torch.float64
        assert not value.requires_grad
    assert all(torch.equal(SUMS[name], before[name]) for name in SUMS), "the sums were changed"


def test_sums_may_require_a_gradient() -> None:
    noisy = add_noise({"p": torch.zeros(3, requires_grad=True)}, 1.0, KEY.stream("noise", 0))
    assert not noisy["p"].requires_grad


def test_noise_is_added_before_it_is_rounded() -> None:
    sums = {"large": torch.full((1000,), 2.0**24)}  # where float32 knows whole numbers only
    noisy = add_noise(sums, 0.1, KEY.stream("noise", 0))["large"]
    assert len(noisy.unique()) == 1000
    assert (noisy != noisy.float().double()).all()


def test_no_noise_and_no_parameters() -> None:
    without = add_noise(SUMS, 0.0, KEY.stream("noise", 0))
    assert all(torch.equal(without[name], SUMS[name].double()) for name in SUMS)
    assert add_noise({}, 1.0, KEY.stream("noise", 0)) == {}


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf])
def test_a_wrong_scale_is_refused(std: float) -> None:
    with pytest.raises(InputError, match="noise_std"):
        add_noise(SUMS, std, KEY.stream("noise", 0))


@pytest.mark.parametrize("noise_std", [1e-9, 0.3, 15.0, 1e12])
def test_released_numbers_lie_on_a_public_grid(noise_std: float) -> None:
    noisy = add_noise({"x": torch.zeros(1000)}, noise_std, Key.from_seed(3).stream("grid", 0))["x"]
    grid = 2.0 ** (math.floor(math.log2(noise_std)) - 20)
    released = on_grid(noisy, noise_std)
    assert torch.equal(released, torch.round(released / grid) * grid)
    assert (released - noisy).abs().max() <= grid / 2
    assert torch.equal(on_grid(noisy, 0.0), noisy)
