"""Columns of a table by name, as numbers or coded text: all rows in memory, or some of those of a larger table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dpis.files.schema import canonical

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TextColumn:
    """A column of text: ``values[codes[i]]`` is the cell of record i, in its `canonical` form."""

    values: tuple[str, ...]
    codes: NDArray[np.int64]


class AnyTable(Protocol):
    """A table in memory or on disk."""

    @property
    def source(self) -> str:
        """The file, for messages."""

    def __len__(self) -> int: ...

    def where(self, record: int) -> str:
        """Where in the file a record is, for messages to the operator."""

    def text(self, name: str) -> TextColumn:
        """A whole column of text."""

    def number(self, name: str) -> NDArray[np.float64]:
        """A whole column of numbers."""

    def values(self, name: str) -> tuple[str, ...]:
        """What is in a column of text, each once."""

    def blocks(self) -> Iterator[Table]:
        """All rows in their order, as many at once as fit in memory."""


@dataclass(frozen=True, slots=True)
class Table:
    """Columns by name. In a column of numbers NaN stands for a missing value.

    ``lines`` is the line of a file of text on which each record begins; None: records are counted. ``rows`` is how
    many there are.
    """

    source: str
    numbers: Mapping[str, NDArray[np.float64]]
    texts: Mapping[str, TextColumn]
    rows: int
    lines: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return self.rows

    def where(self, record: int) -> str:
        """Where in the file a record is."""
        place = f"row {record + 1}" if self.lines is None else f"line {self.lines[record]}"
        return f"{place} of {self.source}"

    def text(self, name: str) -> TextColumn:
        """A column of text."""
        return self.texts[name]

    def number(self, name: str) -> NDArray[np.float64]:
        """A column of numbers."""
        return self.numbers[name]

    def values(self, name: str) -> tuple[str, ...]:
        """What is in a column of text, each once."""
        return self.texts[name].values

    def blocks(self) -> Iterator[Table]:
        """Itself: it fits in memory."""
        yield self


class TextCoder(dict[str, int]):
    """Cell -> code, in order of first appearance; cells with one canonical form share a code."""

    def __init__(self) -> None:
        super().__init__()
        self.values_seen: list[str] = []
        self._codes: dict[str, int] = {}

    def __missing__(self, cell: str) -> int:
        name = canonical(cell)
        code = self._codes.setdefault(name, len(self.values_seen))
        if code == len(self.values_seen):
            self.values_seen.append(name)
        self[cell] = code
        return code


def parsed_numbers(cells: Sequence[str]) -> NDArray[np.float64]:
    """Cells as numbers; what is none is NaN."""
    try:
        return np.array([float(cell) if cell else math.nan for cell in cells])
    except ValueError:
        return np.array([parsed_number(cell) for cell in cells])


def parsed_number(cell: str) -> float:
    """A cell as a number; what is none is NaN."""
    try:
        return float(cell)
    except ValueError:
        return math.nan
