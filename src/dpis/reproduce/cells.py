"""What a table consists of: cells, each of them one `dpis train`."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

from dpis.errors import InputError
from dpis.jobs.options import JobOptions
from dpis.reproduce import published, settings
from dpis.reproduce.published import DELTA
from dpis.reproduce.settings import PAPER, RECORDS, TABLE_3, Recipe

TABLES = ("table3", "table4", "table5", "table6", "figure1")

FIXED = ("epsilon", "delta", "n_public", "seed", "eval_share", "out", "accountant")
"""Options that a cell sets itself."""


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

    @property
    def cost(self) -> float:
        """About how many seconds of one core: only the order matters."""
        options = self.options
        n, b = RECORDS[self.dataset], options["batch_size"]
        epochs = options.get("epochs", 40)
        looked_at = float(options.get("equivalent_batch", b))
        full_pass = 0
        if self.method == "dpis-adaptive":
            looked_at, full_pass = min(2.5 * b, 0.5 * n), n
        elif self.method == "dpis":
            looked_at = min(options.get("k", 5.0) * b, 0.5 * looked_at)
        copies = options.get("augmentations", 1)
        gradients = epochs * copies * (n // b * looked_at + full_pass)
        return (
            15.0
            + float(gradients) * _SECONDS_PER_GRADIENT[_model(self.dataset, self.method, options)]
        )


_SECONDS_PER_GRADIENT = {
    "scatter-linear": 2e-5,
    "bag-linear": 1e-5,
    "scatter-cnn": 1e-4,
    "cnn": 2e-4,
    "rnn": 1.5e-3,
}


def _model(dataset: str, method: str, options: dict[str, Any]) -> str:
    default = {"dp-sgd-ts": "rnn" if dataset == "imdb" else "cnn", "dp-sgd-hf": "scatter-cnn"}
    name = str(options.get("model", default.get(method, "cnn")))
    name = name.removesuffix("-relu").removesuffix("-tanh")
    return "cnn" if dataset == "cifar10" and name == "scatter-cnn" else name


def key_of(options: Mapping[str, Any]) -> str:
    """What tells one run from another, from the options of a row."""
    return json.dumps(options, sort_keys=True)


def _shown(value: object) -> str:
    return str(value).removesuffix(".0")


@dataclass(frozen=True)
class Choice:
    """Which cells of a table are wanted; None: all there are."""

    datasets: Collection[str] | None = None
    methods: Collection[str] | None = None
    recipes: Collection[str] | None = None
    accountants: Collection[str] | None = None
    epsilons: Collection[float] | None = None
    seeds: Collection[int] = (0,)

    def __post_init__(self) -> None:
        _require_known("dataset", self.datasets, TABLE_3)
        recipes = [recipe for rows in TABLE_3.values() for recipe in rows]
        _require_known("method", self.methods, {recipe.method for recipe in recipes})
        _require_known("accountant", self.accountants, ("rdp", "pld"))
        known = {recipe.name for recipe in recipes} | set(settings.ablations_of_clipping("fmnist"))
        _require_known("recipe", self.recipes, known)
        for seed in self.seeds:
            if seed < 0:
                raise InputError(f"a seed must be a whole number from 0 on, found {seed}")

    def wants(self, cell: Cell) -> bool:
        """Whether the cell is among them."""
        return (
            _in(cell.dataset, self.datasets)
            and _in(cell.method, self.methods)
            and _in(cell.recipe, self.recipes)
            and (self._wants_budget(cell) if cell.epsilon is not None else self._wants_sgd())
        )

    def _wants_budget(self, cell: Cell) -> bool:
        return _in(cell.accountant, self.accountants) and _in(cell.epsilon, self.epsilons)

    def _wants_sgd(self) -> bool:
        """What has no epsilon is no answer to a question for some, unless it was named itself."""
        return self.epsilons is None or self.methods is not None


def _in(value: object, wanted: Collection[Any] | None) -> bool:
    return wanted is None or value in wanted


def _require_known(what: str, asked: Collection[str] | None, known: Collection[str]) -> None:
    for name in asked or ():
        if name not in known:
            raise InputError(f"{what} must be one of {', '.join(sorted(known))}, found {name!r}")


def cells_of(table: str, choice: Choice) -> list[Cell]:
    """The chosen cells of a table, the cheapest first."""
    if table not in _CELLS:
        raise InputError(f"table must be one of {', '.join(TABLES)}, found {table!r}")
    _require_epsilons(table, choice.epsilons)
    seeds = dict.fromkeys(choice.seeds)
    every = [cell for seed in seeds for cell in _CELLS[table](seed) if choice.wants(cell)]
    if not every:
        raise InputError(f"{table} has no such cells: see `dpis reproduce {table} --list`")
    return sorted(every, key=lambda cell: cell.cost)


def _require_epsilons(table: str, asked: Collection[float] | None) -> None:
    known = sorted({cell.epsilon for cell in _CELLS[table](0) if cell.epsilon is not None})
    for epsilon in asked or ():
        if epsilon not in known:
            names = ", ".join(f"{value:g}" for value in known)
            raise InputError(f"epsilon must be one of {names} in {table}, found {epsilon:g}")


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


def _table_3(seed: int) -> Iterator[Cell]:
    for dataset, recipes in TABLE_3.items():
        for recipe in recipes:
            if recipe.method == "sgd":
                yield _cell("table3", dataset, recipe, None, None, seed)
                continue
            for accountant in recipe.accountants:
                for epsilon in published.TABLE_3_EPSILONS:
                    yield _cell("table3", dataset, recipe, epsilon, accountant, seed)


def _table_4(seed: int) -> Iterator[Cell]:
    for dataset in TABLE_3:
        for name, change in settings.ablations_of_clipping(dataset).items():
            for epsilon in published.TABLE_4_EPSILONS:
                recipe = settings.paper_dpis(dataset)
                yield _cell("table4", dataset, recipe, epsilon, "rdp", seed, name, change)


def _table_5(seed: int) -> Iterator[Cell]:
    for dataset in TABLE_3:
        for a_e in published.TABLE_5_A_E:
            yield _ablation("table5", dataset, seed, {"a_e": a_e})


def _table_6(seed: int) -> Iterator[Cell]:
    for dataset in TABLE_3:
        for k in published.TABLE_6_K:
            yield _ablation("table6", dataset, seed, {"k": k})


def _ablation(table: str, dataset: str, seed: int, change: settings.Options) -> Cell:
    """The paper's DPIS with one option changed."""
    recipe, epsilon = settings.paper_dpis(dataset), published.TABLE_5_6_EPSILON
    return _cell(table, dataset, recipe, epsilon, "rdp", seed, PAPER, change)


def _figure_1(seed: int) -> Iterator[Cell]:
    """DPIS must run, since its noise follows what it releases; the competitors' noise follows from their plans."""
    dataset = published.FIGURE_1_DATASET
    recipe = settings.paper_dpis(dataset)
    for epsilon in published.FIGURE_1_EPSILONS:
        yield _cell("figure1", dataset, recipe, epsilon, "rdp", seed, PAPER, settings.FIGURE_1)


_CELLS = {
    "table3": _table_3,
    "table4": _table_4,
    "table5": _table_5,
    "table6": _table_6,
    "figure1": _figure_1,
}


def _cell(
    table: str,
    dataset: str,
    recipe: Recipe,
    epsilon: float | None,
    accountant: str | None,
    seed: int,
    name: str | None = None,
    change: settings.Options | None = None,
) -> Cell:
    made = {**recipe.options_at(epsilon), **(change or {})}
    return Cell(
        table=table,
        dataset=dataset,
        method=recipe.method,
        recipe=recipe.name if name is None else name,
        epsilon=epsilon,
        accountant=accountant,
        seed=seed,
        settings=json.dumps(made),
    )
