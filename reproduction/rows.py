"""What a row must hold, what it says, and what several say together. Pure functions."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dpis.errors import InputError
from dpis.options import Privacy
from reproduction.recipes import RECORDS
from reproduction.table_cells import TABLES

Row = Mapping[str, Any]
"""One line of results/*.jsonl."""


# ── what a row must hold: checked once, where rows are read ──────────────────────────────────────────


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _epochs(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(epoch, dict)
        and all(number is None or _number(number) for number in epoch.values())
        for epoch in value
    )


_TEXT = ("text", lambda value: isinstance(value, str))
_NUMBER = ("a number", _number)
_INTEGER = ("an integer", _whole)
_OBJECT = ("an object", lambda value: isinstance(value, dict))
_POSITIVE = ("a number above 0", lambda value: _number(value) and value > 0)
_SHARE = ("a number in 0..1", lambda value: _number(value) and 0 <= value <= 1)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = (
    "64 hexadecimal digits",
    lambda value: isinstance(value, str) and _SHA256.fullmatch(value) is not None,
)

Required = tuple[str, Callable[[Any], bool]]
"""What is required, in words, and whether a value is that."""


def _one_of(names: Iterable[str]) -> Required:
    known = [*names]
    return f"one of {', '.join(known)}", lambda value: value in known


def _or_null(required: Required) -> Required:
    words, holds = required
    return f"{words}, or null", lambda value: value is None or holds(value)


_FIELDS: Mapping[str, Required] = {
    "table": _one_of(TABLES),
    "dataset": _one_of(RECORDS),
    "method": _TEXT,
    "recipe": _TEXT,
    "epsilon": _or_null(_POSITIVE),
    "delta": _or_null(_POSITIVE),
    "seed": _INTEGER,
    "test_accuracy": _or_null(_SHARE),
    "accountant": _or_null(_TEXT),
    "wall_seconds": _NUMBER,
    "gradient_evaluations": _INTEGER,
    "command": _TEXT,
    "commit": _TEXT,
    "claim": _or_null(_OBJECT),
    "machine": _TEXT,
    "options": _OBJECT,
    "history": ("a list of objects with numbers", _epochs),
    "ledger_sha256": _or_null(_DIGEST),
}

NEEDED = tuple(_FIELDS)


def row_from_line(line: bytes, where: str) -> dict[str, Any]:
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
    if problem := _problem(row):
        raise InputError(f"{where}: {problem}. Mend the line, or take it out and run the cell anew")
    return row


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _problem(row: Row) -> str | None:
    if missing := [name for name in NEEDED if name not in row]:
        return f"the row lacks {', '.join(missing)}"
    for name, (required, holds) in _FIELDS.items():
        if not holds(row[name]):
            shown = json.dumps(row[name])
            shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
            return f"{name} must be {required}, found {shown}"
    private = row["epsilon"] is not None
    if private == (row["method"] == "sgd"):
        return f"epsilon is {row['epsilon']}, which does not go with the method {row['method']}"
    of_private_rows = ("delta", "accountant", "claim", "ledger_sha256")
    if private and (absent := [name for name in of_private_rows if row[name] is None]):
        return f"a private row needs {', '.join(absent)}, found null"
    return None


# ── what rows say ────────────────────────────────────────────────────────────────────────────────────

DEFAULTS = {"a_e": Privacy.reserve_share, "k": Privacy.headroom}
"""What `dpis train` takes where a row's options say nothing."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What our runs gave, in per cent."""

    mean: float
    seeds: int
    spread: float | None
    """Sample standard deviation from three seeds on, the range of two, None for one."""

    @property
    def spread_text(self) -> str:
        """With its kind."""
        if self.spread is None:
            return ""
        return f"std {self.spread:.2f}" if self.seeds >= 3 else f"range {self.spread:.2f}"

    @property
    def seeds_text(self) -> str:
        """How many."""
        return f"{self.seeds} seed{'s' * (self.seeds != 1)}"


def counted(row: Row) -> bool:
    """Whether a row may enter a mean: a test accuracy (not of a validation split), and a verified ledger if private."""
    accuracy = row.get("test_accuracy")
    return (
        (row.get("options") or {}).get("eval_share") is None
        and isinstance(accuracy, int | float)
        and 0 <= accuracy <= 1
        and (row.get("verified") is True or row.get("method") == "sgd")
    )


def select(rows: Iterable[Row], **said: object) -> list[Row]:
    """Rows that count and say this, such as ``table="table3"``."""
    return [
        row
        for row in rows
        if counted(row) and all(row.get(name) == value for name, value in said.items())
    ]


def measured(rows: Iterable[Row]) -> Measured | None:
    """Mean and spread over seeds, of one setting: that of the last row. None without rows."""
    values = [100 * float(row["test_accuracy"]) for row in of_last_setting(rows)]
    if not values:
        return None
    spread = None
    if len(values) >= 3:
        spread = statistics.stdev(values)
    elif len(values) == 2:
        spread = max(values) - min(values)
    return Measured(statistics.fmean(values), len(values), spread)


def of_last_setting(rows: Iterable[Row]) -> list[Row]:
    """Of rows of one cell those that count: one a seed, of the setting of the last."""
    every = list(rows)
    same = [row for row in every if _settings(row) == _settings(every[-1])]
    return list({row.get("seed"): row for row in same}.values())


def _settings(row: Row) -> str:
    options = dict(row.get("options") or {})
    for name in ("seed", "out", "device", "physical_batch"):
        options.pop(name, None)
    return json.dumps(options, sort_keys=True, default=str)


def option(row: Row, name: str) -> Any:
    """One of a row's options; where nothing was said, the default."""
    value = (row.get("options") or {}).get(name)
    return DEFAULTS.get(name) if value is None else value


def clips_adaptively(row: Row) -> bool:
    """Whether the clip norm was adapted: said so, or by any of its bounds."""
    options = row.get("options") or {}
    bounds = ("c_star", "c_min", "lambda_")
    return options.get("clip_norm") == "auto" or any(options.get(n) is not None for n in bounds)


def runs_of(rows: Iterable[Row]) -> list[Row]:
    """One row for every run: one that stands in several tables was still run once."""
    return list(
        {json.dumps(row.get("options") or id(row), sort_keys=True): row for row in rows}.values()
    )


def mixed(rows: Sequence[Row]) -> list[str]:
    """Cells whose rows do not belong together: one seed twice, or other settings. In words."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in filter(counted, rows):
        names = ("table", "dataset", "method", "recipe", "epsilon", "accountant")
        varied = (option(row, "a_e"), option(row, "k"), clips_adaptively(row))
        own = varied if row.get("table") in ("table4", "table5", "table6") else ()
        groups.setdefault((*(row.get(name) for name in names), *own), []).append(row)
    found = []
    for key, group in groups.items():
        where = " ".join(str(part) for part in key[:5])
        settings = {_settings(row) for row in group}
        if len({row.get("seed") for row in group}) < len(group):
            found.append(f"{where}: a seed stands there twice, and counts once")
        if len(settings) > 1:
            found.append(f"{where}: {len(settings)} different settings, of which the last counts")
    return found
