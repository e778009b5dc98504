"""Poisson sampling at one rate for all: DP-SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpis.errors import InputError
from dpis.randomness import Coins
from dpis.sampling.coins import heads
from dpis.sampling.draw import Draw, checked_clip_norm, checked_rate
from dpis.sampling.shards import Shards


class UniformSampler:
    """Every record with probability ``rate``, as importance sampling with ``g_hat = C`` (headroom inf).

    Args:
        shards: the own ones: which records can be drawn.
        clip_norm: ``C``, the importance of everyone.

    Example:
        >>> from dpis.randomness import Key
        >>> sampler = UniformSampler(Shards.whole(1000), clip_norm=0.5)
        >>> draw = sampler.draw(1.0, Key.fresh().coins("draw", step=0))
        >>> len(draw), draw.importance[0].item()
        (1000, 0.5)
    """

    def __init__(self, shards: Shards, clip_norm: float) -> None:
        self._shards = shards
        self._clip_norm = checked_clip_norm(clip_norm)

    @property
    def shards(self) -> Shards:
        """Its own."""
        return self._shards

    @property
    def population(self) -> int:
        """How many records all processes have together. Private."""
        return self._shards.population

    @property
    def clip_norm(self) -> float:
        """``C``."""
        return self._clip_norm

    def draw(self, rate: float, coins: Coins) -> Draw:
        """The own candidates of one step, each with probability ``rate``."""
        own = self._shards
        chances = np.array([checked_rate(rate)])
        slots, _, _ = heads(own.sizes[:, None], chances, coins, own.numbers)
        records = np.sort(slots) + own.records.start
        importance = torch.full((len(records),), self._clip_norm, dtype=torch.float64)
        return Draw(torch.from_numpy(records), importance)

    def observe(self, indices: Tensor, norms: Tensor) -> None:
        """Norms do not matter here."""

    def set_clip_norm(self, clip_norm: float, floor: float | None = None) -> None:
        """Change ``C``. There is no floor here."""
        self._clip_norm = checked_clip_norm(clip_norm)

    def sum_of_last_norms(
        self, bound: float, unseen: float | None = None
    ) -> npt.NDArray[np.float64]:
        """Refused: no norms are kept here."""
        raise InputError(
            "uniform sampling keeps no norms, so there is no sum of them to release; "
            "use ImportanceSampler with headroom inf, which draws alike and keeps them"
        )

    def state_dict(self) -> dict[str, Any]:
        """The clip norm."""
        return {"clip_norm": self._clip_norm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.set_clip_norm(state["clip_norm"])
