"""Whatever moves where, the classes stay a permutation."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpis.errors import InputError
from dpis.sampling import classes as module
from dpis.sampling.classes import RecordClasses

CLASSES = 5
label = st.integers(0, CLASSES - 1)


def accept_structure(classes: RecordClasses, labels: list[int]) -> None:
    """Every record once, each in its class, and every table says the same."""
    count = len(labels)
    assert sorted(classes.order.tolist()) == list(range(count))
    assert classes.bounds[0] == 0
    assert classes.bounds[-1] == count
    for s, (begin, end) in enumerate(pairwise(bounds_of(count))):
        for c in range(CLASSES):
            own = slice(*classes.bounds[s * CLASSES + c :][:2])
            expected = [i for i in range(begin, end) if labels[i] == c]
            assert sorted(classes.order[own].tolist()) == expected
            assert classes.sizes[s, c] == len(expected)
    assert (classes.groups(np.arange(count)) % CLASSES).tolist() == labels
    assert classes.all_labels().tolist() == labels


def bounds_of(count: int) -> np.ndarray:
    """Three shards, one of them empty."""
    return np.array([0, count // 3, count // 3, count])


def built(labels: list[int]) -> RecordClasses:
    return RecordClasses(np.array(labels, dtype=np.uint8), CLASSES, bounds_of(len(labels)))


def accept_moves(labels: list[int], moves: list[dict[int, int]]) -> None:
    classes = built(labels)
    for move in moves:
        records = np.array(sorted(move), dtype=np.int64)
        classes.move(records, np.array([move[i] for i in sorted(move)], dtype=np.int64))
        labels = [move.get(i, old) for i, old in enumerate(labels)]
        accept_structure(classes, labels)


@given(st.data())
def test_moves_keep_the_structure(data: st.DataObject) -> None:
    labels = data.draw(st.lists(label, max_size=40))
    some = st.dictionaries(st.integers(0, len(labels) - 1), label) if labels else st.just({})
    accept_structure(built(labels), labels)
    accept_moves(labels, data.draw(st.lists(some, max_size=6)))


@given(st.lists(label, max_size=40))
def test_sorting_in_parts_is_sorting(labels: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE", 7)
        in_parts = built(labels)
    accept_structure(in_parts, labels)
    assert in_parts.order.tolist() == built(labels).order.tolist()
    in_parts.sort(np.array(labels[::-1], dtype=np.uint8), CLASSES)
    accept_structure(in_parts, labels[::-1])


def test_a_whole_class_moves_at_once_and_classes_change_places() -> None:
    labels = [0] * 5 + [2] * 7 + [4] * 3
    accept_moves(labels, [dict.fromkeys(range(5), 4), dict.fromkeys(range(15), 0)])
    accept_moves(labels, [{i: 4 - labels[i] for i in range(15)}])


def swap_one_after_the_other(
    self: RecordClasses,
    records: np.ndarray,
    places: np.ndarray,
    outside: np.ndarray,
    shards: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Vectorised without care: it forgets that some records are in the target places already."""
    target = np.arange(len(records)) + (starts - counts.cumsum() + counts)[shards]
    self._put(self.order[target], places)
    self._put(records, target)


def test_careless_swaps_break_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordClasses, "_gather", swap_one_after_the_other)
    with pytest.raises(AssertionError):
        accept_moves([0] * 6, [{2: 1, 4: 1}])


def test_restored_classes_are_the_same() -> None:
    classes = built([3, 1, 1, 0, 3])
    classes.move(np.array([1, 4]), np.array([0, 4]))
    restored = RecordClasses.restore(classes.order, classes.sizes, bounds_of(5))
    accept_structure(restored, [3, 0, 1, 0, 4])
    assert restored.order.tolist() == classes.order.tolist()


@pytest.mark.parametrize(
    ("order", "sizes"),
    [
        ([0, 1, 2], [[1, 0], [0, 0], [1, 0]]),
        ([0, 1, 2], [[1, 0], [0, 0], [3, -1]]),
        ([0, 1, 2], [[0, 0], [1, 0], [2, 0]]),
        ([0, 1, 1], [[1, 0], [0, 0], [2, 0]]),
        ([0, 1, 3], [[1, 0], [0, 0], [2, 0]]),
        ([-1, 1, 2], [[1, 0], [0, 0], [2, 0]]),
        ([1, 0, 2], [[1, 0], [0, 0], [2, 0]]),
    ],
)
def test_damaged_classes_are_refused(order: list[int], sizes: list[list[int]]) -> None:
    with pytest.raises(InputError, match="damaged"):
        RecordClasses.restore(np.array(order, dtype=np.int32), np.array(sizes), bounds_of(3))
