"""Whether a collate function treats every item by itself: row i is made of item i, and of nobody else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils.data import default_collate

from dpis import batches
from dpis.batches import Batch
from dpis.coupling.schedule import Looks
from dpis.errors import CouplingError

Collate = Callable[[list[Any]], Batch]
Chance = Callable[[], AbstractContextManager[object]]
"""Puts the generators of the process where they stood when the batch was made, for a while."""

FEW, MORE = 5, 7
"""Copies of one item: what has the first size, and then the second, counts rows."""
OF_NO_ROW = -1
NUMBERS = "biufc"
"""Kinds of numpy arrays that are tensors."""


class CollateProbe:
    """Tries a collate function out at the 1st, 2nd, 4th, 8th, … batch; torch's default needs none.

    Two items exchange their places, in two moves. With the same random numbers, a move may change the row of the
    place that was written to, and no other. So whoever mixes rows or uses statistics of the batch is seen, and whoever
    sorts: the end is then the same as the beginning, though each move changed some row.

    Args:
        collate: the function.
    """

    def __init__(self, collate: Collate) -> None:
        self._collate, self._looks = collate, Looks()

    def keep(self, items: Sequence[Any]) -> list[Any] | None:
        """Copies of the items of a batch that is about to be made, if a look at it is due; items may be changed."""
        if self._collate is default_collate or len(items) < 2:
            return None
        return [copied(item) for item in items] if self._looks.due() else None

    def look(self, batch: Batch, items: list[Any] | None, chance: Chance) -> None:
        """Try out whether the rows of a batch are made item by item. Where nothing shows, the next batch is asked.

        Args:
            batch: as it was made.
            items: as `keep` returned them; None: no look is due.
            chance: the randomness that the batch was made with.

        Raises:
            CouplingError: if a row changes with the item of another.
        """
        if items is None:
            return

        def made(some: list[Any]) -> Batch:
            with chance():
                return self._collate([copied(item) for item in some])

        few, more = made(items[:1] * FEW), made(items[:1] * MORE)

        def changed(before: Batch, after: Batch) -> set[int]:
            return _differing(before, after, few, more)

        place, other, halfway = _first_move(batch, items, made)
        exchanged = made(_with(_with(items, place, items[other]), other, items[place]))
        shown = changed(batch, halfway)
        company_left = made(items[:1] * len(items))
        _refuse_all_but({place}, shown)
        _refuse_all_but({other}, changed(halfway, exchanged))
        if _shapes(company_left) == _shapes(batch) and 0 in changed(batch, company_left):
            raise CouplingError(_MIXES.format("the first row"))
        self._looks.showed(bool(shown))


def _first_move(
    batch: Batch, items: list[Any], made: Callable[[list[Any]], Batch]
) -> tuple[int, int, Batch]:
    """Another item at some place, and the batch with it: one of the shapes that the batch has, if there is any.

    Without an item that is longer than all others, a padded batch would be shorter.
    """
    first, middle, last = 0, len(items) // 2, len(items) - 1
    moves = [(last, first), (first, last), (middle, first), (first, middle), (middle, last)]
    for place, other in moves:
        if place != other:
            moved = made(_with(items, place, items[other]))
            if _shapes(moved) == _shapes(batch):
                return place, other, moved
    return last, first, made(_with(items, last, items[first]))


def _refuse_all_but(allowed: set[int], changed: set[int]) -> None:
    wrong = changed - allowed
    if OF_NO_ROW in wrong:
        raise CouplingError(_MIXES.format("something that belongs to no row"))
    if wrong:
        raise CouplingError(_MIXES.format(f"row {min(wrong)}"))


# ── which rows differ ────────────────────────────────────────────────────────────────────────────────


def differ(a: Any, b: Any) -> bool:
    """Whether two items differ in anything, the shapes of their tensors included."""
    return _shapes(a) != _shapes(b) or bool(_differing(a, b, a, a))


def _differing(a: Any, b: Any, few: Any, more: Any) -> set[int]:
    """The rows in which two batches differ, and `OF_NO_ROW` for what is no row of them.

    Args:
        a: one batch.
        b: another, of as many items.
        few: a batch of `FEW` copies of an item.
        more: one of `MORE` copies: where it has this size, rows are counted.
    """
    if isinstance(a, PackedSequence):
        return _differing(*(_unpacked(packed) for packed in (a, b, few, more)))
    if isinstance(a, np.ndarray) and a.dtype.kind not in NUMBERS:
        return _differing(*(array.tolist() for array in (a, b, few, more)))
    if isinstance(a, Tensor | np.ndarray):
        return _differing_tensors(*(torch.as_tensor(t) for t in (a, b, few, more)))
    if isinstance(a, Mapping):
        if not (a.keys() == b.keys() == few.keys() == more.keys()):
            return {OF_NO_ROW}
        return set().union(*(_differing(a[k], b[k], few[k], more[k]) for k in a))
    if isinstance(a, tuple | list):
        if len(few) == FEW and len(more) == MORE and len(a) == len(b):
            pairs = enumerate(zip(a, b, strict=True))
            return {row for row, (x, y) in pairs if _differing(x, y, x, x)}
        if not len(a) == len(b) == len(few) == len(more):
            return {OF_NO_ROW}
        return set().union(*map(_differing, a, b, few, more))
    if isinstance(a, str | bytes | int | float):
        return set() if a == b or (a != a and b != b) else {OF_NO_ROW}
    if all(hasattr(batch, "__dict__") for batch in (a, b, few, more)):
        return _differing(vars(a), vars(b), vars(few), vars(more))
    return set()


def _differing_tensors(a: Tensor, b: Tensor, few: Tensor, more: Tensor) -> set[int]:
    if not a.ndim == b.ndim == few.ndim == more.ndim:
        return {OF_NO_ROW}
    sizes = zip(few.shape, more.shape, strict=True)
    grown = [dim for dim, both in enumerate(sizes) if both == (FEW, MORE)]
    if not grown:
        return {OF_NO_ROW} if _rows_apart(a[None], b[None]) else set()
    a, b = a.movedim(grown[0], 0), b.movedim(grown[0], 0)
    return {OF_NO_ROW} if len(a) != len(b) else _rows_apart(a, b)


def _rows_apart(a: Tensor, b: Tensor) -> set[int]:
    """The rows that differ; where one batch is padded further, in what both have, before the padding or behind it."""
    common = [min(sizes) for sizes in zip(a.shape, b.shape, strict=True)]

    def overlap(tensor: Tensor, at_end: bool) -> Tensor:
        for dim, size in enumerate(common):
            tensor = tensor.narrow(dim, tensor.shape[dim] - size if at_end else 0, size)
        return tensor.reshape(common[0], -1)

    def apart(at_end: bool) -> set[int]:
        x, y = overlap(a, at_end), overlap(b, at_end)
        unequal = (x != y) & ~((x != x) & (y != y))
        return set(unequal.any(1).nonzero()[:, 0].tolist())

    return min((apart(at_end) for at_end in (False, True)), key=len)


def _unpacked(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    return pad_packed_sequence(packed, batch_first=True)


def _shapes(batch: Batch) -> list[torch.Size]:
    return [tensor.shape for tensor in batches.tensors(batch)]


def _with(items: list[Any], place: int, item: Any) -> list[Any]:
    return [*items[:place], item, *items[place + 1 :]]


def copied(item: Any) -> Any:
    """The item, not to be changed with it."""
    try:
        return copy.deepcopy(item)
    except Exception:
        return item  # what cannot be copied (an open file) is hardly changed by collating


_MIXES = (
    "collate_fn mixes rows: row i must be made of item i alone, but {0} changed with the item of another place. "
    "Records would couple, and weights and norms go to the wrong ones: the privacy guarantee would not hold. Keep "
    "the order of the items (pack with enforce_sorted=False in the model instead of sorting), leave mixtures and "
    "statistics of the batch out, use public numbers, and draw random numbers from torch, numpy or random alone, as "
    "many for every item: a crop that takes more of them for a longer item belongs in the data set's __getitem__"
)
