"""Who holds which records: virtual shards, a public number of them, dealt out to the processes of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dpis.errors import InputError
from dpis.options import MOST_SHARDS, USUAL_SHARDS

Integers = npt.NDArray[np.int64]

MOST_RECORDS = (1 << 31) - 1
"""Of one process: what its tables can name."""
MOST_RECORDS_IN_ALL = 1 << 46
"""Of all processes: times the number of shards, it fits 64 bits."""


@dataclass(frozen=True)
class Shards:
    """Some of a run's shards, one after another: those that a process owns.

    Shard ``s`` of ``V`` holds the records from ``N·s // V`` to before ``N·(s + 1) // V``, perhaps none. Coins belong to
    shards, so who is drawn does not depend on how many processes there are.

    Attributes:
        population: ``N``, the records of all processes. Private.
        count: ``V``, the shards of all processes, a power of two. Public.
        first: the first own shard.
        last: the own shards end before this one.

    Example:
        >>> Shards.of_rank(1000, 64, rank=1, ranks=2)
        Shards(population=1000, count=64, first=32, last=64)
        >>> Shards.of_rank(1000, 64, rank=1, ranks=2).records
        range(500, 1000)
    """

    population: int
    count: int
    first: int
    last: int

    def __post_init__(self) -> None:
        for name in ("population", "count", "first", "last"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputError(f"{name} must be a whole number, found {value!r}")
        if not 0 <= self.population <= MOST_RECORDS_IN_ALL:
            raise InputError(f"population must lie in [0, 2**46], found {self.population}")
        if not 1 <= self.count <= MOST_SHARDS or self.count & (self.count - 1):
            raise InputError(
                f"shards must be a power of two from 1 to {MOST_SHARDS}, found {self.count}"
            )
        if not 0 <= self.first <= self.last <= self.count:
            raise InputError(
                f"own shards must lie within the {self.count} there are, found {self.first} to {self.last}"
            )
        if len(self.records) > MOST_RECORDS:
            raise InputError(
                f"one process holds at most 2**31 - 1 records, found {len(self.records)}: train in more processes"
            )

    @classmethod
    def whole(cls, population: int, count: int = USUAL_SHARDS) -> Shards:
        """All of them: one process."""
        return cls(population, count, 0, count)

    @classmethod
    def of_rank(cls, population: int, count: int, rank: int, ranks: int) -> Shards:
        """The shards of one of several processes.

        Args:
            population: the records of all processes.
            count: the shards of all processes.
            rank: which process this is, from 0.
            ranks: how many there are.
        """
        if not 0 <= rank < ranks:
            raise InputError(f"rank must lie in [0, {ranks}), found {rank}")
        if ranks > count:
            raise InputError(
                f"every process needs a shard of its own: {count} shards for {ranks} processes. Set the option "
                f"`shards` to a power of two from {ranks} on. It decides who is drawn: a run that has begun keeps it"
            )
        return cls(population, count, count * rank // ranks, count * (rank + 1) // ranks)

    def __len__(self) -> int:
        """How many are owned."""
        return self.last - self.first

    @cached_property
    def records(self) -> range:
        """Own records."""
        return range(self._begin(self.first), self._begin(self.last))

    @cached_property
    def numbers(self) -> Integers:
        """Of own shards."""
        return np.arange(self.first, self.last, dtype=np.int64)

    @cached_property
    def boundaries(self) -> Integers:
        """Where each own shard begins, and where the last one ends: its records are counted over all processes."""
        return np.arange(self.first, self.last + 1, dtype=np.int64) * self.population // self.count

    @cached_property
    def sizes(self) -> Integers:
        """How many records each own shard has."""
        return np.diff(self.boundaries)

    def shard_of(self, records: Integers) -> Integers:
        """The shard of each record, whoever owns it."""
        return ((records + 1) * self.count - 1) // max(self.population, 1)

    def counts(self, records: Integers) -> Integers:
        """How many of these own records are in each own shard."""
        return np.bincount(self.shard_of(records) - self.first, minlength=len(self))

    def _begin(self, shard: int) -> int:
        return self.population * shard // self.count
