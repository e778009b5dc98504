"""How records become features, as a value that is stored with the model and used again to predict.

Every rule acts on one record alone and uses public numbers only:

- a number is clipped to its bounds and scaled to ``[-1, 1]``; a missing one becomes 0, the middle, and a second
  feature says 1 for missing. That feature is always there: whether anything is missing is told by the data;
- a category becomes one 1 among zeros; a missing and an unknown one share a place of their own, the last;
- uint8 arrays (images) are divided by 255, other arrays are taken as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from dpis.errors import InputError
from dpis.files.arrays import Arrays
from dpis.files.packed_table import PackedTable
from dpis.files.schema import canonical, checked_bounds, checked_names, shown
from dpis.files.table import AnyTable, Table, TextColumn
from dpis.files.targets import (
    Bounds,
    ClassTarget,
    NumberTarget,
    Origin,
    Stored,
    Target,
    origin_of,
    part_from_json,
    unit_scaled,
)
from dpis.stored_rows import Column as FeatureColumn
from dpis.stored_rows import MappedRows, consecutive, fits_in_memory

Features = FeatureColumn
"""In memory, or on disk and made when they are asked for."""

FORMAT = "encoded 1"
"""How rows on disk become features: another number, where they would become others."""

OTHER = "missing/other"
"""The category of values that are missing or were not declared."""

LARGEST_EXACT = 2**24
"""Whole numbers up to here are exact in float32."""


@dataclass(frozen=True, slots=True)
class NumericColumn(Stored):
    """A number between bounds: two features, its scaled value and whether it is missing."""

    name: str
    bounds: Bounds
    origin: Origin = Origin.DECLARED

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", checked_bounds(self.name, self.bounds))
        object.__setattr__(self, "origin", origin_of(self.origin))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """What its features mean."""
        return self.name, f"{self.name} missing"

    def fill(self, features: NDArray[np.float32], values: NDArray[np.float64]) -> None:
        """Write the features of all records into the (zero) columns given."""
        missing = np.isnan(values)
        features[:, 0] = np.where(missing, 0.0, unit_scaled(values, self.bounds))
        features[:, 1] = missing


@dataclass(frozen=True, slots=True)
class CategoricalColumn(Stored):
    """One of ``categories``: a feature for each, and one for what is missing or none of them."""

    name: str
    categories: tuple[str, ...]
    origin: Origin = Origin.DECLARED

    def __post_init__(self) -> None:
        if self.categories:  # none at all: a column confirmed public that holds no value
            checked_names(f"categories of {self.name!r}", self.categories)
        object.__setattr__(self, "origin", origin_of(self.origin))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """What its features mean."""
        return tuple(f"{self.name}={category}" for category in (*self.categories, OTHER))

    def places(self, column: TextColumn) -> NDArray[np.int64]:
        """For every record the place of its category; the last place is for the others."""
        places = {canonical(name): place for place, name in enumerate(self.categories)}
        other = len(self.categories)
        by_code = np.array([places.get(value, other) for value in column.values], dtype=np.int64)
        return by_code[column.codes]

    def fill(self, features: NDArray[np.float32], column: TextColumn) -> None:
        """Write the features of all records into the (zero) columns given."""
        features[np.arange(len(features)), self.places(column)] = 1.0


Column = NumericColumn | CategoricalColumn
COLUMNS: tuple[type[Column], ...] = (NumericColumn, CategoricalColumn)


class _Preprocessing(Stored):
    """What every kind can do with its target."""

    kind: ClassVar[str]
    target: Target

    def decode_predictions(self, outputs: torch.Tensor) -> list[str] | list[float]:
        """A model's outputs as class names, or as numbers in the units of the target."""
        return self.target.decode(outputs)

    @property
    def public_by_confirmation(self) -> tuple[str, ...]:
        """What was read from the data on the user's word that it is public; a summary must say so."""
        target, columns = self.target, getattr(self, "columns", ())
        found = [f"categories of {c.name}" for c in columns if c.origin is Origin.CONFIRMED]
        if isinstance(target, ClassTarget) and target.origin is Origin.CONFIRMED:
            found.append(f"classes of {target.name}")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"kind": self.kind, **super().to_json()}


@dataclass(frozen=True, slots=True)
class TablePreprocessing(_Preprocessing):
    """How a table becomes features: its columns in their order, and the target."""

    kind = "table"
    columns: tuple[Column, ...]
    target: Target

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if not names or len({*names, self.target.name}) != len(names) + 1:
            raise InputError(
                f"a table needs at least one column beside its target {self.target.name!r}, each once; found {names}"
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """What each feature means, in order."""
        return tuple(name for column in self.columns for name in column.feature_names)

    @property
    def record_shape(self) -> tuple[int, ...]:
        """The shape of one record's features."""
        return (len(self.feature_names),)

    @property
    def number_columns(self) -> tuple[str, ...]:
        """Columns to read as numbers, the target left out."""
        return tuple(c.name for c in self.columns if isinstance(c, NumericColumn))

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Columns to read as text, the target left out."""
        return tuple(c.name for c in self.columns if isinstance(c, CategoricalColumn))

    def encode(self, table: AnyTable) -> tuple[Features, torch.Tensor]:
        """Features and targets."""
        return self.encode_features(table), self.encode_targets(table)

    def encode_features(self, table: AnyTable) -> Features:
        """Features alone, float32 ``[N, d]`` in ``[-1, 1]``; the table needs no target. Of one on disk, row by row."""
        if isinstance(table, PackedTable):
            return table.rows.each(
                lambda rows: self._features(table.table_of(rows.numpy())),
                json.dumps([FORMAT, table.in_rows, table.names, self.to_json()["columns"]]),
            )
        assert isinstance(table, Table)
        return self._features(table)

    def _features(self, table: Table) -> torch.Tensor:
        features = np.zeros((len(table), *self.record_shape), dtype=np.float32)
        start = 0
        for column in self.columns:
            end = start + len(column.feature_names)
            if isinstance(column, NumericColumn):
                column.fill(features[:, start:end], table.numbers[column.name])
            else:
                column.fill(features[:, start:end], table.texts[column.name])
            start = end
        return torch.from_numpy(features)

    def encode_targets(self, table: AnyTable) -> torch.Tensor:
        """Labels (int64) or scaled numbers (float32), of shape ``[N]``."""
        return encode_table_targets(self.target, table)


@dataclass(frozen=True, slots=True)
class ArrayPreprocessing(_Preprocessing):
    """How an array of records becomes features: uint8 is divided by 255, all else is taken as it is."""

    kind = "array"
    record_shape: tuple[int, ...]
    divide_by_255: bool
    target: Target

    def __post_init__(self) -> None:
        shape, divide = self.record_shape, self.divide_by_255
        if not isinstance(shape, tuple) or not all(type(n) is int and n > 0 for n in shape):
            raise InputError(
                f"the shape of a record must be whole numbers above 0, found {shown(shape)}"
            )
        if not isinstance(divide, bool):
            raise InputError(f"divide_by_255 must be true or false, found {shown(divide)}")

    def encode(self, arrays: Arrays) -> tuple[Features, torch.Tensor]:
        """Features and targets."""
        return self.encode_features(arrays), self.encode_targets(arrays)

    def encode_features(self, arrays: Arrays) -> Features:
        """Features alone, float32 ``[N, *record_shape]``. Of a large file that is mapped, row by row.

        Raises:
            InputError: another shape or type than the model was trained on, or values that are not finite.
        """
        found = arrays.features
        if found.shape[1:] != self.record_shape:
            raise InputError(
                f"{arrays.source}: records must have the shape {self.record_shape}, found {found.shape[1:]}"
            )
        if (found.dtype == np.uint8) != self.divide_by_255:
            needed = "uint8, which is divided by 255" if self.divide_by_255 else "not uint8"
            raise InputError(
                f"{arrays.source}: features must be {needed}, found {found.dtype}: convert them as the training data"
            )
        if (stored := _on_disk(arrays)) is not None:
            recipe = f"{FORMAT} {self.divide_by_255}"
            return stored.each(lambda rows: self._features(arrays.source, rows.numpy()), recipe)
        return self._features(arrays.source, found, 0)

    def look_through(self, arrays: Arrays) -> None:
        """Refuse features that cannot be used; of what is read row by row none was looked at before."""
        if (stored := _on_disk(arrays)) is not None:
            for places in consecutive(stored):
                self._features(arrays.source, stored.read(places), int(places[0]))

    def _features(
        self, source: str, found: NDArray[np.generic], before: int | None = None
    ) -> torch.Tensor:
        if self.divide_by_255:
            return torch.from_numpy(found).to(torch.float32) / 255.0
        if (
            found.dtype.kind in "ui"
            and found.size
            and max(abs(int(found.max())), abs(int(found.min()))) > LARGEST_EXACT
        ):
            raise InputError(
                f"{source}: whole numbers above {LARGEST_EXACT:,} are not exact in float32: scale the features "
                "by public numbers and store them as floats"
            )
        with np.errstate(over="ignore"):
            features = found.astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(features.reshape(len(features), -1)).all(axis=1))
        if len(bad):
            first = "" if before is None else f", the first is record {before + bad[0] + 1}"
            what = "1 record has" if len(bad) == 1 else f"{len(bad):,} records have"
            raise InputError(
                f"{source}: {what} features that are not finite in float32{first}; "
                "remove or impute them before, by a rule that looks at each record alone: that rule is part of the "
                "mechanism"
            )
        return torch.from_numpy(features)

    def encode_targets(self, arrays: Arrays) -> torch.Tensor:
        """Labels (int64) or scaled numbers (float32), of shape ``[N]``."""

        def where(record: int) -> str:
            return f"record {record + 1} of {arrays.source}"

        targets = arrays.required_targets()
        if isinstance(self.target, ClassTarget):
            return self.target.of_array(targets, where)
        if targets.dtype.kind not in "buif":
            raise InputError(
                f"{arrays.source}: targets with bounds must be numbers, found {targets.dtype}"
            )
        return self.target.of_numbers(targets.astype(np.float64), where)


def _on_disk(arrays: Arrays) -> MappedRows | None:
    """Where features lie that are read by index; None: in memory."""
    large = not fits_in_memory(4 * arrays.features.size)  # as float32
    return arrays.stored if large else None


@dataclass(frozen=True, slots=True)
class TextPreprocessing(_Preprocessing):
    """Texts as they are, and the target."""

    kind = "text"
    target: Target


FilePreprocessing = TablePreprocessing | ArrayPreprocessing
Preprocessing = FilePreprocessing | TextPreprocessing


def preprocessing_from_json(data: object) -> Preprocessing:
    """Any kind, as its ``to_json`` wrote it; a field more, less or of another type is refused."""
    for kind in (TablePreprocessing, ArrayPreprocessing, TextPreprocessing):
        names = {"kind", *(one.name for one in fields(kind))}
        if isinstance(data, Mapping) and data.keys() == names and data["kind"] == kind.kind:
            own: dict[str, Any] = {
                name: tuple(v) if isinstance(v, list) else v for name, v in data.items()
            }
            own["target"] = part_from_json("target", (ClassTarget, NumberTarget), data["target"])
            if kind is TablePreprocessing:
                columns = own["columns"] if isinstance(own["columns"], tuple) else [data["columns"]]
                own["columns"] = tuple(part_from_json("column", COLUMNS, one) for one in columns)
            del own["kind"]
            return kind(**own)
    raise InputError(f"not the preprocessing of a table, of arrays or of texts: {shown(data)}")


@dataclass(frozen=True, slots=True)
class EncodedRecords:
    """Records as tensors, with the preprocessing that made them."""

    features: Features
    """float32, ``[N, ...]``; in memory, or read by index."""

    targets: torch.Tensor
    """int64 labels or float32 numbers in ``[-1, 1]``, ``[N]``."""

    preprocessing: FilePreprocessing
    user_ids: NDArray[np.int64] | None
    """``[N]``, users numbered from 0 in order of first appearance."""


def encode_table_targets(target: Target, table: AnyTable) -> torch.Tensor:
    """Labels (int64) or scaled numbers (float32), of shape ``[N]``."""
    if isinstance(target, ClassTarget):
        return target.of_text(table.text(target.name), table.where)
    return target.of_numbers(table.number(target.name), table.where)
