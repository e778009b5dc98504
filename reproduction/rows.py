"""What a row says, and what several say together. Pure functions."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpis import defaults
from reproduction import published
from reproduction.settings import UNIFORM

Row = Mapping[str, Any]
"""One line of results/*.jsonl."""

RECIPES = {
    "adaptive-clipping": "",
    "fixed-clipping": "",
    "augment": "on pixels, with shifted copies of images",
    "bag": "linear on bags of public word vectors, with seed words chosen by hand",
    "channel-scale": "linear, channels scaled by an accounted release",
    "ema": "large batch and averaged weights",
    "large-batch": "a larger equivalent batch",
    "linear": "a linear model on scatter features",
    "opponent": "scatter features of opponent colours",
    "raw-pixels": "a network on pixels",
    UNIFORM: "the same schedule, but uniform sampling (k = inf)",
    "views": "scatter features of several fixed views of every image",
}
"""What the names of recipes mean; those with nothing to say are the paper's own."""

DEFAULTS = {"a_e": defaults.A_E, "k": defaults.HEADROOM}
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
    private = row.get("method") != "sgd"
    return (
        (row.get("options") or {}).get("eval_share") is None
        and isinstance(accuracy, int | float)
        and 0 <= accuracy <= 1
        and (row.get("verified") is True or not private)
    )


def select(
    rows: Iterable[Row],
    *,
    table: str | None = None,
    dataset: str | None = None,
    method: str | None = None,
    recipe: str | None = None,
    epsilon: float | None = None,
    accountant: str | None = None,
) -> list[Row]:
    """Rows that count and say this; what is None may be anything."""
    asked = {
        "table": table,
        "dataset": dataset,
        "method": method,
        "recipe": recipe,
        "epsilon": epsilon,
        "accountant": accountant,
    }
    wanted = {name: value for name, value in asked.items() if value is not None}
    return [
        row
        for row in rows
        if counted(row) and all(row.get(name) == value for name, value in wanted.items())
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


def option(row: Row, name: str) -> Any:
    """One of a row's options; where nothing was said, the default."""
    value = (row.get("options") or {}).get(name)
    return DEFAULTS.get(name) if value is None else value


def clips_adaptively(row: Row) -> bool:
    """Whether the clip norm was adapted: said so, or by any of its bounds."""
    options = row.get("options") or {}
    bounds = ("c_star", "c_min", "lambda_")
    return options.get("clip_norm") == "auto" or any(options.get(n) is not None for n in bounds)


def method_name(method: str) -> str:
    """As the paper calls it."""
    return {**published.METHODS, "dpis": "DPIS, noise fixed beforehand"}.get(method, method)


def runs_of(rows: Iterable[Row]) -> list[Row]:
    """One row for every run: one that stands in several tables was still run once."""
    return list(
        {json.dumps(row.get("options") or id(row), sort_keys=True): row for row in rows}.values()
    )


def mixed(rows: Sequence[Row]) -> list[str]:
    """Cells whose rows do not belong together: one seed twice, or other settings. In words."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        names = ("table", "dataset", "method", "recipe", "epsilon", "accountant")
        varied = (option(row, "a_e"), option(row, "k"), clips_adaptively(row))
        own = varied if row.get("table") in ("table4", "table5", "table6") else ()
        groups.setdefault((*(row.get(name) for name in names), *own), []).append(row)
    found = []
    for key, group in groups.items():
        where = " ".join(str(part) for part in key[:5])
        seeds = [row.get("seed") for row in group]
        settings = {_settings(row) for row in group}
        if len(set(seeds)) < len(seeds):
            found.append(f"{where}: a seed stands there twice, and counts once")
        if len(settings) > 1:
            found.append(f"{where}: {len(settings)} different settings, of which the last counts")
    return found


def _settings(row: Row) -> str:
    options = dict(row.get("options") or {})
    for name in ("seed", "out", "device", "physical_batch"):
        options.pop(name, None)
    return json.dumps(options, sort_keys=True, default=str)
