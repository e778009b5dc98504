"""What a row must hold: checked once, where rows are read, so that nobody after that meets a surprise."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from dpis.errors import InputError
from reproduction.cells import TABLES
from reproduction.settings import RECORDS

Row = dict[str, Any]

_SHA256 = re.compile(r"[0-9a-f]{64}")


def _text(value: object) -> bool:
    return isinstance(value, str)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: object) -> bool:
    return _number(value) and value > 0  # type: ignore[operator]


def _share(value: object) -> bool:
    return _number(value) and 0 <= value <= 1  # type: ignore[operator]


def _object(value: object) -> bool:
    return isinstance(value, dict)


def _epochs(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(epoch, dict)
        and all(number is None or _number(number) for number in epoch.values())
        for epoch in value
    )


def _digest(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _or_null(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or holds(value)


_FIELDS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "table": (f"one of {', '.join(TABLES)}", lambda value: value in TABLES),
    "dataset": (f"one of {', '.join(RECORDS)}", lambda value: _text(value) and value in RECORDS),
    "method": ("text", _text),
    "recipe": ("text", _text),
    "epsilon": ("a number above 0, or null", _or_null(_positive)),
    "delta": ("a number above 0, or null", _or_null(_positive)),
    "seed": ("an integer", _whole),
    "test_accuracy": ("a number in 0..1, or null", _or_null(_share)),
    "accountant": ("text, or null", _or_null(_text)),
    "wall_seconds": ("a number", _number),
    "gradient_evaluations": ("an integer", _whole),
    "command": ("text", _text),
    "commit": ("text", _text),
    "claim": ("an object, or null", _or_null(_object)),
    "machine": ("text", _text),
    "options": ("an object", _object),
    "history": ("a list of objects with numbers", _epochs),
    "ledger_sha256": ("64 hexadecimal digits, or null", _or_null(_digest)),
}
"""By name: what is required, in words, and whether a value is that."""

NEEDED = tuple(_FIELDS)

_OF_PRIVATE_ROWS = ("delta", "accountant", "claim", "ledger_sha256")


def row_from_line(line: bytes, where: str) -> Row:
    """The row, if it is one; a line that is none is refused by its place.

    Args:
        line: of a file of rows.
        where: which one, for the message.
    """
    try:
        row = json.loads(line.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise InputError(f"{where}: not a row of results. Was a run interrupted while writing?")
    problem = _problem(row)
    if problem is not None:
        raise InputError(f"{where}: {problem}. Mend the line, or take it out and run the cell anew")
    return row


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _problem(row: Row) -> str | None:
    missing = [name for name in NEEDED if name not in row]
    if missing:
        return f"the row lacks {', '.join(missing)}"
    for name, (required, holds) in _FIELDS.items():
        if not holds(row[name]):
            return f"{name} must be {required}, found {_shown(row[name])}"
    private = row["epsilon"] is not None
    if private == (row["method"] == "sgd"):
        return f"epsilon is {row['epsilon']}, which does not go with the method {row['method']}"
    if private:
        absent = [name for name in _OF_PRIVATE_ROWS if row[name] is None]
        if absent:
            return f"a private row needs {', '.join(absent)}, found null"
    return None


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
