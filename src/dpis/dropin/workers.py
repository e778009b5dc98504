"""What the workers of a private loader do: make the items of a draw, and a batch of them, under the eyes of probes.

Each worker looks by itself; an error there reaches the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from dpis.coupling.items import Collate, CollateProbe, FetchProbe, fetches_at_once
from dpis.coupling.padding import PaddedOtherwise, PaddingProbe
from dpis.dropin.blank import emptied
from dpis.generators import ItemChance, seeded_generators
from dpis.randomness import Stream


class Places(list[int]):
    """The places of a physical batch, on their way to the process that makes its items.

    Attributes:
        chance: secret bytes of the step, for what is random about its items.
        start: the first of these places in the draw.
    """

    def __init__(self, places: Iterable[int] = (), chance: bytes = b"", start: int = 0) -> None:
        super().__init__(places)
        self.chance, self.start = chance, start

    def seeded(self, purpose: str) -> AbstractContextManager[None]:
        """Random numbers for what is made of all items at once: the same each time they are asked for."""
        return seeded_generators(Stream.derived(self.chance, f"{purpose}:{self.start}".encode()))


class Collated(NamedTuple):
    """A batch on its way from a worker to the loop.

    Attributes:
        batch: what the loop gets.
        padded_otherwise: some of its rows, where they have another shape by themselves.
    """

    batch: Any
    padded_otherwise: list[PaddedOtherwise]


class WorkerBatches(Dataset[Any]):
    """The user's dataset, asked for whole batches; in all else it is itself.

    Items are made one by one, or at once where the dataset can do that. Nobody's items become a batch of length zero,
    shaped as any other.

    Args:
        dataset: the user's.
        collate: the user's.
        row_dim: the dimension of rows in what it makes.
    """

    def __init__(self, dataset: Any, collate: Collate, row_dim: int) -> None:
        at_once = fetches_at_once(dataset)
        self.__dict__.update(
            _dataset=dataset,
            _collate=collate,
            _one_by_one=ItemChance(dataset.__getitem__),
            _fetch_probe=FetchProbe(dataset.__getitems__) if at_once else None,
            _collate_probe=CollateProbe(collate),
            _padding_probe=PaddingProbe(collate, row_dim),
        )

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, place: Any) -> Any:
        return self._dataset[place]

    def __getitems__(self, places: Places) -> Collated:
        """A batch of the items of these places.

        Raises:
            CouplingError: if its rows are not made item by item.
        """

        def chance() -> AbstractContextManager[None]:
            return places.seeded("collate")

        if not places:
            with chance():
                item = self._dataset[0]
                return Collated(emptied(self._collate([item]), self._collate([item, item])), [])
        items = self._items(places)
        kept, some = self._collate_probe.keep(items), self._padding_probe.keep(items)
        with chance():
            batch = self._collate(list(items))
        self._collate_probe.look(batch, kept, chance)
        return Collated(batch, self._padding_probe.look(batch, some, len(places), chance))

    def _items(self, places: Places) -> Sequence[Any]:
        items: Sequence[Any]
        if self._fetch_probe is None:
            items = self._one_by_one.items(places, places.chance)
            return items
        with places.seeded("items"):
            items = self._dataset.__getitems__(list(places))
        self._fetch_probe.look(places, items, lambda: places.seeded("items"))
        return items

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What a worker sets when it starts is for the dataset."""
        setattr(self._dataset, name, value)


class TensorBatches(TensorDataset):
    """A plain `TensorDataset`, sharing all it has, that makes the batch that `default_collate` makes of its items."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.__dict__ = dataset.__dict__

    def __getitems__(self, places: list[int]) -> Collated:
        chosen = torch.tensor(places, dtype=torch.long)
        batch: list[Tensor] = [t.index_select(0, chosen.to(t.device)) for t in self.tensors]
        return Collated(batch, [])


def as_made(batch: Any) -> Any:
    """The collate function of a private loader: its dataset has collated already."""
    return batch
