"""Records of a table: held against what was declared, some bounds yet to be released, then encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dpis.errors import InputError
from dpis.files.columnar import ColumnarFile, is_columnar, open_columnar
from dpis.files.csv_table import CsvHeader, read_header, read_table
from dpis.files.packed_table import read_columns
from dpis.files.preprocessing import (
    CategoricalColumn,
    Column,
    EncodedRecords,
    NumericColumn,
    TablePreprocessing,
    encode_table_targets,
)
from dpis.files.scaling import bucket_counts, one_over_rows
from dpis.files.schema import FROM_DATA, Schema, listed, shown
from dpis.files.table import AnyTable
from dpis.files.targets import (
    Bounds,
    ClassTarget,
    NumberTarget,
    Origin,
    Target,
    check_few,
    class_target,
    classes_of_target,
    distinct_names,
)
from dpis.files.users import may_be_rounded, names_no_user


@dataclass(frozen=True, slots=True)
class RawTable:
    """A table that was read, before any private release."""

    table: AnyTable
    columns: tuple[Column | str, ...]
    """In the order of the file; a bare name is a column whose bounds must be released."""

    target: Target
    targets: torch.Tensor
    """Encoded when the file is opened, so that a label without a class is found before anything is spent."""

    user_ids: NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(self.table)

    @property
    def image_shape(self) -> None:
        """The rows of a table are no images."""

    @property
    def columns_to_release(self) -> tuple[str, ...]:
        """Numeric columns without declared bounds."""
        return tuple(column for column in self.columns if isinstance(column, str))

    def bucket_counts(self, rows: NDArray[np.int64] | None = None) -> torch.Tensor:
        """Exact counts of `columns_to_release` over ``rows`` (those trained on), by user where there are users.

        Private until noise is added: see `dpis.files.scaling`.
        """
        counted = np.ones(len(self), dtype=bool)
        if rows is not None:
            counted[:] = False
            counted[rows] = True
        shares = None
        if self.user_ids is not None:
            shares = np.zeros(len(self))
            shares[counted] = one_over_rows(self.user_ids[counted])
        names, start = self.columns_to_release, 0
        counts = bucket_counts([np.zeros(0) for _ in names])
        for block in self.table.blocks():
            here = slice(start, start + len(block))
            chosen = counted[here]
            counts += bucket_counts(
                [block.number(n)[chosen] for n in names],
                None if shares is None else shares[here][chosen],
            )
            start = here.stop
        return counts

    def preprocessing(self, bounds: Sequence[Bounds] = ()) -> TablePreprocessing:
        """What makes tensors; ``bounds`` are the released ones, in the order of `columns_to_release`."""
        names = self.columns_to_release
        if len(bounds) != len(names):
            raise InputError(
                f"bounds of {len(names)} columns must be released first ({listed(names)}), found {len(bounds)}"
            )
        released = dict(zip(names, bounds, strict=True))
        columns: list[Column] = [
            NumericColumn(column, released[column], Origin.RELEASED)
            if isinstance(column, str)
            else column
            for column in self.columns
        ]
        return TablePreprocessing(tuple(columns), self.target)

    def encode(self, bounds: Sequence[Bounds] = ()) -> EncodedRecords:
        """Tensors."""
        preprocessing = self.preprocessing(bounds)
        features = preprocessing.encode_features(self.table)
        return EncodedRecords(features, self.targets, preprocessing, self.user_ids)

    @property
    def private_notes(self) -> tuple[str, ...]:
        """Signs that a declaration does not fit the data. They tell about it: for the operator's terminal only."""
        absent, outside = np.zeros((2, len(self.columns)), dtype=np.int64)
        for block in self.table.blocks():
            for place, column in enumerate(self.columns):
                name = column if isinstance(column, str) else column.name
                if isinstance(column, CategoricalColumn):
                    places = column.places(block.text(name))
                    absent[place] += (places == len(column.categories)).sum()
                    continue
                values = block.number(name)
                absent[place] += np.isnan(values).sum()
                if isinstance(column, NumericColumn):
                    low, high = column.bounds
                    outside[place] += ((values < low) | (values > high)).sum()
        notes, rows = [], len(self)
        for column, lacking, beyond in zip(self.columns, absent, outside, strict=True):
            of_text = isinstance(column, CategoricalColumn)
            name = column if isinstance(column, str) else column.name
            odd, what = (
                lacking,
                "missing or none of its categories" if of_text else "empty or not a number",
            )
            if 2 * lacking < rows and not of_text:
                odd, what = beyond, "outside its bounds"
            if 2 * odd >= rows:
                notes.append(f"column {name!r}: {odd:,} of {rows:,} values are {what}")
        return tuple(notes)


def open_table(
    path: Path,
    schema: Schema,
    release_scale: bool,
    delimiter: str | None,
    *,
    anew: bool = False,
) -> RawTable:
    """Read a table and hold it against what was declared; ``anew``: without what was kept of it in a cache."""
    header = _open_file(path, delimiter)
    _check_declared(path, header, schema)
    target = schema.target or ""
    feature_names = [
        name
        for name in header.names
        if name not in (target, schema.user_column) and name not in schema.drop
    ]
    if not feature_names:
        raise InputError(f"{path}: no column is left beside the target {target!r}")
    for name in feature_names:
        if not (release_scale or name in schema.bounds or name in schema.categories):
            raise InputError(
                f"{path}: nothing is known about column {name!r}. Declare it (--bounds {name}=LOW:HIGH or "
                f"--categories {name}=A,B,C), or pay for a private release of its bounds (--release-scale), or confirm "
                f"that its categories are public (--categories {name}={FROM_DATA}), or leave it out (--drop {name})"
            )
    classes = classes_of_target(path, schema, target)
    texts = [name for name in feature_names if name in schema.categories]
    numbers = [name for name in feature_names if name not in schema.categories]
    (numbers if classes is None else texts).append(target)
    if schema.user_column is not None:
        texts.append(schema.user_column)
    if isinstance(header, ColumnarFile) and schema.user_column is not None:
        header.refuse_inexact_users(schema.user_column)
    whole = [name for name in (target, schema.user_column) if name is not None]
    table = _read(path, header, numbers, texts, whole, anew=anew)
    learnt: Target
    if classes is None:
        learnt = NumberTarget(target, schema.bounds[target])
    else:
        learnt = class_target(target, classes, list(table.values(target)))
    return RawTable(
        table=table,
        columns=tuple(_column(table, schema, name) for name in feature_names),
        target=learnt,
        targets=encode_table_targets(learnt, table),
        user_ids=None if schema.user_column is None else _users(table, schema.user_column),
    )


def _open_file(path: Path, delimiter: str | None) -> CsvHeader | ColumnarFile:
    if not is_columnar(path):
        return read_header(path, delimiter)
    if delimiter is not None:
        raise InputError(
            f"{path}: a delimiter stands between the cells of text; this file has none"
        )
    return open_columnar(path)


def _read(
    path: Path,
    header: CsvHeader | ColumnarFile,
    numbers: Sequence[str],
    texts: Sequence[str],
    whole: Sequence[str],
    *,
    anew: bool = False,
) -> AnyTable:
    """Columns of a file; those of text in memory, others too if they fit."""
    if isinstance(header, CsvHeader):
        return read_table(path, header, numbers=numbers, texts=texts)
    header.refuse_unfit(numbers, texts)
    return read_columns(header, numbers=numbers, texts=texts, whole=whole, anew=anew)


def _check_declared(path: Path, header: CsvHeader | ColumnarFile, schema: Schema) -> None:
    if schema.target is None:
        raise InputError(
            f"{path}: which column is to be learnt? Give --target one of {listed(header.names)}"
        )
    roles = {
        "--target": [schema.target],
        "--user-column": [] if schema.user_column is None else [schema.user_column],
        "--drop": schema.drop,
        "--bounds": schema.bounds,
        "--categories": schema.categories,
    }
    for flag, names in roles.items():
        for name in names:
            if name not in header.names:
                raise InputError(
                    f"{path} has no column {name!r} ({flag}); its columns are {listed(header.names)}"
                )
    for needed in (schema.target, schema.user_column):
        if needed is not None and needed in schema.drop:
            raise InputError(f"column {needed!r} is needed, and --drop leaves it out")
    if schema.user_column is not None and schema.user_column in (
        schema.target,
        *schema.bounds,
        *schema.categories,
    ):
        raise InputError(
            f"column {schema.user_column!r} says who the user is: it can be nothing else"
        )


def _column(table: AnyTable, schema: Schema, name: str) -> Column | str:
    if name in schema.bounds:
        return NumericColumn(name, schema.bounds[name])
    if name not in schema.categories:
        return name
    categories = schema.categories[name]
    if categories == FROM_DATA:
        found = distinct_names(list(table.values(name)))
        check_few(name, "categories", found)
        return CategoricalColumn(name, found, Origin.CONFIRMED)
    return CategoricalColumn(name, tuple(categories))


def _users(table: AnyTable, column: str) -> NDArray[np.int64]:
    """Whose every row is, users numbered from 0 in order of first appearance."""
    users = table.text(column)
    nameless = [code for code, value in enumerate(users.values) if names_no_user(value)]
    if nameless:
        bad = np.flatnonzero(np.isin(users.codes, nameless))
        raise InputError(
            f"{len(bad):,} of {len(table):,} rows have no user in {column!r}, the first is "
            f"{table.where(int(bad[0]))}: whose they are decides what is protected; remove them or name the user"
        )
    if rounded := [value for value in users.values if may_be_rounded(value)]:
        raise InputError(
            f"{table.source}: users in {column!r} such as {shown(rounded[0])} were cut short by a program: several "
            "people may have the same. Write the ids as text, in full"
        )
    return users.codes


def read_table_again(
    path: Path,
    preprocessing: TablePreprocessing,
    delimiter: str | None,
    *,
    with_target: bool,
) -> AnyTable:
    """The columns that a preprocessing needs, of another file."""
    header = _open_file(path, delimiter)
    numbers, texts = list(preprocessing.number_columns), list(preprocessing.text_columns)
    target = preprocessing.target
    if with_target:
        (texts if isinstance(target, ClassTarget) else numbers).append(target.name)
    lacking = [name for name in numbers + texts if name not in header.names]
    if lacking:
        raise InputError(
            f"{path} has no column {listed(lacking)}, which is needed; its columns are {listed(header.names)}"
        )
    return _read(path, header, numbers, texts, [target.name] if with_target else [])
