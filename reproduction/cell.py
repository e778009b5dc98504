"""A cell of a table: one `dpis train`."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reproduction.published import DELTA
from reproduction.settings import RECORDS


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        table: which table or figure it belongs to.
        dataset: by name.
        method: as `dpis train` calls it.
        recipe: ``paper``, or what differs.
        epsilon: None: not private.
        accountant: ``rdp``, ``pld``; None: not private.
        seed: of the run.
        settings: of `dpis train`, as JSON: the recipe's part.
        validation: measure on a tenth of the training records instead of the test set.
    """

    table: str
    dataset: str
    method: str
    recipe: str
    epsilon: float | None
    accountant: str | None
    seed: int
    settings: str
    validation: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Everything that `dpis train` is asked for, but for the folder."""
        options: dict[str, Any] = {
            "dataset": self.dataset,
            "method": self.method,
            "device": "cpu",
            **json.loads(self.settings),
            "seed": self.seed,
            "diagnostics": True,
        }
        if self.validation:
            options["eval_share"] = 0.1
        if self.epsilon is not None:
            n = RECORDS[self.dataset]
            options |= {
                "epsilon": self.epsilon,
                "delta": DELTA,
                "n_public": round(0.9 * n) if self.validation else n,
            }
            if self.accountant == "rdp":
                options["release_n"] = True  # as the paper: the count is charged to every method
            if self.method != "dpis-adaptive":
                options["accountant"] = self.accountant
        return {name: value for name, value in options.items() if value is not None}

    @property
    def command(self) -> str:
        """What a person types to run it again."""
        words = ["dpis", "train", self.dataset]
        for name, value in self.options.items():
            if name != "dataset" and value is not False:
                flag = "--" + name.rstrip("_").replace("_", "-")
                words += [flag] if value is True else [flag, _shown(value)]
        return shlex.join(words)

    @property
    def json_options(self) -> dict[str, Any]:
        """The same, for a row: JSON has no infinity."""
        return {name: "inf" if value == math.inf else value for name, value in self.options.items()}

    @property
    def key(self) -> str:
        """The same for the same run, whatever table it stands in."""
        return key_of(self.json_options)

    @property
    def folder_name(self) -> str:
        """Of the run, readable."""
        parts = [
            self.table,
            self.dataset,
            self.method,
            self.recipe,
            self.accountant,
            f"{self.epsilon}",
        ]
        return "-".join(part for part in parts if part) + f"-seed{self.seed}"


def key_of(options: Mapping[str, Any]) -> str:
    """What tells one run from another, from the options of a row."""
    return json.dumps(options, sort_keys=True)


def _shown(value: object) -> str:
    return str(value).removesuffix(".0")
