"""Reading CSV tables: every column wanted becomes an array of numbers or of coded text.

The reader is told which columns are numbers and which are text; it never decides by looking at the values.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np
from numpy.typing import NDArray

from dpis.errors import InputError
from dpis.files.schema import listed, shown
from dpis.files.table import Table, TextCoder, TextColumn, parsed_number, parsed_numbers

if TYPE_CHECKING:
    from _csv import Reader

_ROWS_AT_ONCE = 2_000
_DELIMITERS = (",", ";", "\t")


@dataclass(frozen=True, slots=True)
class CsvHeader:
    """The first row of a CSV table, and what stands between its cells. Both are public."""

    names: tuple[str, ...]
    delimiter: str


def read_header(path: str | Path, delimiter: str | None = None) -> CsvHeader:
    """The names of the columns.

    Without ``delimiter`` it is the one of comma, semicolon and tab that splits the header into most cells.

    Raises:
        InputError: no file, no header, or names that are empty, repeated, or all numbers.
    """
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
        raise InputError(f"a delimiter is one character, such as , or ;, found {shown(delimiter)}")
    delimiter = _delimiter_of(path) if delimiter is None else delimiter
    with _rows(path, delimiter) as rows:
        names = tuple(name.strip() for name in _first_row(rows))
    if not names:
        raise InputError(f"{path} is empty: its first line must hold the names of the columns")
    _check_names(path, names)
    return CsvHeader(names, delimiter)


def read_table(
    path: str | Path, header: CsvHeader, *, numbers: Collection[str], texts: Collection[str]
) -> Table:
    """The columns ``numbers`` as float64 (what is not a number is NaN) and ``texts`` as codes; others are skipped.

    Blank lines are skipped. A row with more or fewer cells than the header is refused.
    """
    places = {name: place for place, name in enumerate(header.names)}
    parts: dict[str, list[NDArray[np.float64]]] = {name: [] for name in numbers}
    coders = {name: TextCoder() for name in texts}
    codes: dict[str, list[NDArray[np.int64]]] = {name: [] for name in texts}
    lines: list[NDArray[np.int64]] = []
    for rows, begins in _chunks(path, header):
        cells = list(zip(*rows, strict=True))
        for name, found in parts.items():
            found.append(parsed_numbers(cells[places[name]]))
        for name, coder in coders.items():
            coded = map(coder.__getitem__, cells[places[name]])
            codes[name].append(np.fromiter(coded, np.int64, count=len(rows)))
        lines.append(np.array(begins, dtype=np.int64))
    if not lines:
        raise InputError(f"{path} has a header but no records")
    all_lines = np.concatenate(lines)
    return Table(
        source=str(path),
        numbers={name: np.concatenate(found) for name, found in parts.items()},
        texts={
            name: TextColumn(tuple(coders[name].values_seen), np.concatenate(found))
            for name, found in codes.items()
        },
        rows=len(all_lines),
        lines=all_lines,
    )


def _chunks(path: str | Path, header: CsvHeader) -> Iterator[tuple[list[list[str]], list[int]]]:
    width = len(header.names)
    with _rows(path, header.delimiter) as reader:
        _first_row(reader)
        rows: list[list[str]] = []
        begins: list[int] = []
        before = reader.line_num
        for row in reader:
            if not row:  # a blank line
                before = reader.line_num
                continue
            if len(row) != width:
                raise InputError(
                    f"{path}, line {before + 1}: {len(row)} cells where the header has {width}; a cell that holds "
                    f"the delimiter {shown(header.delimiter)} must stand between double quotes"
                )
            rows.append(row)
            begins.append(before + 1)
            before = reader.line_num
            if len(rows) == _ROWS_AT_ONCE:
                yield rows, begins
                rows, begins = [], []
        if rows:
            yield rows, begins


def _check_names(path: str | Path, names: Sequence[str]) -> None:
    for place, name in enumerate(names, start=1):
        if not name:
            raise InputError(
                f"{path}: column {place} has no name; name it in the first line (a table saved from pandas: "
                "index=False leaves the nameless row numbers out)"
            )
        if name in names[: place - 1]:
            raise InputError(f"{path}: the column name {shown(name)} is there twice, rename one")
    if all(not math.isnan(parsed_number(name)) for name in names):
        raise InputError(
            f"{path}: the first line must hold the names of the columns, found numbers: {listed(names)}"
        )


def _delimiter_of(path: str | Path) -> str:
    def columns(mark: str) -> int:
        try:
            with _opened(path) as file:
                return len(_first_row(csv.reader(file, delimiter=mark, strict=True)))
        except csv.Error:  # quotes that make no sense between these marks
            return 0

    return max(_DELIMITERS, key=columns)  # the first of equals: the comma


def _first_row(rows: Iterable[list[str]]) -> list[str]:
    return next((row for row in rows if row), [])


@contextmanager
def _opened(path: str | Path) -> Iterator[TextIO]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text: save it again with this encoding") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


@contextmanager
def _rows(path: str | Path, delimiter: str) -> Iterator[Reader]:
    with _opened(path) as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            yield reader
        except csv.Error as error:
            raise InputError(
                f"{path}, line {reader.line_num}: not valid CSV ({error}); quotes inside quotes are doubled"
            ) from None
