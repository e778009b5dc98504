"""Whether items are fetched, collated and augmented one by one: row i is made of item i, and of nobody else.

Each probe does once more what was done, with the same random numbers and some items exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from dpis import batches
from dpis.batches import Batch
from dpis.coupling.differences import FEW, MORE, NO_ROW, copied, differ, differing_rows, shapes
from dpis.coupling.looks import Looks
from dpis.errors import CouplingError, InputError

Fetch = Callable[[list[int]], Sequence[Any]]
Collate = Callable[[list[Any]], Batch]
Chance = Callable[[], AbstractContextManager[object]]
"""Puts the generators of the process where they stood when something was made, for a while."""


def fetches_at_once(dataset: Any) -> bool:
    """Whether a dataset has ``__getitems__``; a `Subset` asks the dataset that it is of."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


class FetchProbe:
    """Tries ``__getitems__`` out.

    The last item is exchanged, then all but the first: the items before them stay. (Those after would not: how many
    random numbers a transform takes may depend on its item.)

    Args:
        fetch: ``__getitems__`` of a dataset.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch, self._looks = fetch, Looks()

    def look(self, places: Sequence[int], items: Sequence[Any], chance: Chance) -> None:
        """Fetch other items in the company of these, if it is time.

        Args:
            places: whose items were fetched.
            items: what came.
            chance: the randomness that they were fetched with.

        Raises:
            CouplingError: if an item changes with its company.
            InputError: if there are not as many items as places.
        """
        if len(items) != len(places):
            raise InputError(
                f"__getitems__ must return one item a place: {len(places)} places, {len(items)} items. Which record "
                "an item belongs to would not be known"
            )
        if len(places) < 2 or not self._looks.due():
            return

        def fetched(others: list[int]) -> Sequence[Any]:
            with chance():
                return self._fetch(others)

        last_exchanged = fetched([*places[:-1], places[0]])
        company_left = fetched([places[0]] * len(places))
        before_last = zip(items[:-1], last_exchanged[:-1], strict=True)
        if differ(items[0], company_left[0]) or any(differ(a, b) for a, b in before_last):
            raise CouplingError(_FETCHED_TOGETHER)


class CollateProbe:
    """Tries a collate function out; torch's default needs none.

    Two items exchange their places, in two moves. A move may change the row of the place that was written to, and no
    other. So whoever mixes rows or uses statistics of the batch is seen, and whoever sorts: the end is then the same as
    the beginning, though each move changed some row.

    Args:
        collate: the function.
    """

    def __init__(self, collate: Collate) -> None:
        self._collate, self._looks = collate, Looks()

    def keep(self, items: Sequence[Any]) -> list[Any] | None:
        """Copies of the items of a batch that is about to be made, if a look at it is due; items may be changed."""
        if self._collate is default_collate or len(items) < 2 or not self._looks.due():
            return None
        return [copied(item) for item in items]

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
            return differing_rows(before, after, few, more)

        place, other, halfway = _first_move(batch, items, made)
        exchanged = made(_with(_with(items, place, items[other]), other, items[place]))
        shown = changed(batch, halfway)
        company_left = made(items[:1] * len(items))
        _refuse_all_but(place, shown)
        _refuse_all_but(other, changed(halfway, exchanged))
        if shapes(company_left) == shapes(batch) and 0 in changed(batch, company_left):
            raise CouplingError(_COLLATED_TOGETHER.format("the first row"))
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
            if shapes(moved) == shapes(batch):
                return place, other, moved
    return last, first, made(_with(items, last, items[first]))


def _with(items: list[Any], place: int, item: Any) -> list[Any]:
    return [*items[:place], item, *items[place + 1 :]]


def _refuse_all_but(allowed: int, changed: set[int]) -> None:
    wrong = changed - {allowed}
    if wrong:
        of_no_row = NO_ROW in wrong
        what = "something that belongs to no row" if of_no_row else f"row {min(wrong)}"
        raise CouplingError(_COLLATED_TOGETHER.format(what))


class AugmentProbe:
    """Tries an augmentation out: where the first record is exchanged, all others come out the same.

    Args:
        rows_per_record: how many rows of a batch belong to one record.
        batch_shaped: shapes may follow the batch; what has another shape then is not compared.
    """

    def __init__(self, rows_per_record: int, batch_shaped: bool) -> None:
        self._own, self._batch_shaped, self._looks = rows_per_record, batch_shaped, Looks()

    def look(self, batch: Batch, augmented: Batch, again: Callable[[Batch], Batch]) -> None:
        """Augment a batch with another first record, if it is time.

        Args:
            batch: before it was augmented.
            augmented: and after.
            again: augments another batch, with the same random numbers.

        Raises:
            CouplingError: if a record changes with the first.
        """
        if not self._looks.due():
            return
        places = torch.arange(batches.rows(batch))
        places[: self._own] = places[-self._own :].clone()
        exchanged = batches.take(batch, places)
        pairs = zip(batches.tensors(batch), batches.tensors(exchanged), strict=True)
        self._looks.showed(not all(_equal(a, b) for a, b in pairs))
        pairs = zip(batches.tensors(augmented), batches.tensors(again(exchanged)), strict=True)
        for one, other in pairs:
            comparable = one.shape == other.shape or not self._batch_shaped
            if comparable and not _equal(one[self._own :], other[self._own :]):
                raise CouplingError(_AUGMENTED_TOGETHER)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


_FETCHED_TOGETHER = (
    "__getitems__ mixes records: an item changed with the company that it was fetched in. Records would couple, and "
    "the privacy guarantee would not hold. Make item i of place i alone, with public numbers; pad in collate_fn; draw "
    "random numbers from torch, numpy or random alone. Or give a dataset with __getitem__ only"
)
_COLLATED_TOGETHER = (
    "collate_fn mixes rows: row i must be made of item i alone, but {0} changed with the item of another place. "
    "Records would couple, and weights and norms go to the wrong ones: the privacy guarantee would not hold. Keep "
    "the order of the items (pack with enforce_sorted=False in the model instead of sorting), leave mixtures and "
    "statistics of the batch out, use public numbers, and draw random numbers from torch, numpy or random alone, as "
    "many for every item: a crop that takes more of them for a longer item belongs in the dataset's __getitem__"
)
_AUGMENTED_TOGETHER = (
    "augment mixes rows (one item changed, others came out different): records would couple and the privacy guarantee "
    "would not hold. Treat every row by itself, with public numbers, and with no random numbers but those given"
)
