"""Poisson sampling at one rate for all: DP-SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpis.errors import InputError
from dpis.randomness import Stream
from dpis.sampling import coins
from dpis.sampling.draw import Draw, checked_clip_norm, checked_population, checked_rate


class UniformSampler:
    """Every record with probability ``rate``, as importance sampling with ``g_hat = C`` (headroom inf).

    Args:
        population: how many records there are.
        clip_norm: ``C``, the importance of everyone.

    Example:
        >>> from dpis.randomness import Key
        >>> draw = UniformSampler(1000, clip_norm=0.5).draw(1.0, Key.fresh().stream("coins", step=0))
        >>> len(draw), draw.importance[0].item()
        (1000, 0.5)
    """

    def __init__(self, population: int, clip_norm: float) -> None:
        self._population = checked_population(population)
        self._clip_norm = checked_clip_norm(clip_norm)

    @property
    def population(self) -> int:
        """How many records there are. Private."""
        return self._population

    @property
    def clip_norm(self) -> float:
        """``C``."""
        return self._clip_norm

    def draw(self, rate: float, stream: Stream) -> Draw:
        """The candidates of one step, each with probability ``rate``."""
        sizes = np.array([self._population], dtype=np.int64)
        records, _ = coins.heads(sizes, np.array([checked_rate(rate)]), stream)
        importance = torch.full((len(records),), self._clip_norm, dtype=torch.float64)
        return Draw(torch.from_numpy(records), importance)

    def observe(self, indices: Tensor, norms: Tensor) -> None:
        """Norms do not matter here."""

    def set_clip_norm(self, clip_norm: float, floor: float | None = None) -> None:
        """Change ``C``. There is no floor here."""
        self._clip_norm = checked_clip_norm(clip_norm)

    def sum_of_last_norms(self, bound: float, unseen: float | None = None) -> float:
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
