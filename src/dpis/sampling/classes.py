"""Records grouped into classes, shard by shard, where records change class at a cost of their own only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dpis.errors import InputError

Integers = npt.NDArray[np.int64]

SLICE = 1 << 20


def slices(count: int) -> Iterator[slice]:
    """All of ``count`` records, some at a time: what treats every record then takes little memory."""
    return (slice(start, start + SLICE) for start in range(0, count, SLICE))


class RecordClasses:
    """A permutation of the records in which every class of every shard is one contiguous run; 8 bytes a record.

    A record goes up by one class when it becomes the last of its class and the boundary moves past it;
    so no room is ever reserved, and moving ``m`` records takes ``O(m · classes)`` wherever they are. Nobody leaves
    their shard, all shards are treated at once, and what happens in one depends on no other.

    Records are counted from the first one of the process.

    Args:
        labels: the class of every record, in ``[0, classes)``.
        classes: how many classes a shard has, empty ones included.
        shard_bounds: shard ``s`` holds the records from ``shard_bounds[s]`` to before ``shard_bounds[s + 1]``.

    Attributes:
        order: the records by shard and class, int32. The order within a class has no meaning, but draws depend on it.
        classes: how many a shard has.
        bounds: class ``c`` of shard ``s`` is group ``g = s · classes + c``: ``order[bounds[g]:bounds[g + 1]]``.
    """

    def __init__(self, labels: npt.NDArray[np.uint8], classes: int, shard_bounds: Integers) -> None:
        self._shard_bounds = shard_bounds
        self.order = np.empty(len(labels), dtype=np.int32)
        self._positions = np.empty(len(labels), dtype=np.int32)
        self.sort(labels, classes)

    def sort(self, labels: npt.NDArray[np.uint8], classes: int) -> None:
        """Begin anew with these classes, in the tables there are; records ascend within a class."""
        self.classes = classes
        self.bounds = self._bounds(labels)
        ends = self.bounds[:-1].copy()
        for part in slices(len(labels)):
            first, groups = self._groups_of(labels, part)
            records = np.argsort(groups, kind="stable")
            sizes = np.bincount(groups)
            own = slice(first, first + len(sizes))
            places = np.arange(len(records)) + np.repeat(
                ends[own] - np.cumsum(sizes) + sizes, sizes
            )
            self._put(part.start + records, places)
            ends[own] += sizes

    @classmethod
    def restore(
        cls, order: npt.NDArray[np.int32], sizes: Integers, shard_bounds: Integers
    ) -> RecordClasses:
        """The classes that had this ``order`` and these ``sizes``, by shard and class."""
        count = len(order)
        if np.any(sizes < 0) or not np.array_equal(sizes.sum(axis=1), np.diff(shard_bounds)):
            raise InputError("the state of a sampler is damaged: its classes do not add up")
        for begin, end in pairwise(shard_bounds.tolist()):
            own = order[begin:end]
            if end > begin and not (own.min() >= begin and own.max() < end):
                raise InputError(
                    "the state of a sampler is damaged: it names records that do not exist"
                )
        named = np.zeros(count, dtype=bool)
        for part in slices(count):
            named[order[part]] = True
        if not named.all():
            raise InputError("the state of a sampler is damaged: a record occurs twice")
        restored = cls(np.zeros(count, dtype=np.uint8), sizes.shape[1], shard_bounds)
        for part in slices(count):
            records = order[part]
            restored._put(records, np.arange(part.start, part.start + len(records)))
        restored.bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return restored

    @property
    def sizes(self) -> Integers:
        """How many records each class has, by shard and class."""
        return (self.bounds[1:] - self.bounds[:-1]).reshape(-1, self.classes)

    @property
    def nbytes(self) -> int:
        """What the tables take."""
        return self.order.nbytes + self._positions.nbytes + self.bounds.nbytes

    def groups(self, records: Integers) -> Integers:
        """The shard and class of each record, as one number."""
        return self.bounds.searchsorted(self._positions[records], side="right") - 1

    def all_labels(self) -> npt.NDArray[np.uint8]:
        """The class of every record."""
        labels = np.empty(len(self.order), dtype=np.uint8)
        classes = np.tile(np.arange(self.classes, dtype=np.uint8), len(self._shard_bounds) - 1)
        by_place = np.repeat(classes, np.diff(self.bounds))
        for part in slices(len(labels)):
            labels[self.order[part]] = by_place[part]
        return labels

    def move(self, records: Integers, labels: Integers) -> None:
        """Put every record into the class given for it.

        Args:
            records: ascending, each once.
            labels: their classes from now on.
        """
        shards, old = np.divmod(self.groups(records), self.classes)
        moving = (old != labels).nonzero()[0]
        records, shards, old, labels = (one[moving] for one in (records, shards, old, labels))
        for boundary in range(1, self.classes):  # those that rise, carried along
            rising = ((old < boundary) & (boundary <= labels)).nonzero()[0]
            if len(rising):
                self._lift(records[rising], shards[rising], boundary)
        for boundary in range(self.classes - 1, 0, -1):  # those that fall
            falling = ((labels < boundary) & (boundary <= old)).nonzero()[0]
            if len(falling):
                self._lower(records[falling], shards[falling], boundary)

    def _lift(self, records: Integers, shards: Integers, boundary: int) -> None:
        """Into this class from the one below, whose last ones they become first."""
        counts, bounds = self._counts(shards), self.bounds[boundary :: self.classes]
        places = self._positions[records]
        bounds -= counts
        self._gather(records, places, places < bounds[shards], shards, bounds, counts)

    def _lower(self, records: Integers, shards: Integers, boundary: int) -> None:
        """Out of this class into the one below; they become its first ones first."""
        counts, bounds = self._counts(shards), self.bounds[boundary :: self.classes]
        places, starts = self._positions[records], bounds.copy()
        bounds += counts
        self._gather(records, places, places >= bounds[shards], shards, starts, counts)

    def _counts(self, shards: Integers) -> Integers:
        return np.bincount(shards, minlength=len(self._shard_bounds) - 1)

    def _gather(
        self,
        records: Integers,
        places: npt.NDArray[np.int32],
        outside: npt.NDArray[np.bool_],
        shards: Integers,
        starts: Integers,
        counts: Integers,
    ) -> None:
        """Bring records to the places from their shard's start on; who is there takes their places.

        Args:
            records: ascending, of one class in each shard.
            places: where they are.
            outside: whether that is none of the places to fill.
            shards: whose they are.
            starts: the first place to fill, by shard.
            counts: how many there are to fill, by shard.
        """
        shift = (starts - counts.cumsum() + counts)[shards]
        targets = np.arange(len(records)) + shift
        open_ = np.ones(len(records), dtype=bool)
        open_[(places - shift)[~outside]] = False
        free = targets[open_]
        self._put(self.order[free], places[outside])
        self._put(records[outside], free)

    def _put(self, records: npt.NDArray[np.integer], places: npt.NDArray[np.integer]) -> None:
        self.order[places] = records
        self._positions[records] = places

    def _bounds(self, labels: npt.NDArray[np.uint8]) -> Integers:
        """Where the groups begin, by these labels."""
        sizes = np.zeros((len(self._shard_bounds) - 1) * self.classes, dtype=np.int64)
        for part in slices(len(labels)):
            first, groups = self._groups_of(labels, part)
            found = np.bincount(groups)
            sizes[first : first + len(found)] += found
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def _groups_of(
        self, labels: npt.NDArray[np.uint8], part: slice
    ) -> tuple[int, npt.NDArray[np.integer]]:
        """The groups of some records, counted from the first of their shard, and which one that is."""
        stop = min(part.stop, len(labels))
        first, last = self._shard_bounds.searchsorted([part.start, stop - 1], side="right") - 1
        inner = np.clip(self._shard_bounds[first : last + 2], part.start, stop)
        narrow = np.uint16 if (last + 1 - first) * self.classes < 1 << 16 else np.int64
        begins = (np.arange(last + 1 - first) * self.classes).astype(narrow)
        return int(first) * self.classes, np.repeat(begins, np.diff(inner)) + labels[part]
