"""The user's collate function in the workers of a private loader: tried out now and then, and given nobody."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from dpis.coupling.collate import CollateProbe
from dpis.coupling.items import Items
from dpis.coupling.padding import PaddedOtherwise, PaddingProbe
from dpis.dropin.blank import emptied


class Collated(NamedTuple):
    """A batch on its way from a worker to the loop.

    Attributes:
        batch: what the loop gets.
        padded_otherwise: some of its rows, where they have another shape by themselves.
    """

    batch: Any
    padded_otherwise: list[PaddedOtherwise]


class PrivateCollate:
    """The user's collate function, tried out now and then; no items become a batch of length zero, shaped as any other.

    It goes to the workers of a loader: each of them looks by itself, and an error there reaches the loop.

    Args:
        collate: the function.
        dataset: where an item is to be had, to learn the shapes of a batch.
        row_dim: the dimension of rows in what it makes.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any, row_dim: int) -> None:
        self._collate, self._dataset = collate, dataset
        self._probe, self._padding = CollateProbe(collate), PaddingProbe(collate, row_dim)

    def __call__(self, items: Items) -> Collated:
        """A batch of these items.

        Raises:
            CouplingError: if its rows are not made item by item.
        """

        def chance() -> AbstractContextManager[None]:
            return items.places.seeded("collate")

        if not items:
            with chance():
                item = self._dataset[0]
                return Collated(emptied(self._collate([item]), self._collate([item, item])), [])
        rows, kept, some = len(items), self._probe.keep(items), self._padding.keep(items)
        with chance():
            batch = self._collate(list(items))
        self._probe.look(batch, kept, chance)
        return Collated(batch, self._padding.look(batch, some, rows, chance))


def gathered(batch: Any) -> Collated:
    """What a data set of tensors made at once: nothing is padded there."""
    return Collated(list(batch), [])
