"""Channel statistics: bounded by a public length, and a scale that no noise can break."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpis.errors import InputError
from dpis.features.channels import LEAST_DEVIATION, LONGEST, ChannelScale, channel_sums


@given(factor=st.sampled_from([1e-6, 1.0, 1e6, 1e30]), seed=st.integers(0, 100))
def test_one_record_moves_a_sum_by_no_more_than_the_public_length(factor, seed):
    generator = torch.Generator().manual_seed(seed)
    others = torch.rand(5, 4, 3, 3, generator=generator)
    record = factor * torch.randn(1, 4, 3, 3, generator=generator)
    for with_it, without in zip(
        channel_sums(torch.cat([others, record])), channel_sums(others), strict=True
    ):
        assert float((with_it - without).norm()) <= LONGEST * (1 + 1e-9)


def test_a_record_that_is_no_number_adds_nothing():
    features = torch.rand(3, 4, 2, 2)
    broken = features.clone()
    broken[1, 0, 0, 0] = math.nan
    for sums, rest in zip(channel_sums(broken), channel_sums(features[[0, 2]]), strict=True):
        assert torch.allclose(sums, rest)


def test_without_noise_channels_come_to_mean_0_and_variance_1():
    features = 0.1 * torch.rand(500, 4, 3, 3) * torch.tensor([1.0, 2.0, 3.0, 0.5])[:, None, None]
    scaled = ChannelScale.from_sums(*channel_sums(features), 500)(features)
    assert torch.allclose(scaled.mean((0, 2, 3)), torch.zeros(4), atol=1e-4)
    assert torch.allclose(scaled.var((0, 2, 3)), torch.ones(4), atol=1e-2)


@pytest.mark.parametrize("noise", [math.nan, math.inf, -1e9, 1e9])
def test_whatever_the_noise_gave_the_scale_is_finite(noise):
    sums = torch.full((3,), noise, dtype=torch.float64)
    scale = ChannelScale.from_sums(sums, sums, 100)
    assert all(math.isfinite(value) for value in (*scale.mean, *scale.deviation))
    assert min(scale.deviation) >= LEAST_DEVIATION * 0.999


def test_other_channels_are_refused_and_json_is_an_inverse():
    scale = ChannelScale((0.0, 0.5), (1.0, 2.0))
    assert ChannelScale.from_json(scale.to_json()) == scale
    with pytest.raises(InputError, match="2 channels"):
        scale(torch.zeros(1, 3, 2, 2))
