"""The user's collate function in the workers of a private loader: tried out now and then, and given nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from dpis.engine.blank import emptied
from dpis.gradients import batches
from dpis.gradients.batches import Batch
from dpis.training.chance import GeneratorStates
from dpis.training.collation import CollateProbe, padded_otherwise


class Collated(NamedTuple):
    """A batch on its way from a worker to the loop.

    Attributes:
        batch: what the loop gets.
        padded_otherwise: some of its rows, each with the same row collated by itself, where that has another shape;
            rows first.
    """

    batch: Any
    padded_otherwise: list[tuple[Batch, Batch]]


class PrivateCollate:
    """The user's collate function, tried out now and then; no items become a batch of length zero, shaped as any other.

    It goes to the workers of a loader: each of them looks by itself, and an error there reaches the loop.

    Args:
        collate: the function.
        dataset: where an item is to be had, to learn the shapes of a batch.
        row_dim: the dimension of rows in what it makes.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any, row_dim: int) -> None:
        self._collate, self._dataset, self._row_dim = collate, dataset, row_dim
        self._probe = CollateProbe(collate)

    def __call__(self, items: list[Any]) -> Collated:
        """A batch of these items.

        Raises:
            CouplingError: if its rows are not made item by item.
        """
        if not items:
            item = self._dataset[0]
            return Collated(emptied(self._collate([item]), self._collate([item, item])), [])
        kept = self._probe.keep(items)
        if kept is None:
            return Collated(self._collate(items), [])
        chance = GeneratorStates.now()
        batch = self._collate(items)
        self._probe.look(batch, kept, chance.again)
        pairs = padded_otherwise(self._rows_first(batch), kept, self._rows_first_of, chance.again)
        return Collated(batch, pairs)

    def _rows_first_of(self, items: list[Any]) -> Batch:
        return self._rows_first(self._collate(items))

    def _rows_first(self, batch: Batch) -> Batch:
        def exchanged(tensor: Tensor) -> Tensor:
            return tensor.movedim(self._row_dim, 0) if tensor.ndim > self._row_dim else tensor

        return batches.apply(exchanged, batch)
