"""Rows of a table as a network's inputs, in plain Python: this text travels with every model trained on a table.

It must say the same as `dpis.files`, which a test compares it with.
"""

import math
import re
from typing import Any

import torch

COLUMNS: list[dict[str, Any]] = []


def preprocess(rows: list[dict[str, Any]]) -> torch.Tensor:
    """Rows as dictionaries from column to text or number, as the network takes them."""
    return torch.tensor([_features_of_row(row) for row in rows])


def _features_of_row(row: dict[str, Any]) -> list[float]:
    cells = [_features(column, row.get(column["name"])) for column in COLUMNS]
    return [feature for features in cells for feature in features]


def _features(column: dict[str, Any], value: Any) -> list[float]:
    """A number scaled to [-1, 1] and whether it is missing; or a category as one 1 among zeros, others last."""
    text = "" if value is None else str(value)
    if "bounds" in column:
        low, high = column["bounds"]
        number = _as_number(text)
        if math.isnan(number):
            return [0.0, 1.0]
        middle, half = low / 2 + high / 2, high / 2 - low / 2
        scaled = (min(max(number, low), high) - middle) / half
        return [min(max(scaled, -1.0), 1.0), 0.0]
    places = {_canonical(name): place for place, name in enumerate(column["categories"])}
    chosen = places.get(_canonical(text), len(places))
    return [float(place == chosen) for place in range(len(places) + 1)]


def _as_number(text: str) -> float:
    """A number, or NaN where there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _canonical(text: str) -> str:
    """Names are compared without spaces at the ends, and 3.0 is 3."""
    text = text.strip()
    return text.partition(".")[0] if re.fullmatch(r"[+-]?\d+\.0*", text) else text
