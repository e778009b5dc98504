"""A cell measured on held-out training records, with other options: how settings are chosen."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, get_args, get_type_hints

from dpis.app.jobs.options import JobOptions
from dpis.errors import InputError
from reproduction.cell import Cell

FIXED = ("epsilon", "delta", "n_public", "seed", "eval_share", "out", "accountant")
"""Options that a cell sets itself."""


def for_validation(cell: Cell, changes: Collection[str]) -> Cell:
    """The cell measured on held-out training records, with options changed: ``("lr=8", "epochs=30")``."""
    made = json.loads(cell.settings)
    for change in changes:
        name, equals, value = change.partition("=")
        name = {"lambda": "lambda_"}.get(name, name)
        kind = _searchable(name)
        try:
            if not (equals and value):
                raise ValueError
            made[name] = kind(value)
        except ValueError:
            raise InputError(f"--set must be OPTION=VALUE, found {change!r}") from None
    return replace(cell, settings=json.dumps(made), validation=True)


def _searchable(name: str) -> Callable[[str], Any]:
    """What makes a value of that option from text, by its type; options that a cell fixes itself are refused."""
    kinds = set(get_args(get_type_hints(JobOptions).get(name, bool))) - {type(None)}
    if name == "optimizer":
        return str
    if name in FIXED or len(kinds) != 1:
        raise InputError(f"--set {name}: not an option of `dpis train` that can be searched over")
    kind: Callable[[str], Any] = kinds.pop()
    return kind
