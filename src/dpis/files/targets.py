"""What a model learns to say: one of a set of classes, or a number between bounds.

Both are values that travel with the model: labels become tensors by them, and outputs become answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dpis.errors import InputError
from dpis.files.schema import (
    FROM_DATA,
    Names,
    Schema,
    canonical,
    checked_bounds,
    checked_names,
    is_missing,
    listed,
    shown,
)
from dpis.files.table import TextColumn

Task = Literal["classification", "regression"]

MOST_FROM_DATA = 1_000
"""More categories than this in one column are hardly categories: an id, a date, free text."""


class Origin(StrEnum):
    """Where a number or a set of names comes from: what makes it fit to be published with a model."""

    DECLARED = "declared"
    """Known before the data was read."""

    RELEASED = "released"
    """A noisy statistic, charged to the privacy budget."""

    CONFIRMED = "confirmed"
    """Read from the data, after the user confirmed that it is public."""


class Stored:
    """A value that travels with the model: a JSON object with its fields."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # type: ignore[call-overload]
        return plain


S = TypeVar("S", bound=Stored)


def part_from_json(what: str, kinds: Sequence[type[S]], data: object) -> S:
    """The inverse of `Stored.to_json`: one of these kinds, which are told apart by the names of their fields."""
    for kind in kinds:
        names = {one.name for one in fields(kind)}  # type: ignore[arg-type]
        if isinstance(data, Mapping) and data.keys() == names and isinstance(data["name"], str):
            lists = {name: tuple(v) for name, v in data.items() if isinstance(v, list)}
            return kind(**{**data, **lists})
    raise InputError(f"not the preprocessing of a {what}: {shown(data)}")


def distinct_names(values: list[str]) -> tuple[str, ...]:
    """The names among the values of a column, without missing words, in an order that no record decides."""
    names = {value for value in values if not is_missing(value)}
    try:
        return tuple(sorted(names, key=lambda name: (float(name), name)))
    except ValueError:
        return tuple(sorted(names))


Bounds = tuple[float, float]


def unit_scaled(values: NDArray[np.float64], bounds: Bounds) -> NDArray[np.float64]:
    """``[low, high] -> [-1, 1]``, values outside clipped; NaN stays NaN."""
    low, high = bounds
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    clipped = np.clip(values, low, high)
    return np.clip((clipped - middle) / half, -1.0, 1.0)


@dataclass(frozen=True, slots=True)
class ClassTarget(Stored):
    """One of ``classes``; a label is the place of its class."""

    name: str
    classes: tuple[str, ...]
    origin: Origin = Origin.DECLARED

    def __post_init__(self) -> None:
        checked_names(f"classes of {self.name!r}", self.classes, least=2)
        object.__setattr__(self, "origin", origin_of(self.origin))

    @property
    def task(self) -> Task:
        """Classification."""
        return "classification"

    def of_text(self, column: TextColumn, where: Callable[[int], str]) -> torch.Tensor:
        """Labels of a column of text. ``where`` says in which line or place a record is, for errors."""
        places = {canonical(name): place for place, name in enumerate(self.classes)}
        by_code = np.array([places.get(value, -1) for value in column.values], dtype=np.int64)
        labels = by_code[column.codes]
        return self._known(labels, where, lambda record: column.values[column.codes[record]])

    def of_array(self, values: NDArray[np.generic], where: Callable[[int], str]) -> torch.Tensor:
        """Labels of an array: text and whole numbers by name; whole numbers by place where the classes have words."""
        if values.dtype.kind == "U":
            names, codes = np.unique(values, return_inverse=True)
            column = TextColumn(tuple(canonical(str(name)) for name in names), codes)
            return self.of_text(column, where)
        whole = _whole_numbers(self.name, values)
        try:
            names = np.array([int(canonical(name)) for name in self.classes], dtype=np.int64)
        except (ValueError, OverflowError):
            names = np.arange(len(self.classes))
        order = np.argsort(names)
        places = np.clip(np.searchsorted(names[order], whole), 0, len(names) - 1)
        labels = np.where(names[order][places] == whole, order[places], -1)
        return self._known(labels, where, lambda record: values[record].item())

    def decode(self, outputs: torch.Tensor) -> list[str]:
        """The class with the largest output, for every record."""
        if outputs.ndim != 2 or outputs.shape[1] != len(self.classes):
            raise InputError(
                f"outputs must have {len(self.classes)} columns, one a class, found shape {tuple(outputs.shape)}"
            )
        return [self.classes[place] for place in outputs.argmax(dim=1).tolist()]

    def _known(
        self,
        labels: NDArray[np.int64],
        where: Callable[[int], str],
        value: Callable[[int], object],
    ) -> torch.Tensor:
        unknown = np.flatnonzero(labels < 0)
        if len(unknown):
            first = int(unknown[0])
            raise InputError(
                f"{_records(len(unknown))} a target {self.name!r} that is none of the {len(self.classes)} classes "
                f"({listed(self.classes, 5)}): the first is {shown(value(first))} in {where(first)}; declare "
                "every class, or remove the records without one"
            )
        return torch.from_numpy(labels)


@dataclass(frozen=True, slots=True)
class NumberTarget(Stored):
    """A number between declared bounds, which a model sees as ``[-1, 1]``. Values outside are clipped."""

    name: str
    bounds: Bounds

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", checked_bounds(self.name, self.bounds))

    @property
    def task(self) -> Task:
        """Regression."""
        return "regression"

    def of_numbers(self, values: NDArray[np.float64], where: Callable[[int], str]) -> torch.Tensor:
        """Scaled targets, float32 of shape ``[N]``."""
        missing = np.flatnonzero(np.isnan(values))
        if len(missing):
            raise InputError(
                f"{_records(len(missing))} no number as target {self.name!r}: the first is in "
                f"{where(int(missing[0]))}; remove them or fill them in before"
            )
        return torch.from_numpy(unit_scaled(values, self.bounds).astype(np.float32))

    def decode(self, outputs: torch.Tensor) -> list[float]:
        """Outputs in the units of the data, clipped to the bounds (where every true value counts as lying)."""
        values = outputs.detach().to(torch.float64)
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim != 1:
            raise InputError(
                f"outputs must be one number a record, found shape {tuple(outputs.shape)}"
            )
        low, high = self.bounds
        middle, half = low / 2 + high / 2, high / 2 - low / 2
        numbers: list[float] = (middle + half * values).clamp(low, high).tolist()
        return numbers


Target = ClassTarget | NumberTarget


def classes_of_target(path: Path, schema: Schema, target: str) -> Names | None:
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


def class_target(name: str, classes: Names, values: list[str]) -> ClassTarget:
    """The target with the declared classes, or, where the user confirmed that they are public, with those found."""
    if classes == FROM_DATA:
        found = distinct_names([canonical(value) for value in values])
        check_few(name, "classes", found)
        if len(found) < 2:
            raise InputError(f"the target {name!r} has one class only: there is nothing to learn")
        return ClassTarget(name, found, Origin.CONFIRMED)
    return ClassTarget(name, tuple(classes))


def check_few(name: str, what: str, found: Sequence[str]) -> None:
    """Refuse a column of ids, dates or free text that is to be read as names."""
    if len(found) > MOST_FROM_DATA:
        raise InputError(
            f"column {name!r} has {len(found):,} distinct values, and at most {MOST_FROM_DATA:,} can be read as "
            f"{what}: declare those that matter, or drop the column"
        )


def origin_of(value: object) -> Origin:
    """An `Origin` by its word."""
    try:
        return Origin(str(value))
    except ValueError:
        raise InputError(f"an origin is one of {', '.join(Origin)}, found {shown(value)}") from None


def _records(count: int) -> str:
    return f"{count:,} record has" if count == 1 else f"{count:,} records have"


def _whole_numbers(name: str, values: NDArray[np.generic]) -> NDArray[np.int64]:
    if values.dtype.kind not in "buif":
        raise InputError(
            f"labels {name!r} must be whole numbers or text, found the type {values.dtype}"
        )
    if values.dtype.kind == "f":
        plain = values.astype(np.float64)
        odd = np.flatnonzero(~(np.abs(plain) < 2**53) | (plain != np.round(plain)))
        if len(odd):
            raise InputError(
                f"{_records(len(odd))} a label {name!r} that is not a whole number, such as "
                f"{shown(plain[odd[0]].item())}: for regression declare bounds of {name!r} instead of classes"
            )
    if values.dtype.kind == "u" and values.dtype.itemsize == 8:
        values = np.minimum(values, np.uint64(2**63 - 1))  # no class has such a number
    whole: NDArray[np.int64] = values.astype(np.int64)
    return whole
