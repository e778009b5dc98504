"""What a user declares about a file before it is read: bounds, categories, classes.

Whatever is learnt from the data itself costs privacy (rule 17 of docs/guarantees.md). So a schema comes from
outside knowledge; the words ``from-data`` are the user's confirmation that a set of values is public anyway.
"""

from __future__ import annotations

import csv
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from dpis.errors import InputError

FROM_DATA: Final = "from-data"
"""The user confirms that this set of values is public, so it may be read from the data."""

MISSING_WORDS: Final = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "null", "?"})
"""Words that mean "no value" in any column, in small or capital letters."""

MOST_NAMES: Final = 100_000
LARGEST_BOUND: Final = 1e300

Names = tuple[str, ...] | Literal["from-data"]

T = TypeVar("T")

_WHOLE_WITH_POINT = re.compile(r"[+-]?\d+\.0*")


def canonical(text: str) -> str:
    """The form in which names are compared: no spaces at the ends, and ``3.0`` is ``3``.

    Tools that hold a column of labels with gaps as floats write every label with a point.

    >>> canonical(" 3.0 "), canonical("red "), canonical("007")
    ('3', 'red', '007')
    """
    text = text.strip()
    return text.partition(".")[0] if _WHOLE_WITH_POINT.fullmatch(text) else text


def is_missing(text: str) -> bool:
    """Whether a cell says that there is no value."""
    return text.strip().lower() in MISSING_WORDS


def shown(value: object, most: int = 40) -> str:
    """A value for an error message: on one line, and not a page of it."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names for an error message."""
    names = [name if len(name) <= 40 else name[:37] + "..." for name in names]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(" ".join(name.split()) for name in names[:most]) + more) or "none"


def checked_bounds(name: str, bounds: object) -> tuple[float, float]:
    """``low < high``, both finite and not so large that their distance overflows."""
    pair = tuple(bounds) if isinstance(bounds, list | tuple) else ()
    numbers = [type(end) in (int, float) and abs(end) <= LARGEST_BOUND for end in pair]
    if numbers != [True, True] or not float(pair[1]) / 2 - float(pair[0]) / 2 > 0:
        raise InputError(
            f"bounds of {name!r} must be two finite numbers, the lower one first, found {shown(bounds)}"
        )
    return float(pair[0]), float(pair[1])


def checked_names(what: str, names: object, least: int = 1) -> Names:
    """Distinct names, at least ``least`` of them, or the words ``from-data``."""
    if names == FROM_DATA:
        return FROM_DATA
    if not isinstance(names, list | tuple):
        raise InputError(f"{what} must be a list of names or {FROM_DATA!r}, found {shown(names)}")
    texts = tuple(_name_of(what, name) for name in names)
    if not least <= len(texts) <= MOST_NAMES:
        raise InputError(f"{what}: from {least} to {MOST_NAMES:,} are needed, found {len(texts)}")
    seen: set[str] = set()
    for text in texts:
        key = canonical(text)
        if is_missing(text) and not text.strip():
            raise InputError(f"{what}: an empty name stands for a missing value, leave it out")
        if key in seen:
            raise InputError(f"{what}: {shown(text)} is there twice")
        seen.add(key)
    return texts


def _name_of(what: str, name: object) -> str:
    if isinstance(name, bool) or not isinstance(name, str | int | float):
        raise InputError(f"{what} must be text or numbers, found {shown(name)}")
    return canonical(str(name))


def numbered_classes(count: int) -> tuple[str, ...]:
    """``"0"`` to ``str(count - 1)``."""
    if isinstance(count, bool) or not 2 <= count <= MOST_NAMES:
        raise InputError(f"classes: from 2 to {MOST_NAMES:,} are needed, found {count}")
    return tuple(map(str, range(count)))


@dataclass(frozen=True, slots=True)
class Schema:
    """What is declared about a file. A column with bounds is numeric, one with categories is categorical.

    ``classes`` (classification) and bounds of the target (regression) decide the task. Nothing here is guessed
    from the data: a guess looks at it.
    """

    target: str | None = None
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    categories: Mapping[str, Names] = field(default_factory=dict)
    classes: Names | None = None
    drop: tuple[str, ...] = ()
    user_column: str | None = None

    def __post_init__(self) -> None:
        for name in (self.target, self.user_column, *self.drop):
            if name is not None and (not isinstance(name, str) or not name):
                raise InputError(f"the name of a column must be text, found {shown(name)}")
        bounds = {name: checked_bounds(name, pair) for name, pair in self.bounds.items()}
        categories = {
            name: checked_names(f"categories of {name!r}", names)
            for name, names in self.categories.items()
        }
        classes = self.classes
        if classes is not None:
            classes = checked_names("classes", classes, least=2)
        for name in bounds:
            if name in categories:
                raise InputError(
                    f"column {name!r} has bounds and categories: it is either a number or a category, keep one"
                )
        object.__setattr__(self, "bounds", bounds)
        object.__setattr__(self, "categories", categories)
        object.__setattr__(self, "classes", classes)

    @classmethod
    def from_flags(
        cls,
        *,
        target: str | None = None,
        bounds: Sequence[str] = (),
        categories: Sequence[str] = (),
        classes: str | None = None,
        drop: Sequence[str] = (),
        user_column: str | None = None,
    ) -> Schema:
        """From the words of a command line.

        >>> Schema.from_flags(bounds=["age=0:120"], categories=["colour=red,green"], classes="3").classes
        ('0', '1', '2')
        """
        return cls(
            target=target,
            bounds=_once("bounds", map(_bounds_flag, bounds)),
            categories=_once("categories", map(_categories_flag, categories)),
            classes=None if classes is None else _classes_flag(classes),
            drop=tuple(drop),
            user_column=user_column,
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Schema:
        """From a JSON or TOML file with the flags' names as keys."""
        data = _parsed(Path(path))
        known = ("target", "bounds", "categories", "classes", "drop", "user_column")
        for key in data:
            if key not in known:
                raise InputError(
                    f"{path}: a schema has the keys {', '.join(known)}; found {shown(key)}"
                )
        bounds = _table(path, data, "bounds")
        for name, pair in bounds.items():
            if not isinstance(pair, list) or len(pair) != 2:
                raise InputError(
                    f"{path}: bounds of {name!r} must be [low, high], found {shown(pair)}"
                )
        drop = data.get("drop", [])
        if not isinstance(drop, list):
            raise InputError(f"{path}: drop must be a list of columns, found {shown(drop)}")
        classes: Any = data.get("classes")
        if isinstance(classes, int) and not isinstance(classes, bool):
            classes = numbered_classes(classes)
        try:
            return cls(
                target=data.get("target"),
                bounds={name: tuple(pair) for name, pair in bounds.items()},
                categories=_table(path, data, "categories"),
                classes=classes,
                drop=tuple(drop),
                user_column=data.get("user_column"),
            )
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def updated(self, other: Schema) -> Schema:
        """This schema with what ``other`` declares beside it; where both speak, ``other`` wins (flags over a file)."""
        bounds = {k: v for k, v in self.bounds.items() if k not in other.categories}
        categories = {k: v for k, v in self.categories.items() if k not in other.bounds}
        return replace(
            self,
            target=other.target if other.target is not None else self.target,
            bounds={**bounds, **other.bounds},
            categories={**categories, **other.categories},
            classes=other.classes if other.classes is not None else self.classes,
            drop=tuple(dict.fromkeys(self.drop + other.drop)),
            user_column=other.user_column if other.user_column is not None else self.user_column,
        )


def _once(flag: str, pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, value in pairs:
        if name in found:
            raise InputError(f"--{flag} speaks twice of {name!r}: keep one")
        found[name] = value
    return found


def _bounds_flag(text: str) -> tuple[str, tuple[float, float]]:
    name, _, pair = text.rpartition("=")
    low, _, high = pair.partition(":")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = (math.nan, math.nan)
    if not name or math.isnan(bounds[0]) or math.isnan(bounds[1]):
        raise InputError(f"--bounds must look like age=0:120, found {shown(text)}")
    return name, checked_bounds(name, bounds)


def _categories_flag(text: str) -> tuple[str, Names]:
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise InputError(
            f"--categories must look like colour=red,green,blue or colour={FROM_DATA}, found {shown(text)}"
        )
    return name, checked_names(f"categories of {name!r}", _split(value))


def _classes_flag(text: str) -> Names:
    if re.fullmatch(r"\s*\d{1,9}\s*", text):
        return numbered_classes(int(text))
    return checked_names("classes", _split(text), least=2)


def _split(text: str) -> Names:
    """Names between commas; a name with a comma inside stands between double quotes."""
    if text.strip() == FROM_DATA:
        return FROM_DATA
    return tuple(cell for row in csv.reader([text], skipinitialspace=True) for cell in row)


def _parsed(path: Path) -> dict[str, Any]:
    if path.suffix.lower() not in (".json", ".toml"):
        raise InputError(f"{path}: a schema is a .json or a .toml file")
    try:
        text = path.read_text(encoding="utf-8-sig")
        data = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except OSError as error:
        raise InputError(f"cannot read the schema {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # both parsers' errors are ValueErrors
        raise InputError(
            f"{path} is not valid {path.suffix[1:].upper()}: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: a schema is a JSON object, found {shown(data)}")
    return data


def _table(path: str | Path, data: dict[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise InputError(f"{path}: {key} must map columns to values, found {shown(value)}")
    return value
