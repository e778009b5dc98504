"""What a sampler gives, and what a mechanism may ask of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dpis.errors import InputError
from dpis.randomness import Coins
from dpis.sampling.shards import Shards

LEAST_CLIP_NORM, MOST_CLIP_NORM = 1e-30, 1e30
"""What norms in float32 can be compared with."""


@dataclass(frozen=True, eq=False)
class Draw:
    """The candidates of one step. Private: who was drawn, and how many, must not be released.

    Attributes:
        indices: int64, ascending, each record at most once; counted over the records of all processes.
        importance: ``g_hat_i`` of those records when they were drawn, float64, in ``(0, C]``.
    """

    indices: Tensor
    importance: Tensor

    def __len__(self) -> int:
        return len(self.indices)


class Sampler(Protocol):
    """Draws records of the own shards by independent coins with ``q_i = rate · g_hat_i / clip_norm <= rate``.

    Records have the same numbers in every process. A sampler draws, and holds state for, those of its own shards alone.
    """

    @property
    def shards(self) -> Shards:
        """Its own."""
        ...

    @property
    def population(self) -> int:
        """How many records all processes have together; ``shards.records`` are its own. Private."""
        ...

    @property
    def clip_norm(self) -> float:
        """``C``, which no importance exceeds."""
        ...

    def draw(self, rate: float, coins: Coins) -> Draw:
        """The own candidates of one step: a function of state and coins alone, shard by shard.

        Args:
            rate: ``π`` in (0, 1].
            coins: of this step, and of no other step.
        """
        ...

    def observe(self, indices: Tensor, norms: Tensor) -> None:
        """Learn the raw gradient norms of some records, each named once.

        Args:
            indices: own records, in any order.
            norms: their norms before clipping. One that is not finite makes its record unseen.
        """
        ...

    def set_clip_norm(self, clip_norm: float, floor: float | None = None) -> None:
        """Change ``C`` and ``g_L``. Takes time for every record: once an epoch, not every step."""
        ...

    def sum_of_last_norms(
        self, bound: float, unseen: float | None = None
    ) -> npt.NDArray[np.float64]:
        """``Σ_i min(bound, last_norm_i)`` of each own shard, to which no record adds more than ``bound``. Private."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that later draws depend on, as tensors and numbers. Secret: it holds norms of records."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: the same coins give the same draws.

        Args:
            state: holds the own shards, and perhaps others: those of several processes can be put together.
        """
        ...


def checked_rate(rate: float) -> float:
    """An inclusion probability that accounting could have been asked for."""
    if not 0 < rate <= 1:
        raise InputError(
            f"rate must lie in (0, 1], found {rate!r}: nobody is drawn more than surely"
        )
    return float(rate)


def checked_clip_norm(clip_norm: float) -> float:
    """A clip norm in which importances can be measured."""
    if not LEAST_CLIP_NORM <= clip_norm <= MOST_CLIP_NORM:
        limits = f"from {LEAST_CLIP_NORM:g} to {MOST_CLIP_NORM:g}"
        raise InputError(f"clip_norm must be a number {limits}, found {clip_norm!r}")
    return float(clip_norm)
