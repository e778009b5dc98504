"""Channels of scatter features brought to mean 0 and variance 1: within each record, or over all records.

Within a record, group by group, this costs no privacy. Over all records it takes two noisy, accounted releases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dpis.accounting import Release
from dpis.errors import InputError
from dpis.features.scattering import SCATTER_CHANNELS
from dpis.stored_rows import Column, blocks_of


def group_normalise(features: Tensor, groups: int) -> Tensor:
    """Each record's ``groups`` equal groups of channels, centred to mean 0 and scaled to variance 1.

    A record's result depends on that record alone, so this costs no privacy. 27 groups suit the 81
    channels of scattered grey images.

    Args:
        features: ``[records, channels, ...]``.
        groups: Divides the number of channels.

    Reference: Wu and He, Group Normalization, ECCV 2018.
    """
    if features.ndim < 2 or groups < 1 or features.shape[1] % groups:
        raise InputError(
            f"groups must divide the channels of features [records, channels, ...]; found {groups} groups"
            f" and shape {list(features.shape)}"
        )
    return functional.group_norm(features, groups)


# ── over all records ─────────────────────────────────────────────────────────────────────────────────
#
# How a channel is distributed over the records is private. Each record adds two vectors, the mean of every channel and
# the mean of its square, each shortened to a public length; their sums are released with noise before training. Noise
# falls on all channels alike and their sizes differ by orders of magnitude, so each is first multiplied by a public
# gain. Faint channels stay a little smaller than variance 1: see `SMALL_VARIANCE`.

MEAN, SQUARE = "channel-mean", "channel-square"
"""The labels of the two releases."""

NOISE_TIMES_EPSILON = 24.0
"""Their noise multiplier is 8 at epsilon 3, as others chose it, and a like share of every other budget: at epsilon 1, 8
would cost more than a third of it, and three times that noise still hardly moves the scale of 60,000 records."""

GAINS = (1.0, 8.0, 64.0)
"""Of channels of scattering order 0, 1, 2: each order is about eight times smaller, for pixels from 0 to 1."""

LONGEST_MEAN, LONGEST_SQUARE = 3.0, 3.0
"""Public lengths of a record's vectors after the gains; few images are longer. Never read from the data."""

SMALL_VARIANCE = 1e-5
"""Added to every variance, as batch normalisation has it. Channels of order 2 vary by .001 to .003, so they stay at a
third to two thirds of the size of others: there are 64 of them to 17, they tell less, and the gradients of all share
one clip norm."""

FIRST_ORDER = 16
"""Channels of order 1: two scales, eight angles."""


def channel_releases(epsilon: float) -> tuple[Release, Release]:
    """What has to be paid for, before training, out of a budget of epsilon."""
    noise_multiplier = NOISE_TIMES_EPSILON / epsilon
    return Release(MEAN, noise_multiplier), Release(SQUARE, noise_multiplier)


@dataclass(frozen=True)
class ChannelScale:
    """What is taken from every channel, and what it is divided by. Released values: public.

    Attributes:
        mean: one a channel.
        deviation: one a channel, a little more than the standard deviation: `SMALL_VARIANCE` is added before the root.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, features: Tensor) -> Tensor:
        """The features, ``[records, channels, ...]``, scaled."""
        if features.ndim < 2 or features.shape[1] != len(self.mean):
            raise InputError(
                f"features with {len(self.mean)} channels are required, found the shape {list(features.shape)}"
            )
        shape = (1, -1) + (1,) * (features.ndim - 2)
        mean, deviation = (
            torch.tensor(values, dtype=features.dtype, device=features.device).reshape(shape)
            for values in (self.mean, self.deviation)
        )
        return (features - mean) / deviation

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"mean": list(self.mean), "deviation": list(self.deviation)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ChannelScale:
        """The inverse of `to_json`."""
        return cls(tuple(map(float, data["mean"])), tuple(map(float, data["deviation"])))

    @classmethod
    def from_sums(
        cls, means: Tensor, squares: Tensor, n_public: float, noise_multiplier: float
    ) -> ChannelScale:
        """From released sums over the records, after the gains; whatever the noise gave, the scale is finite.

        A variance that is lost in the noise is taken to be as large as the noise: divided by less, its channel would
        drown the others.
        """
        gains = channel_gains(len(means))
        mean = torch.nan_to_num(means / n_public) / gains
        variance = torch.nan_to_num(squares / n_public) / gains**2 - mean**2
        noise = noise_multiplier * LONGEST_SQUARE / n_public / gains**2
        deviation = (torch.nan_to_num(variance).maximum(noise) + SMALL_VARIANCE).sqrt()
        return cls(tuple(mean.tolist()), tuple(deviation.tolist()))


def channel_gains(channels: int) -> Tensor:
    """The public gain of every channel of scatter features."""
    orders = [0] + [1] * FIRST_ORDER + [2] * (SCATTER_CHANNELS - 1 - FIRST_ORDER)
    if channels % SCATTER_CHANNELS:
        raise InputError(f"scatter features have a multiple of 81 channels, found {channels}")
    gains = [GAINS[order] for order in orders] * (channels // SCATTER_CHANNELS)
    return torch.tensor(gains, dtype=torch.float64)


def channel_sums(features: Column) -> tuple[Tensor, Tensor]:
    """Sums over the records of channel means and of channel means of squares, after the gains, float64. Private.

    One record moves them by at most `LONGEST_MEAN` and `LONGEST_SQUARE` in Euclidean norm, whatever it holds.

    Args:
        features: ``[records, channels, ...]``.
    """
    gains = channel_gains(features.shape[1])[:, None]
    sums = torch.zeros(2, features.shape[1], dtype=torch.float64)
    for part in blocks_of(features, 1024):
        flat = part.double().flatten(2).cpu() * gains
        sums[0] += _shortened(flat.mean(2), LONGEST_MEAN).sum(0)
        sums[1] += _shortened(flat.square().mean(2), LONGEST_SQUARE).sum(0)
    return sums[0], sums[1]


def _shortened(vectors: Tensor, longest: float) -> Tensor:
    lengths = vectors.norm(dim=1, keepdim=True)
    shortened = vectors * (longest / lengths.clamp(min=longest))
    finite = torch.isfinite(shortened).all(1, keepdim=True)
    return torch.where(finite, shortened, 0.0)
