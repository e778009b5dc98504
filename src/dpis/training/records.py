"""A data set seen as records: which rows a drawn record brings, collated, augmented, on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from dpis import batches
from dpis.batches import Batch, columns_of
from dpis.coupling.items import (
    AugmentProbe,
    Collate,
    CollateProbe,
    FetchProbe,
    fetches_at_once,
)
from dpis.coupling.padding import PaddingProbe
from dpis.errors import InputError
from dpis.files.users import UserIndex, choose_rows, group_by_user
from dpis.generators import ItemChance, chance_of, seeded_generators, torch_generator
from dpis.randomness import Key, Stream
from dpis.stored_rows import Places, StoredRows, rows_at_once, rows_of

Augment = Callable[[Batch, torch.Generator], Batch]
"""``augment(batch, generator)``: every row changed at random, independently of all other rows."""

ROWS_AT_ONCE = 4096
RECORDS_AT_ONCE = 512
"""Of a draw: few enough to be fetched into memory that was just used."""


@dataclass(frozen=True)
class Rows:
    """The rows of some records: ``rows_per_record`` for each, in the order of the records.

    Attributes:
        batch: as the collate function made it.
        present: ``[records, rows_per_record]``, False where a row only fills up; None: all count.
        padded_otherwise: some rows as they are in the batch, each with the same row collated by itself, where that has
            another shape: their gradients must agree. Empty unless it is time to look.
    """

    batch: Batch
    present: Tensor | None
    padded_otherwise: Sequence[tuple[Batch, Batch]] = ()


@dataclass(frozen=True)
class _Chances:
    """The random numbers of some records that are fetched together, from their beginning each time they are asked for.

    An item's are its own, whatever it is fetched with; those of a batch go by place.
    """

    key: Key
    occasion: str
    place: str
    step: int

    def of_items(self) -> Stream:
        return self.key.stream(f"{self.occasion}items", self.step)

    def of_batch(self) -> Stream:
        return self.key.stream(f"{self.occasion}batch:{self.place}", self.step)


@dataclass(eq=False)
class Records:
    """What is protected, record by record.

    Attributes:
        dataset: map-style; a plain `TensorDataset` is indexed at once.
        collate_fn: makes a batch of a list of items; torch's default.
        user_ids: one a row: then a record is a user with all of its rows.
        max_rows_per_user: how many rows of a user take part in a step, a public bound; a user's excess rows are left
            out by the user's own coins, anew in every step.
        views: the first tensor of an item has so many views of it, made from that item alone, along its first axis; a
            record's gradient is the mean over them.
        augment: changes rows at random, each by itself.
        augmentations: so many augmented copies of every row; a record's gradient is the mean over them.
        batch_shaped: the shapes of rows may differ from batch to batch (say, padded to the longest). Then the rounding
            of a record's norm depends on who shares its batch, and the ledger says so. The model must not see how far
            a row is padded, which is tried out: else records would couple by more than rounding.
        device: where batches go.
        rank: of the process that fetches: what is random by place in a draw has a stream for each process, or a record
            would shift the random numbers of its own against those of the others.
    """

    dataset: Dataset[Any]
    collate_fn: Collate = default_collate
    user_ids: Sequence[Any] | npt.NDArray[Any] | None = None
    max_rows_per_user: int = 1
    views: int = 1
    augment: Augment | None = None
    augmentations: int = 1
    batch_shaped: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__len__"):
            raise InputError(
                "a map-style data set with a length is required: records are drawn by index, each by its own coin. "
                "A stream cannot be sampled so, and no amplification could be claimed. Read it into a list first"
            )
        if self.augmentations > 1 and self.augment is None:
            raise InputError("augmentations without augment= would be copies of one row: give both")
        rows = len(self.dataset)
        self._users: UserIndex | None = None
        if self.user_ids is not None:
            if len(self.user_ids) != rows:
                raise InputError(
                    f"one user id a row is required: {rows} rows, {len(self.user_ids)} ids"
                )
            self._users = group_by_user(self.user_ids)
        elif self.max_rows_per_user > 1:
            raise InputError("max_rows_per_user needs user_ids")
        self._count = rows if self._users is None else len(self._users)
        self._row_shapes: list[torch.Size] | None = None
        self._collate_probe = CollateProbe(self.collate_fn)
        self._padding_probe = PaddingProbe(self.collate_fn)
        self._fetch_probe = FetchProbe(self._items) if fetches_at_once(self.dataset) else None
        self._one_by_one = ItemChance(self.dataset.__getitem__)
        self._pairs: list[tuple[Batch, Batch]] = []
        self._nobody: Batch | None = None
        self._augment_probe = AugmentProbe(self.rows_per_record, self.batch_shaped)

    def __len__(self) -> int:
        return self._count

    @property
    def rows_per_record(self) -> int:
        """How many rows of a batch belong to one record."""
        return self.max_rows_per_user * self.views * self.augmentations

    @property
    def by_place(self) -> bool:
        """Whether what is random about rows may go by their place in a draw, not by the row alone."""
        own_collate = self.collate_fn is not default_collate
        return own_collate or self.augment is not None or self._users is not None

    def drawn(self, records: npt.NDArray[np.int64], key: Key, step: int) -> Iterator[Rows]:
        """The rows of these records for this step, some records at a time: what is not needed yet is not fetched.

        Args:
            records: their indices.
            key: the run's secret. What is random about rows is the step's own.
            step: the number of the step.
        """
        for start in range(0, len(records), RECORDS_AT_ONCE):
            some, place = records[start : start + RECORDS_AT_ONCE], f"{self.rank}:{start}"
            rows, present = self._rows_of(some, key, f"rows:{place}", step)
            batch = self._fetch(rows, _Chances(key, "", place, step))
            batch = self._augmented(batch, lambda p=place: key.stream(f"augment:{p}", step))  # type: ignore[misc]
            yield Rows(batch, self._repeated_presence(present), self._taken_pairs())

    def all(self, key: Key, epoch: int, own: range | None = None) -> Iterator[Rows]:
        """Every record, some at a time, without augmentation: each row ``augmentations`` times.

        Args:
            key: the run's secret.
            epoch: the number of the pass.
            own: only these records.
        """
        own = range(len(self)) if own is None else own
        stored = [c for c in columns_of(self.dataset) if isinstance(c, StoredRows)]
        most_rows = min([ROWS_AT_ONCE, *(rows_at_once(column.shape) for column in stored)])
        at_once = max(1, most_rows // self.rows_per_record)
        for start in range(own.start, own.stop, at_once):
            some = np.arange(start, min(start + at_once, own.stop), dtype=np.int64)
            rows, present = self._rows_of(some, key, f"all-rows:{start}", epoch)
            batch = self._fetch(rows, _Chances(key, "all-", str(start), epoch))
            yield Rows(self._repeated(batch), self._repeated_presence(present), self._taken_pairs())

    def nobody(self, key: Key) -> Rows:
        """No rows, shaped as any others: the first item of the dataset tells how."""
        if self._nobody is None:
            chances = _Chances(key, "nobody-", "", 0)
            batch = self._fetch(np.zeros(1, dtype=np.int64), chances)
            self._nobody = batches.apply(lambda tensor: tensor[:0], batch)
        shape = 0, self.rows_per_record
        present = torch.zeros(shape, dtype=torch.bool, device=self.device)
        return Rows(self._nobody, None if self._users is None else present)

    def places(self, records: range) -> Places:
        """The rows of consecutive records, record by record."""
        if self._users is None:
            return np.arange(records.start, records.stop)
        offsets = self._users.offsets
        return self._users.rows[offsets[records.start] : offsets[records.stop]]

    def owners(self, records: range) -> list[tuple[str, int]]:
        """Of consecutive records, each a user: who it is, and how many rows it has. Empty: records are rows."""
        if self._users is None or self.user_ids is None:
            return []
        index, ids = self._users, self.user_ids
        return [(str(ids[index.rows_of(user)[0]]), len(index.rows_of(user))) for user in records]

    def raw_items(self, key: Key, places: Places) -> Iterator[list[Any]]:
        """The items of these rows as they are, some at a time: for a fingerprint."""
        for start in range(0, len(places), ROWS_AT_ONCE):
            some = places[start : start + ROWS_AT_ONCE]
            with seeded_generators(key.stream("fingerprint", int(some[0]))):
                yield self._items(some.tolist())

    def _rows_of(
        self, records: npt.NDArray[np.int64], key: Key, purpose: str, step: int
    ) -> tuple[npt.NDArray[np.int64], Tensor | None]:
        if self._users is None:
            return records, None
        shape = len(records), self.max_rows_per_user
        coins = key.stream(purpose, step).uniforms(math.prod(shape)).reshape(shape)
        rows, present = choose_rows(self._users, records, self.max_rows_per_user, coins)
        return rows.reshape(-1), torch.as_tensor(present, device=self.device)

    def _fetch(self, rows: npt.NDArray[np.int64], chances: _Chances) -> Batch:
        columns = columns_of(self.dataset)
        if columns and self.collate_fn is default_collate:
            batch: Batch = tuple(rows_of(column, rows) for column in columns)
        else:
            items = self._drawn_items(rows.tolist(), chances)
            batch = self._collated_items(items, chances.of_batch)
        return self._view_by_view(batches.apply(lambda tensor: tensor.to(self.device), batch))

    def _view_by_view(self, batch: Batch) -> Batch:
        """Every view a row of its own, those of an item neighbours; what else the item holds goes with each."""
        if self.views == 1:
            return batch
        first, *rest = batch if isinstance(batch, tuple | list) else (batch,)
        if not isinstance(first, Tensor) or first.shape[1:2] != (self.views,):
            found = list(first.shape[1:]) if isinstance(first, Tensor) else type(first).__name__
            raise InputError(
                f"views={self.views} needs items (views, ...) whose first tensor has {self.views} views along its "
                f"first axis, as torch.stack makes them; found {found}"
            )
        repeated = batches.apply(lambda t: t.repeat_interleave(self.views, dim=0), tuple(rest))
        return (first.flatten(0, 1), *repeated)

    def _collated_items(self, items: list[Any], chance: Callable[[], Stream]) -> Batch:
        """A batch of these items; that the collate function treats each by itself is tried out now and then."""

        def repeated() -> AbstractContextManager[None]:
            return seeded_generators(chance())

        rows, kept = len(items), self._collate_probe.keep(items)
        some = self._padding_probe.keep(items) if self.batch_shaped else {}
        with repeated():
            batch = self.collate_fn(items)
        self._check_shapes(batch, rows)
        self._collate_probe.look(batch, kept, repeated)
        for _, padded, alone in self._padding_probe.look(batch, some, rows, repeated):
            self._pairs.append((_with_tensors(batch, padded), _with_tensors(batch, alone)))
        return batch

    def _taken_pairs(self) -> list[tuple[Batch, Batch]]:
        """Rows to be compared with themselves in another padding, each once."""
        pairs, self._pairs = self._pairs, []

        def as_fetched(batch: Batch) -> Batch:
            return self._view_by_view(batches.apply(lambda t: t.to(self.device), batch))

        return [(as_fetched(one), as_fetched(other)) for one, other in pairs]

    def _drawn_items(self, rows: list[int], chances: _Chances) -> list[Any]:
        """Items of these rows; that a data set which fetches them at once makes each by itself is tried out, too."""
        if self._fetch_probe is None:
            return self._one_by_one.items(rows, chance_of(chances.of_items()))
        with seeded_generators(chances.of_batch()):
            items = self._items(rows)
        self._fetch_probe.look(rows, items, lambda: seeded_generators(chances.of_batch()))
        return items

    def _items(self, rows: Sequence[int]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        return list(many(list(rows))) if many is not None else [self.dataset[i] for i in rows]

    def _check_shapes(self, batch: Batch, rows: int) -> None:
        found = batches.rows(batch)
        if found != rows:
            raise InputError(
                f"collate_fn must keep one row an item: {rows} items in, {found} rows out"
            )
        shapes = [tensor.shape[1:] for tensor in batches.tensors(batch)]
        if self._row_shapes is None:
            self._row_shapes = shapes
        if shapes != self._row_shapes and not self.batch_shaped:
            raise InputError(
                f"rows of one shape are required, found {_readable(shapes)} after {_readable(self._row_shapes)}: where "
                "shapes follow the batch (padding to its longest), the rounding of a record's norm depends on others. "
                "Pad to one public length; or, if the model masks what is padded, declare it with batch_shaped=True: "
                "the ledger will say so"
            )

    # ── augmentation ─────────────────────────────────────────────────────────────────────────────────

    def _augmented(self, batch: Batch, chance: Callable[[], Stream]) -> Batch:
        if self.augment is None:
            return batch
        batch = self._repeated(batch)
        changed = self._apply_augment(batches.apply(torch.clone, batch), chance())
        if batches.rows(changed) != batches.rows(batch):
            raise InputError("augment must return as many rows as it was given")
        self._augment_probe.look(batch, changed, lambda other: self._apply_augment(other, chance()))
        return changed

    def _apply_augment(self, batch: Batch, stream: Stream) -> Batch:
        """With a generator of the step's own; the global ones are seeded too, for whoever uses them."""
        assert self.augment is not None
        generator = torch_generator(stream, self.device)
        with seeded_generators(stream):
            return self.augment(batch, generator)

    def _repeated(self, batch: Batch) -> Batch:
        """Every row ``augmentations`` times; those of one row are neighbours."""
        if self.augmentations == 1:
            return batch
        return batches.apply(lambda t: t.repeat_interleave(self.augmentations, dim=0), batch)

    def _repeated_presence(self, present: Tensor | None) -> Tensor | None:
        copies = self.views * self.augmentations
        return None if present is None else present.repeat_interleave(copies, dim=1)


def _with_tensors(batch: Batch, tensors: Sequence[Tensor]) -> Batch:
    """The same structure with these tensors in the places of its own."""
    following = iter(tensors)
    return batches.apply(lambda _: next(following), batch)


def _readable(shapes: list[torch.Size]) -> str:
    return " and ".join(str(tuple(shape)) for shape in shapes)
