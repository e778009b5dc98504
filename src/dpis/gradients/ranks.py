"""Processes that compute one gradient together: what they ask each other.

Each runs the same passes over its own records. Where data would decide what is run next they agree first, so that the
collectives inside a sharded model stay in step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpis.errors import DpisError

AGREED, FAILED = 0, 1


class RankError(DpisError, RuntimeError):
    """Another rank raised: this one stops with it. Nothing was released."""


class Ranks:
    """One process alone: it agrees with itself.

    Attributes:
        rank: which one this is.
        size: how many there are.
    """

    rank, size = 0, 1

    def largest_of(self, value: int) -> int:
        """The largest of all ranks' numbers. All must ask; who asks waits for the others."""
        return value

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.largest_of(int(here)))

    def of_all(self, value: Any) -> list[Any]:
        """What each rank has, in their order."""
        return [value]

    def slices_of_all(self, values: Tensor, sizes: list[int]) -> Tensor:
        """Of each rank's ``values``, cut into one slice a rank: those that are this one's, ``[ranks, own size]``."""
        return values.view(1, sizes[0])

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What raises here, between two passes, raises on every rank, when that next asks anything."""
        yield

    @contextmanager
    def inside_a_pass(self) -> Iterator[None]:
        """What raises here cannot be told: the others wait in a collective of the model, not for an answer."""
        yield


class ProcessRanks(Ranks):
    """The processes of a `torch.distributed` group.

    Args:
        group: those that hold the slices of the model; None: all there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device = torch.device("cpu") if dist.get_backend(group) == "gloo" else None
        self._depth, self._passing = 0, False

    def largest_of(self, value: int) -> int:
        """The largest of all ranks' numbers, unless one of them failed."""
        failed, largest = self._agree(AGREED, value)
        if failed:
            self._raise_with_the_others(None)
        return largest

    def of_all(self, value: Any) -> list[Any]:
        """What each rank has, in their order."""
        self.largest_of(0)
        return self._gathered(value)

    def slices_of_all(self, values: Tensor, sizes: list[int]) -> Tensor:
        """One exchange: each rank sends what it has of all others' slices."""
        own = sizes[self.rank]
        received = values.new_empty(self.size * own)
        dist.all_to_all_single(
            received, values.contiguous().view(-1), [own] * self.size, sizes, group=self._group
        )
        return received.view(self.size, own)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What raises here, between two passes, is told to all."""
        self._depth += 1
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            if self._depth == 1 and not self._passing:
                self._agree(FAILED, 0)
                self._raise_with_the_others(error)
            raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._passing = False

    @contextmanager
    def inside_a_pass(self) -> Iterator[None]:
        """Left by an exception, it stays: `all_or_none` then tells nobody."""
        self._passing = True
        yield
        self._passing = False

    def _agree(self, state: int, value: int) -> tuple[int, int]:
        numbers = torch.tensor([state, value], dtype=torch.int64, device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        failed, largest = numbers.tolist()
        return failed, largest

    def _gathered(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def _raise_with_the_others(self, own: Exception | None) -> None:
        causes = self._gathered(None if own is None else f"{type(own).__name__}: {own}")
        if own is None:
            rank, cause = next((r, cause) for r, cause in enumerate(causes) if cause is not None)
            raise RankError(
                f"All ranks must take every step, and rank {rank} of {self.size} stopped this one. {cause}"
            )
