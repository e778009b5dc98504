"""A group whose ranks are threads of this process: the same calls as over `torch.distributed`, in no time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from dpis.group import Group, RankError

SECONDS = 20.0
"""After which a rank that waits in vain gives up."""


class _Table:
    """Where ranks lay down what they tell."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.laid: list[Any] = [None] * size


class ThreadRank(Group):
    """One rank of several threads."""

    def __init__(self, table: _Table, rank: int, size: int) -> None:
        self._table, self.rank, self.size = table, rank, size

    def gathered(self, value: Any) -> list[Any]:
        self._table.laid[self.rank] = value
        self._table.barrier.wait(SECONDS)
        everything = list(self._table.laid)
        self._table.barrier.wait(SECONDS)
        return everything

    def from_first(self, make: Callable[[], Any]) -> Any:
        made = None
        with self.together():
            if self.leads:
                made = make()
        return self.gathered(made)[0]

    def hear(self, place: int = 0, terms: int = 0) -> None:
        said = self.gathered((None, (place, terms)))
        for rank, (error, _) in enumerate(said):
            if error is not None:
                raise RankError(f"rank {rank} stopped: {error}")
        if len({place for _, place in said}) > 1:
            raise RankError("the processes stand at different places")

    def stop(self, error: BaseException) -> None:
        if not isinstance(error, RankError | threading.BrokenBarrierError):
            self.gathered((error, 0))

    def arrive(self, what: str, seconds: float = 60.0) -> None:
        self.gathered(what)

    def exchanged(self, slices: Tensor) -> Tensor:
        sent = self.gathered(slices.clone())
        return torch.stack([one[self.rank] for one in sent])

    def collected(self, own: Tensor) -> Tensor:
        return torch.stack(self.gathered(own.clone()))

    def share(self, tensor: Tensor) -> None:
        tensor.copy_(self.gathered(tensor.clone())[0])


def on_threads(size: int, function: Callable[[Group], Any]) -> list[Any]:
    """What the function returns on every rank; the first error, if there is one."""
    table = _Table(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(function, ThreadRank(table, rank, size)) for rank in range(size)]
        errors = [future.exception() for future in futures]
    told = [error for error in errors if error is not None]
    told.sort(key=lambda error: isinstance(error, RankError | threading.BrokenBarrierError))
    if told:
        raise told[0]
    return [future.result() for future in futures]
