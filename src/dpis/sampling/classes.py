"""Records grouped into classes, where records change class at a cost of their own only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dpis.errors import InputError

Integers = npt.NDArray[np.int64]

SLICE = 1 << 20


def slices(count: int) -> Iterator[slice]:
    """All of ``count`` records, some at a time: what treats every record then takes little memory."""
    return (slice(start, start + SLICE) for start in range(0, count, SLICE))


class RecordClasses:
    """A permutation of the records in which every class is one contiguous run; 8 bytes a record.

    A record goes up by one class when it becomes the last of its class and the boundary moves past it;
    so no room is ever reserved, and moving ``m`` records takes ``O(m · classes)`` wherever they are.

    Args:
        labels: the class of every record, in ``[0, classes)``.
        classes: how many classes there are, empty ones included.

    Attributes:
        order: the records by class, int32. The order within a class has no meaning, but draws depend on it.
        bounds: class ``c`` is ``order[bounds[c]:bounds[c + 1]]``.
    """

    def __init__(self, labels: npt.NDArray[np.uint8], classes: int) -> None:
        self.order = np.empty(len(labels), dtype=np.int32)
        self._positions = np.empty(len(labels), dtype=np.int32)
        self.bounds: Integers = np.zeros(classes + 1, dtype=np.int64)
        self.sort(labels, classes)

    def sort(self, labels: npt.NDArray[np.uint8], classes: int) -> None:
        """Begin anew with these classes, in the tables there are; records ascend within a class."""
        parts = list(slices(len(labels)))
        sizes_of = [np.bincount(labels[part], minlength=classes) for part in parts]
        self.bounds = _bounds(sum(sizes_of, start=np.zeros(classes, dtype=np.int64)))
        ends = self.bounds[:-1].copy()
        for part, sizes in zip(parts, sizes_of, strict=True):
            records = np.argsort(labels[part], kind="stable")
            places = np.arange(len(records)) + np.repeat(ends - _bounds(sizes)[:-1], sizes)
            self._put(part.start + records, places)
            ends += sizes

    @classmethod
    def restore(cls, order: npt.NDArray[np.int32], sizes: Integers) -> RecordClasses:
        """The classes that had this ``order`` and these ``sizes``."""
        count = len(order)
        if np.any(sizes < 0) or sizes.sum() != count:
            raise InputError("the state of a sampler is damaged: its classes do not add up")
        if count and not (order.min() >= 0 and order.max() < count):
            raise InputError(
                "the state of a sampler is damaged: it names records that do not exist"
            )
        named = np.zeros(count, dtype=bool)
        named[order] = True
        if not named.all():
            raise InputError("the state of a sampler is damaged: a record occurs twice")
        restored = cls(np.zeros(count, dtype=np.uint8), len(sizes))
        restored._put(order, np.arange(count))
        restored.bounds = _bounds(sizes)
        return restored

    @property
    def sizes(self) -> Integers:
        """How many records each class has."""
        return np.diff(self.bounds)

    @property
    def nbytes(self) -> int:
        """What the tables take."""
        return self.order.nbytes + self._positions.nbytes + self.bounds.nbytes

    def labels(self, records: Integers) -> Integers:
        """The class of each record."""
        return self.bounds.searchsorted(self._positions[records], side="right") - 1

    def all_labels(self) -> npt.NDArray[np.uint8]:
        """The class of every record."""
        labels = np.empty(len(self.order), dtype=np.uint8)
        labels[self.order] = np.repeat(np.arange(len(self.sizes), dtype=np.uint8), self.sizes)
        return labels

    def move(self, records: Integers, labels: Integers) -> None:
        """Put every record into the class given for it. No record may be named twice."""
        old = self.labels(records)
        moving = old != labels
        records, old, labels = records[moving], old[moving], labels[moving]
        for boundary in range(1, len(self.bounds) - 1):  # those that rise, carried along
            self._lift(records[(old < boundary) & (boundary <= labels)], boundary)
        for boundary in range(len(self.bounds) - 2, 0, -1):  # those that fall
            self._lower(records[(labels < boundary) & (boundary <= old)], boundary)

    def _lift(self, records: Integers, boundary: int) -> None:
        end = int(self.bounds[boundary])
        self._gather(records, end - len(records))
        self.bounds[boundary] = end - len(records)

    def _lower(self, records: Integers, boundary: int) -> None:
        start = int(self.bounds[boundary])
        self._gather(records, start)
        self.bounds[boundary] = start + len(records)

    def _gather(self, records: Integers, start: int) -> None:
        """Bring records of one class to the places from ``start`` on; who is there takes their places."""
        if not len(records):
            return
        places = self._positions[records]
        inside = (start <= places) & (places < start + len(records))
        taken = np.zeros(len(records), dtype=bool)
        taken[places[inside] - start] = True
        free = start + np.flatnonzero(~taken)
        self._put(self.order[free], places[~inside])
        self._put(records[~inside], free)

    def _put(self, records: npt.NDArray[np.integer], places: npt.NDArray[np.integer]) -> None:
        self.order[places] = records
        self._positions[records] = places


def _bounds(sizes: Integers) -> Integers:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
