"""Which cells a table consists of, and which of them are wanted."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from dpis.errors import InputError
from reproduction import cost, published, settings
from reproduction.cell import Cell
from reproduction.settings import PAPER, TABLE_3, Recipe

TABLES = ("table3", "table4", "table5", "table6", "figure1")


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
        raise InputError(f"{table} has no such cells: see `python -m reproduction {table} --list`")
    return sorted(every, key=cost.seconds)


def _require_epsilons(table: str, asked: Collection[float] | None) -> None:
    known = sorted({cell.epsilon for cell in _CELLS[table](0) if cell.epsilon is not None})
    for epsilon in asked or ():
        if epsilon not in known:
            names = ", ".join(f"{value:g}" for value in known)
            raise InputError(f"epsilon must be one of {names} in {table}, found {epsilon:g}")


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
