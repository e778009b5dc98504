"""Processes that compute one gradient together: what they ask each other.

Each runs the same passes over its own records. Where data would decide what is run next they agree first, so that the
collectives inside a sharded model stay in step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dpis.errors import DpisError

T = TypeVar("T")


class RankError(DpisError, RuntimeError):
    """Another rank raised: this one stops with it. Nothing was released."""


class Ranks:
    """One process alone: it agrees with itself.

    Attributes:
        rank: which one this is.
        size: how many there are.
    """

    rank, size = 0, 1

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank. All must ask; who asks waits for the others."""
        return here

    def gathered(self, value: T) -> list[T]:
        """What each rank has, in their order. Small: it is pickled."""
        return [value]

    def exchanged(self, slices: Tensor) -> Tensor:
        """``[size, m]``, one slice for every rank, to the slices for this one: ``[size, m]``, in their order."""
        return slices

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What raises here, between two passes, raises on every rank, when that next asks or enters a pass."""
        yield

    @contextmanager
    def in_a_pass(self) -> Iterator[None]:
        """Here the model's own collectives run. All ranks enter, or none.

        What raises inside cannot be told: the others wait in a collective of the model, not for an answer.
        """
        yield


class ProcessRanks(Ranks):
    """The processes of a `torch.distributed` group.

    Args:
        group: those that hold the slices of the model; None: all there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._words = group
        if dist.get_backend(group) != "gloo":  # small messages wait for no accelerator
            own = None if group is None else dist.get_process_group_ranks(group)
            self._words = dist.new_group(own, backend="gloo", use_local_synchronization=True)
        self._depth, self._passing = 0, False

    def any(self, here: bool) -> bool:
        """One small message, unless a rank failed."""
        failed, found = self._agree(well=True, here=here)
        if failed:
            self._raise_with_the_others(None)
        return found

    def gathered(self, value: T) -> list[T]:
        """From all that are well."""
        self.any(False)
        return self._all(value)

    def exchanged(self, slices: Tensor) -> Tensor:
        """Each slice goes over the wire once."""
        received = torch.empty_like(slices)
        dist.all_to_all_single(received, slices, group=self._group)
        return received

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
                self._agree(well=False, here=False)
                self._raise_with_the_others(error)
            raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._passing = False

    @contextmanager
    def in_a_pass(self) -> Iterator[None]:
        """Left by an exception, it is never left: `all_or_none` then tells nobody."""
        self.any(False)
        self._passing = True
        yield
        self._passing = False

    def _agree(self, well: bool, here: bool) -> tuple[bool, bool]:
        flags = torch.tensor([not well, here], dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._words)
        failed, found = flags.tolist()
        return bool(failed), bool(found)

    def _all(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._words)
        return found

    def _raise_with_the_others(self, own: Exception | None) -> None:
        causes = self._all(None if own is None else f"{type(own).__name__}: {own}")
        if own is None:
            rank, cause = next((r, cause) for r, cause in enumerate(causes) if cause is not None)
            raise RankError(
                f"All ranks must take every step, and rank {rank} of {self.size} stopped this one. {cause}"
            )
