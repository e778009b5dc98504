"""Channels of features brought to mean 0 and variance 1 over the data: two noisy, accounted releases.

How a channel is distributed over the records is private. Each record adds two vectors, the mean of every channel and
the mean of its square, each shortened to a public length; their sums are released with noise before training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpis.accounting import Release
from dpis.errors import InputError

MEAN, SQUARE = "channel-mean", "channel-square"
"""The labels of the two releases."""

NOISE_MULTIPLIER = 8.0
LONGEST = 1.0
"""The public length of a record's vector, for grey images with pixels from 0 to 1. Never read from the data."""

LEAST_DEVIATION = 1e-3


def channel_releases() -> tuple[Release, Release]:
    """What has to be paid for, before training."""
    return Release(MEAN, NOISE_MULTIPLIER), Release(SQUARE, NOISE_MULTIPLIER)


@dataclass(frozen=True)
class ChannelScale:
    """What is taken from every channel, and what it is divided by. Released values: public.

    Attributes:
        mean: one a channel.
        deviation: one a channel, at least `LEAST_DEVIATION`.
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
    def from_sums(cls, means: Tensor, squares: Tensor, n_public: float) -> ChannelScale:
        """From released sums over the records; whatever the noise gave, the scale is finite."""
        mean = torch.nan_to_num(means / n_public)
        variance = torch.nan_to_num(squares / n_public) - mean**2
        deviation = variance.clamp(min=LEAST_DEVIATION**2).sqrt()
        return cls(tuple(mean.tolist()), tuple(deviation.tolist()))


def channel_sums(features: Tensor, longest: float = LONGEST) -> tuple[Tensor, Tensor]:
    """Sums over the records of channel means and of channel means of squares, float64. Private.

    One record moves either of them by at most ``longest`` in Euclidean norm, whatever it holds.

    Args:
        features: ``[records, channels, ...]``.
        longest: a public length.
    """
    sums = torch.zeros(2, features.shape[1], dtype=torch.float64)
    for part in torch.split(features, 1024):
        flat = part.double().flatten(2) if part.ndim > 2 else part.double()[..., None]
        for place, values in enumerate((flat.mean(2), flat.square().mean(2))):
            lengths = values.norm(dim=1, keepdim=True)
            shortened = values * (longest / lengths.clamp(min=longest))
            finite = torch.isfinite(shortened).all(1, keepdim=True)
            sums[place] += torch.where(finite, shortened, 0.0).sum(0).cpu()
    return sums[0], sums[1]
