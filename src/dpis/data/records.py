"""From a user's file to tensors: one door for tables and arrays.

`open_records` reads a file and holds it against what was declared. What it returns knows which bounds must still be
released; the caller draws the noise, records the event, and `encode` makes tensors with the result. The preprocessing
that did it is a value in the result: `encode_evaluation` and `encode_features` use it on other files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dpis.data.arrays import TARGET_NAMES, Arrays, read_arrays
from dpis.data.preprocessing import (
    ArrayPreprocessing,
    CategoricalColumn,
    Column,
    FilePreprocessing,
    NumericColumn,
    TablePreprocessing,
    confirmed_public,
    encode_table_targets,
)
from dpis.data.scaling import bucket_counts
from dpis.data.schema import FROM_DATA, Names, Schema, canonical, is_missing, listed
from dpis.data.tables import Header, Table, read_header, read_table
from dpis.data.targets import ClassTarget, NumberTarget, Origin, Target, Task, distinct_names
from dpis.errors import InputError

TABLE_SUFFIXES = (".csv", ".tsv", ".txt")
ARRAY_SUFFIXES = (".npz", ".pt", ".pth")

MOST_FROM_DATA = 1_000
"""More categories than this in one column are hardly categories: an id, a date, free text."""


@dataclass(frozen=True, slots=True)
class EncodedRecords:
    """Records as tensors, with the preprocessing that made them."""

    features: torch.Tensor
    """float32, ``[N, ...]``."""

    targets: torch.Tensor
    """int64 labels or float32 numbers in ``[-1, 1]``, ``[N]``."""

    preprocessing: FilePreprocessing
    user_ids: NDArray[np.int64] | None
    """``[N]``, users numbered from 0 in order of first appearance."""

    @property
    def task(self) -> Task:
        """Classification or regression."""
        return self.preprocessing.target.task

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Their names, in the order of labels and outputs."""
        target = self.preprocessing.target
        return target.classes if isinstance(target, ClassTarget) else None

    @property
    def public_by_confirmation(self) -> tuple[str, ...]:
        """What was read from the data on the user's word that it is public; a summary must say so."""
        columns = getattr(self.preprocessing, "columns", ())
        return confirmed_public(columns, self.preprocessing.target)


@dataclass(frozen=True, slots=True)
class RawTable:
    """A table that was read, before any private release."""

    table: Table
    columns: tuple[NumericColumn | CategoricalColumn | str, ...]
    """In the order of the file; a bare name is a column whose bounds must be released."""

    target: Target
    targets: torch.Tensor
    """Encoded when the file is opened, so that a label without a class is found before anything is spent."""

    user_ids: NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(self.table)

    @property
    def task(self) -> Task:
        """Classification or regression."""
        return self.target.task

    @property
    def image_shape(self) -> None:
        """The rows of a table are no images."""

    @property
    def columns_to_release(self) -> tuple[str, ...]:
        """Numeric columns without declared bounds."""
        return tuple(column for column in self.columns if isinstance(column, str))

    def bucket_counts(self, rows: NDArray[np.int64] | None = None) -> torch.Tensor:
        """Exact counts of `columns_to_release` over ``rows`` (those trained on), by user where there are users.

        Private until noise is added: see `dpis.data.scaling`.
        """
        chosen = np.arange(len(self)) if rows is None else rows
        users = None if self.user_ids is None else self.user_ids[chosen]
        return bucket_counts(
            [self.table.numbers[n][chosen] for n in self.columns_to_release], users
        )

    def encode(self, bounds: Sequence[tuple[float, float]] = ()) -> EncodedRecords:
        """Tensors; ``bounds`` are the released ones, in the order of `columns_to_release`."""
        names = self.columns_to_release
        if len(bounds) != len(names):
            raise InputError(
                f"bounds of {len(names)} columns must be released first ({listed(names)}), found {len(bounds)}"
            )
        released = dict(zip(names, bounds, strict=True))
        columns: list[Column] = [
            NumericColumn(column, *released[column], Origin.RELEASED)
            if isinstance(column, str)
            else column
            for column in self.columns
        ]
        preprocessing = TablePreprocessing(tuple(columns), self.target)
        features = preprocessing.encode_features(self.table)
        return EncodedRecords(features, self.targets, preprocessing, self.user_ids)

    @property
    def private_notes(self) -> tuple[str, ...]:
        """Signs that a declaration does not fit the data. They tell about it: for the operator's terminal only."""
        notes = []
        for column in self.columns:
            name = column if isinstance(column, str) else column.name
            if isinstance(column, CategoricalColumn):
                places = column.places(self.table.texts[name])
                odd, what = places == len(column.categories), "missing or none of its categories"
            else:
                values = self.table.numbers[name]
                odd, what = np.isnan(values), "empty or not a number"
                if isinstance(column, NumericColumn) and 2 * odd.sum() < len(odd):
                    odd, what = (values < column.low) | (values > column.high), "outside its bounds"
            if 2 * odd.sum() >= len(odd):
                notes.append(f"column {name!r}: {odd.sum():,} of {len(odd):,} values are {what}")
        return tuple(notes)


@dataclass(frozen=True, slots=True)
class RawArrays:
    """Arrays that were read. They never need a release: features are taken as they are."""

    encoded: EncodedRecords

    def __len__(self) -> int:
        return len(self.encoded.targets)

    @property
    def task(self) -> Task:
        """Classification or regression."""
        return self.encoded.task

    @property
    def user_ids(self) -> NDArray[np.int64] | None:
        """``[N]``, users numbered from 0 in order of first appearance."""
        return self.encoded.user_ids

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """The shape of a record, if it can be an image."""
        shape = tuple(self.encoded.features.shape[1:])
        return shape if len(shape) in (2, 3) else None

    @property
    def columns_to_release(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def private_notes(self) -> tuple[str, ...]:
        """None."""
        return ()

    def bucket_counts(self, rows: NDArray[np.int64] | None = None) -> torch.Tensor:
        """No columns, no counts."""
        return bucket_counts([])

    def encode(self, bounds: Sequence[tuple[float, float]] = ()) -> EncodedRecords:
        """Tensors."""
        if len(bounds):
            raise InputError(f"arrays need no bounds, found {len(bounds)}")
        return self.encoded


RawRecords = RawTable | RawArrays


def open_records(
    path: str | Path,
    *,
    schema: Schema | None = None,
    target: str | None = None,
    user_column: str | None = None,
    release_scale: bool = False,
    delimiter: str | None = None,
) -> RawRecords:
    """Read a file and hold it against what was declared.

    Args:
        path: a ``.csv`` table or ``.npz`` / ``.pt`` arrays.
        schema: what is declared about the columns and the target.
        target: the target column; wins over the schema's.
        user_column: the column that says whose a row is; wins over the schema's.
        release_scale: undeclared columns are numeric, their bounds to be released.
        delimiter: of a table; otherwise the header tells.

    Raises:
        InputError: a file that cannot be read, a column that nothing was said about, labels without a class.
    """
    path, schema = Path(path), schema or Schema()
    schema = replace(
        schema,
        target=schema.target if target is None else target,
        user_column=schema.user_column if user_column is None else user_column,
    )
    if _is_table(path):
        return _open_table(path, schema, release_scale, delimiter)
    return _open_arrays(path, schema, release_scale, delimiter)


def encode_evaluation(
    path: str | Path,
    preprocessing: FilePreprocessing,
    *,
    user_column: str | None = None,
    delimiter: str | None = None,
) -> EncodedRecords:
    """Records of another file, with targets, prepared exactly as those a model was trained on."""
    path = Path(path)
    if isinstance(preprocessing, TablePreprocessing):
        table = _read_again(path, preprocessing, True, user_column, delimiter)
        users = None if user_column is None else _table_users(table, user_column)
        return EncodedRecords(*preprocessing.encode(table), preprocessing, users)
    arrays = _read_arrays_again(path, preprocessing, True, user_column)
    return EncodedRecords(*preprocessing.encode(arrays), preprocessing, arrays.user_ids)


def encode_features(
    path: str | Path, preprocessing: FilePreprocessing, *, delimiter: str | None = None
) -> torch.Tensor:
    """Features of another file, to predict from; targets and further columns are ignored, if there are any."""
    path = Path(path)
    if isinstance(preprocessing, TablePreprocessing):
        return preprocessing.encode_features(
            _read_again(path, preprocessing, False, None, delimiter)
        )
    return preprocessing.encode_features(_read_arrays_again(path, preprocessing, False, None))


def _is_table(path: Path) -> bool:
    suffix = path.suffix.lower()
    if suffix not in TABLE_SUFFIXES + ARRAY_SUFFIXES:
        raise InputError(
            f"{path}: a file of records is one of {' '.join(TABLE_SUFFIXES + ARRAY_SUFFIXES)}, found {suffix!r}"
        )
    if not path.exists():
        raise InputError(f"there is no file {path}: check the name")
    return suffix in TABLE_SUFFIXES


# Tables


def _open_table(path: Path, schema: Schema, release_scale: bool, delimiter: str | None) -> RawTable:
    header = read_header(path, delimiter)
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
    classes = _classes_of_target(path, schema, target)
    texts = [name for name in feature_names if name in schema.categories]
    numbers = [name for name in feature_names if name not in schema.categories]
    (numbers if classes is None else texts).append(target)
    if schema.user_column is not None:
        texts.append(schema.user_column)
    table = read_table(path, header, numbers=numbers, texts=texts)
    learnt: Target
    if classes is None:
        learnt = NumberTarget(target, *schema.bounds[target])
    else:
        learnt = _class_target(target, classes, list(table.texts[target].values))
    return RawTable(
        table=table,
        columns=tuple(_column(table, schema, name) for name in feature_names),
        target=learnt,
        targets=encode_table_targets(learnt, table),
        user_ids=None if schema.user_column is None else _table_users(table, schema.user_column),
    )


def _check_declared(path: Path, header: Header, schema: Schema) -> None:
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


def _classes_of_target(path: Path, schema: Schema, target: str) -> Names | None:
    """The classes, or None for a regression whose bounds are declared."""
    classes = schema.classes
    if target in schema.categories:
        if classes is not None and classes != schema.categories[target]:
            raise InputError(f"classes and categories of the target {target!r} differ: keep one")
        classes = schema.categories[target]
    if classes is not None and target in schema.bounds:
        raise InputError(
            f"the target {target!r} has classes and bounds: classes are for classification, bounds for regression"
        )
    if classes is None and target not in schema.bounds:
        raise InputError(
            f"{path}: nothing is known about the target {target!r}. To classify, declare its classes (--classes "
            f"A,B,C, or --classes 10 for 0 to 9) or confirm that they are public (--classes {FROM_DATA}); for a "
            f"regression declare its bounds (--bounds {target}=LOW:HIGH)"
        )
    return classes


def _class_target(name: str, classes: Names, values: list[str]) -> ClassTarget:
    if classes == FROM_DATA:
        found = distinct_names([canonical(value) for value in values])
        _check_few(name, "classes", found)
        if len(found) < 2:
            raise InputError(f"the target {name!r} has one class only: there is nothing to learn")
        return ClassTarget(name, found, Origin.CONFIRMED)
    return ClassTarget(name, tuple(classes))


def _column(table: Table, schema: Schema, name: str) -> NumericColumn | CategoricalColumn | str:
    if name in schema.bounds:
        return NumericColumn(name, *schema.bounds[name])
    if name not in schema.categories:
        return name
    categories = schema.categories[name]
    if categories == FROM_DATA:
        found = distinct_names(list(table.texts[name].values))
        _check_few(name, "categories", found)
        return CategoricalColumn(name, found, Origin.CONFIRMED)
    return CategoricalColumn(name, tuple(categories))


def _check_few(name: str, what: str, found: Sequence[str]) -> None:
    if len(found) > MOST_FROM_DATA:
        raise InputError(
            f"column {name!r} has {len(found):,} distinct values, and at most {MOST_FROM_DATA:,} can be read as "
            f"{what}: declare those that matter, or drop the column"
        )


def _table_users(table: Table, column: str) -> NDArray[np.int64]:
    users = table.texts[column]
    nameless = [code for code, value in enumerate(users.values) if is_missing(value)]
    if nameless:
        bad = np.flatnonzero(np.isin(users.codes, nameless))
        raise InputError(
            f"{table.source}: {len(bad):,} of {len(table):,} rows have no user in {column!r}, the first on line "
            f"{table.lines[bad[0]]}: whose they are decides what is protected; remove them or name the user"
        )
    return users.codes


def _read_again(
    path: Path,
    preprocessing: TablePreprocessing,
    with_target: bool,
    user_column: str | None,
    delimiter: str | None,
) -> Table:
    if not _is_table(path):
        raise InputError(f"{path}: the model was trained on a table, so a table is needed (.csv)")
    header = read_header(path, delimiter)
    numbers, texts = list(preprocessing.number_columns), list(preprocessing.text_columns)
    target = preprocessing.target
    if with_target:
        (texts if isinstance(target, ClassTarget) else numbers).append(target.name)
    if user_column is not None:
        texts.append(user_column)
    lacking = [name for name in numbers + texts if name not in header.names]
    if lacking:
        raise InputError(
            f"{path} has no column {listed(lacking)}, which is needed; its columns are {listed(header.names)}"
        )
    return read_table(path, header, numbers=numbers, texts=texts)


# Arrays


def _open_arrays(
    path: Path, schema: Schema, release_scale: bool, delimiter: str | None
) -> RawArrays:
    arrays = read_arrays(path, target=schema.target, user_column=schema.user_column)
    if arrays.user_ids is not None and schema.user_column is None:
        raise InputError(
            f"{path} holds user_ids, and what is to be protected was not said: users with all of their rows "
            "(--user-column user_ids), or rows (remove the array)"
        )
    name = arrays.target_name
    targets = arrays.required_targets()
    misplaced = [column for column in (*schema.bounds, *schema.categories) if column != name]
    if misplaced or schema.drop or release_scale or delimiter is not None:
        raise InputError(
            f"{path}: columns, scales and delimiters are declared for tables; the features of arrays are taken as they "
            f"are (uint8 divided by 255). Only classes or bounds of the target {name!r} can be declared"
        )
    classes = _classes_of_target(path, schema, name)
    values = [] if classes != FROM_DATA else [str(v) for v in np.unique(targets).tolist()]
    preprocessing = ArrayPreprocessing(
        record_shape=arrays.features.shape[1:],
        divide_by_255=arrays.features.dtype == np.uint8,
        target=NumberTarget(name, *schema.bounds[name])
        if classes is None
        else _class_target(name, classes, values),
    )
    made = preprocessing.encode(arrays)
    return RawArrays(EncodedRecords(*made, preprocessing, arrays.user_ids))


def _read_arrays_again(
    path: Path, preprocessing: ArrayPreprocessing, with_target: bool, user_column: str | None
) -> Arrays:
    if _is_table(path):
        raise InputError(
            f"{path}: the model was trained on arrays, so arrays are needed (.npz, .pt)"
        )
    name = preprocessing.target.name
    own_name = with_target and name.lower() not in TARGET_NAMES  # those are found by themselves
    return read_arrays(path, target=name if own_name else None, user_column=user_column)
