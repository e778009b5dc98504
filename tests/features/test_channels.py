"""Channel statistics: bounded by a public length, and a scale that no noise can break."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpis.errors import InputError
from dpis.features import scatter_features
from dpis.features.channels import (
    LONGEST_MEAN,
    LONGEST_SQUARE,
    SMALL_VARIANCE,
    ChannelScale,
    channel_releases,
    channel_sums,
)

LONGEST = (LONGEST_MEAN, LONGEST_SQUARE)


@given(factor=st.sampled_from([1e-6, 1.0, 1e6, 1e30]), seed=st.integers(0, 100))
def test_one_record_moves_a_sum_by_no_more_than_the_public_length(factor, seed):
    generator = torch.Generator().manual_seed(seed)
    others = torch.rand(5, 81, 3, 3, generator=generator)
    record = factor * torch.randn(1, 81, 3, 3, generator=generator)
    for with_it, without, longest in zip(
        channel_sums(torch.cat([others, record])), channel_sums(others), LONGEST, strict=True
    ):
        assert float((with_it - without).norm()) <= longest * (1 + 1e-9)


def test_a_record_that_is_no_number_adds_nothing():
    features = torch.rand(3, 81, 2, 2)
    broken = features.clone()
    broken[1, 0, 0, 0] = math.nan
    for sums, rest in zip(channel_sums(broken), channel_sums(features[[0, 2]]), strict=True):
        assert torch.allclose(sums, rest)


def made_up_images(count):
    """Blobs, edges and grain: something of every size."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 1, 4, 4, generator=generator)
    grain = torch.rand(count, 1, 28, 28, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=28, mode="bilinear")
    return (0.9 * (smooth > 0.6) + 0.1 * grain) * torch.rand(count, 1, 1, 1, generator=generator)


def test_without_noise_channels_come_to_mean_0_and_variance_1_but_for_faint_ones():
    features = scatter_features(made_up_images(300), cache=False)
    scaled = ChannelScale.from_sums(*channel_sums(features), 300, 0.0)(features)
    variances = features.var((0, 2, 3))
    assert torch.allclose(scaled.mean((0, 2, 3)), torch.zeros(81), atol=1e-2)
    wanted = variances / (variances + SMALL_VARIANCE)
    assert torch.allclose(scaled.var((0, 2, 3)), wanted, atol=5e-2)


def test_the_noise_of_60000_records_hardly_moves_the_scale():
    features = scatter_features(made_up_images(300), cache=False)
    n = 60_000
    sums = [total * n / 300 for total in channel_sums(features)]
    generator = torch.Generator().manual_seed(1)
    paid, _ = channel_releases(epsilon=1.0)
    noisy = [
        total + paid.noise_multiplier * longest * torch.randn(81, generator=generator).double()
        for total, longest in zip(sums, LONGEST, strict=True)
    ]
    exact, released = (
        torch.tensor(ChannelScale.from_sums(*some, n, noise).deviation)
        for some, noise in ((sums, 0.0), (noisy, paid.noise_multiplier))
    )
    assert 0.75 < float((released / exact).min()) <= float((released / exact).max()) < 1.33


def test_a_channel_lost_in_the_noise_does_not_drown_the_others():
    """Of few records the variance of some channels comes out negative."""
    features = scatter_features(made_up_images(300), cache=False)
    n, (paid, _) = 2_000, channel_releases(epsilon=0.5)
    generator = torch.Generator().manual_seed(1)
    noisy = [
        total * n / 300 + paid.noise_multiplier * longest * torch.randn(81, generator=generator)
        for total, longest in zip(channel_sums(features), LONGEST, strict=True)
    ]
    scaled = ChannelScale.from_sums(*noisy, n, paid.noise_multiplier)(features)
    assert float(scaled.abs().max()) < 100


@pytest.mark.parametrize("noise", [math.nan, math.inf, -1e9, 1e9])
def test_whatever_the_noise_gave_the_scale_is_finite(noise):
    sums = torch.full((81,), noise, dtype=torch.float64)
    scale = ChannelScale.from_sums(sums, sums, 100, 1.0)
    assert all(math.isfinite(value) for value in (*scale.mean, *scale.deviation))
    assert min(scale.deviation) >= 0.999 * math.sqrt(SMALL_VARIANCE)


def test_other_channels_are_refused_and_json_is_an_inverse():
    scale = ChannelScale((0.0, 0.5), (1.0, 2.0))
    assert ChannelScale.from_json(scale.to_json()) == scale
    with pytest.raises(InputError, match="2 channels"):
        scale(torch.zeros(1, 3, 2, 2))
    with pytest.raises(InputError, match="multiple of 81"):
        channel_sums(torch.zeros(2, 80, 2, 2))
