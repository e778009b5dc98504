"""Rows that stay on disk and are read by index: what data that does not fit in memory looks like to everybody else."""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dpis.errors import InputError

Places = NDArray[np.int64]

KEPT_IN_MEMORY = 1 << 28
"""Bytes: rows that take no more are simply read into memory."""

BLOCK_BYTES = 1 << 22
MOST_ROWS = 4096
"""What is read at once where all rows are looked through: so many bytes or rows."""


def fits_in_memory(size: int) -> bool:
    """Whether so many bytes are rather read than left on disk."""
    return size <= KEPT_IN_MEMORY


class StoredRows(ABC):
    """``[N, ...]``: rows of one shape, made when they are asked for."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """As of a tensor."""

    @abstractmethod
    def fetch(self, places: Places) -> Tensor:
        """The rows of these places, in their order."""

    @abstractmethod
    def files(self, places: Places) -> tuple[Path, ...]:
        """The files that these rows are read from."""

    def origin(self, places: Places) -> Places:
        """Where these rows stand among those of the files."""
        return places

    @property
    @abstractmethod
    def recipe(self) -> str:
        """How rows are made of what the files hold: the same files and recipe, the same rows."""

    def __len__(self) -> int:
        return self.shape[0]

    def example(self) -> Tensor:
        """One row, of what is stored if not of these."""
        return self.fetch(np.arange(1))

    @property
    def ndim(self) -> int:
        """As of a tensor."""
        return len(self.shape)

    def taken(self, places: Places) -> StoredRows:
        """These rows alone, in this order."""
        return _Taken(self, places)

    def each(self, change: Callable[[Tensor], Tensor], recipe: str) -> StoredRows:
        """Every row changed by itself.

        Args:
            change: of a block of rows; what it makes of a row may not depend on the others.
            recipe: what it does, in words.
        """
        return _Changed(self, change, recipe)

    def blocks(self) -> Iterator[Tensor]:
        """All rows in their order, a bit at a time."""
        for places in consecutive(self):
            yield self.fetch(places)


def consecutive(rows: StoredRows, start: int = 0, stop: int | None = None) -> Iterator[Places]:
    """The places from ``start`` to ``stop``, as many at once as are read without much memory."""
    at_once = rows_at_once(rows.shape)
    stop = len(rows) if stop is None else stop
    for first in range(start, stop, at_once):
        yield np.arange(first, min(first + at_once, stop))


def rows_at_once(shape: Sequence[int]) -> int:
    """How many rows of such an array fit a block."""
    return max(1, min(MOST_ROWS, BLOCK_BYTES // max(1, 4 * math.prod(shape[1:]))))


@dataclass(frozen=True, eq=False)
class MappedRows(StoredRows):
    """An array in a file, as NumPy lays it out; mapped when it is first used, in each process anew.

    Attributes:
        path: of the file.
        dtype: of the numbers.
        whole: the shape.
        offset: where they begin.
        by_column: Fortran's order.
        keeper: what keeps the file as long as it is needed.
    """

    path: Path
    dtype: np.dtype[Any]
    whole: tuple[int, ...]
    offset: int = 0
    by_column: bool = False
    keeper: object = None

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a tensor."""
        return self.whole

    @property
    def recipe(self) -> str:
        """Where in the file, and of which type."""
        return f"{self.dtype.str} {self.whole} at {self.offset} {self.by_column}"

    @cached_property
    def array(self) -> NDArray[Any]:
        """The file as an array: memory is used by the system's cache alone."""
        mapped: NDArray[Any] = self._mapped()
        return mapped

    @cached_property
    def _scattered(self) -> NDArray[Any]:
        """The same, without reading ahead: next to a drawn row nobody was drawn."""
        array: Any = self._mapped()
        if self.whole[0] and hasattr(mmap, "MADV_RANDOM"):
            array._mmap.madvise(mmap.MADV_RANDOM)
        scattered: NDArray[Any] = array
        return scattered

    def _mapped(self) -> Any:
        order: Any = "F" if self.by_column else "C"
        try:
            return np.memmap(self.path, self.dtype, "r", self.offset, self.whole, order)
        except (OSError, ValueError) as error:
            raise InputError(
                f"cannot read {self.path}, which was there when it was opened: {error}"
            ) from None

    def read(self, places: Places) -> NDArray[Any]:
        """The rows as they are stored, read in the order of the file."""
        if len(places) and bool((np.diff(places) == 1).all()):
            rows: NDArray[Any] = self.array[places[0] : places[-1] + 1]
            return rows.astype(self.dtype.newbyteorder("="))
        order = np.argsort(places, kind="stable")
        found = np.empty((len(places), *self.whole[1:]), self.dtype.newbyteorder("="))
        found[order] = self._scattered[places[order]]
        return found

    def fetch(self, places: Places) -> Tensor:
        """The rows as a tensor of the type that is stored."""
        return torch.from_numpy(self.read(places))

    def files(self, places: Places) -> tuple[Path, ...]:
        """The one."""
        return (self.path,)

    def __getstate__(self) -> dict[str, Any]:
        """Without the maps, which would be copied whole."""
        own = "array", "_scattered", "keeper"
        return {name: value for name, value in self.__dict__.items() if name not in own}


@dataclass(frozen=True, eq=False)
class _Taken(StoredRows):
    rows: StoredRows
    places: Places

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.places), *self.rows.shape[1:])

    @property
    def recipe(self) -> str:
        return self.rows.recipe

    def fetch(self, places: Places) -> Tensor:
        return self.rows.fetch(self.places[places])

    def files(self, places: Places) -> tuple[Path, ...]:
        return self.rows.files(self.places[places])

    def origin(self, places: Places) -> Places:
        return self.rows.origin(self.places[places])

    def taken(self, places: Places) -> StoredRows:
        return _Taken(self.rows, self.places[places])

    def example(self) -> Tensor:
        return self.rows.example()


@dataclass(frozen=True, eq=False)
class _Changed(StoredRows):
    rows: StoredRows
    change: Callable[[Tensor], Tensor]
    words: str

    @cached_property
    def _row_shape(self) -> tuple[int, ...]:
        """Told by one."""
        return tuple(self.example().shape[1:])

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self._row_shape)

    @property
    def recipe(self) -> str:
        return f"{self.rows.recipe}, {self.words}"

    def example(self) -> Tensor:
        return self.change(self.rows.example())

    def fetch(self, places: Places) -> Tensor:
        return self.change(self.rows.fetch(places))

    def origin(self, places: Places) -> Places:
        return self.rows.origin(places)

    def files(self, places: Places) -> tuple[Path, ...]:
        return self.rows.files(places)


@dataclass(frozen=True, eq=False)
class StackedRows(StoredRows):
    """Several of one shape, side by side: ``[N, parts, ...]``."""

    parts: Sequence[StoredRows]

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a tensor."""
        first = self.parts[0].shape
        return (first[0], len(self.parts), *first[1:])

    @property
    def recipe(self) -> str:
        """Of each part."""
        return " beside ".join(part.recipe for part in self.parts)

    def fetch(self, places: Places) -> Tensor:
        """One row of each part, stacked."""
        return torch.stack([part.fetch(places) for part in self.parts], dim=1)

    def origin(self, places: Places) -> Places:
        """The same for all parts."""
        return self.parts[0].origin(places)

    def files(self, places: Places) -> tuple[Path, ...]:
        """Of all parts."""
        return tuple(file for part in self.parts for file in part.files(places))


Column = Tensor | StoredRows


class RowsDataset(Dataset[tuple[Tensor, ...]]):
    """Columns of one length, in memory or on disk; an item is a row of each.

    Args:
        *columns: inputs and targets, rows first.
    """

    def __init__(self, *columns: Column) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, place: int) -> tuple[Tensor, ...]:
        """One row of each column."""
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        return tuple(column[0] for column in self.fetch(np.array([place % len(self)])))

    def __getitems__(self, places: list[int]) -> list[tuple[Tensor, ...]]:
        """Several items, read at once."""
        columns = self.fetch(np.asarray(places, dtype=np.int64))
        return list(zip(*(column.unbind(0) for column in columns), strict=True))

    def fetch(self, places: Places) -> tuple[Tensor, ...]:
        """The rows of these places, column by column."""
        return tuple(rows_of(column, places) for column in self.columns)


def changed(column: Column, change: Callable[[Tensor], Tensor], recipe: str) -> Column:
    """Every row changed by itself: at once in memory, else when it is asked for."""
    return column.each(change, recipe) if isinstance(column, StoredRows) else change(column)


def taken(column: Column, places: Places) -> Column:
    """These rows alone, in this order."""
    return column.taken(places) if isinstance(column, StoredRows) else rows_of(column, places)


def blocks_of(column: Column, most: int) -> Iterator[Tensor]:
    """All rows in their order, at most so many at once."""
    at_once = min(most, rows_at_once(column.shape)) if isinstance(column, StoredRows) else most
    for start in range(0, len(column), at_once):
        stop = min(start + at_once, len(column))
        if isinstance(column, StoredRows):
            yield column.fetch(np.arange(start, stop))
        else:
            yield column[start:stop]


def rows_of(column: Column, places: Places) -> Tensor:
    """The rows of these places, wherever the column lies."""
    if isinstance(column, StoredRows):
        return column.fetch(places)
    return column.index_select(0, torch.from_numpy(places).to(column.device))
