"""Data sets that fetch several items at once, and whether they make each by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import Dataset, Subset

from dpis.coupling.collate import Chance, differ
from dpis.coupling.schedule import Looks
from dpis.errors import CouplingError, InputError
from dpis.generators import ItemChance, seeded_generators
from dpis.randomness import Stream

Fetch = Callable[[list[int]], Sequence[Any]]


def fetches_at_once(dataset: Any) -> bool:
    """Whether a data set has ``__getitems__``; a `Subset` asks the data set that it is of."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


class FetchProbe:
    """Tries ``__getitems__`` out at the 1st, 2nd, 4th, 8th, … batch: every item must be made by itself.

    The last item is exchanged, then all but the first: with the same random numbers, the items before them stay. (Those
    after would not: how many random numbers a transform takes may depend on its item.)

    Args:
        fetch: ``__getitems__`` of a data set.
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

        first, *others, _ = places
        last_exchanged = fetched([first, *others, first])
        company_left = fetched([first] * len(places))
        before_last = zip(items[:-1], last_exchanged[:-1], strict=True)
        if differ(items[0], company_left[0]) or any(differ(a, b) for a, b in before_last):
            raise CouplingError(_COUPLES)


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


class Items(list[Any]):
    """The items of these places, on their way to the collate function.

    Attributes:
        places: whose they are.
    """

    def __init__(self, items: Iterable[Any], places: Places) -> None:
        super().__init__(items)
        self.places = places


class SeededItems(Dataset[Any]):
    """The user's data set in a private loader: what is random about items comes from the step; else it is itself.

    Items are made one by one, or at once where the data set can do that; then it is tried out now and then.
    """

    def __init__(self, dataset: Any) -> None:
        at_once = fetches_at_once(dataset)
        self.__dict__.update(
            _dataset=dataset,
            _probe=FetchProbe(dataset.__getitems__) if at_once else None,
            _one_by_one=ItemChance(dataset.__getitem__),
        )

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, place: Any) -> Any:
        return self._dataset[place]

    def __getitems__(self, places: Places) -> Items:
        if not places:
            return Items([], places)
        if self._probe is None:
            return Items(self._one_by_one.items(places, places.chance), places)
        with places.seeded("items"):
            items: Sequence[Any] = self._dataset.__getitems__(list(places))
        self._probe.look(places, items, lambda: places.seeded("items"))
        return Items(items, places)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What a worker sets when it starts is for the data set."""
        setattr(self._dataset, name, value)


_COUPLES = (
    "__getitems__ mixes records: an item changed with the company that it was fetched in. Records would couple, and "
    "the privacy guarantee would not hold. Make item i of place i alone, with public numbers; pad in collate_fn; draw "
    "random numbers from torch, numpy or random alone. Or give a data set with __getitem__ only"
)
