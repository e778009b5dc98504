"""What was declared about a target, for tables and arrays alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpis.errors import InputError
from dpis.files.schema import FROM_DATA, Names, Schema, canonical
from dpis.files.targets import ClassTarget, Origin, distinct_names

MOST_FROM_DATA = 1_000
"""More categories than this in one column are hardly categories: an id, a date, free text."""


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
