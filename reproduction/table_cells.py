"""The cells of the paper's tables: each is one `dpis train`, and these are all there are."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from dpis.app.commands.flags import shell_type
from dpis.app.jobs.job_options import JobOptions, shell_knobs
from dpis.errors import InputError
from reproduction import published, recipes
from reproduction.recipes import PAPER, RECORDS, TABLE_3, Options

TABLES = ("table3", "table4", "table5", "table6", "figure1")

WORDS = {
    "a_e": "reserve_share",
    "c_star": "clip_ceiling",
    "k": "headroom",
    "lambda_": "clip_scale",
}
"""The paper's letters, by which recipes and rows call some options, in the words of `dpis train`."""


@dataclass(frozen=True)
class TableCell:
    """One run.

    Attributes:
        table: which table or figure it belongs to.
        dataset: by name.
        method: as `dpis train` calls it.
        recipe: ``paper``, or what differs.
        epsilon: None: not private.
        accountant: ``rdp``, ``pld``; None: not private.
        seed: of the run.
        settings: of `dpis train`: the recipe's part.
        validation: measure on a tenth of the training records instead of the test set.
    """

    table: str
    dataset: str
    method: str
    recipe: str
    epsilon: float | None
    accountant: str | None
    seed: int
    settings: Options
    validation: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Everything that `dpis train` is asked for, but for the folder. Rows are told apart by it."""
        options: dict[str, Any] = {
            "dataset": self.dataset,
            "method": self.method,
            "device": "cpu",
            **self.settings,
            "seed": self.seed,
            "diagnostics": True,
        }
        if self.validation:
            options["eval_share"] = 0.1
        if self.epsilon is not None:
            n = RECORDS[self.dataset]
            options |= {
                "epsilon": self.epsilon,
                "delta": published.DELTA,
                "n_public": round(0.9 * n) if self.validation else n,
            }
            if self.accountant == "rdp":
                options["release_n"] = True  # as the paper: the count is charged to every method
            if self.method != "dpis-adaptive":
                options["accountant"] = self.accountant
        return {name: value for name, value in options.items() if value is not None}

    def job(self, folder: Path) -> JobOptions:
        """The same, as `dpis train` takes it."""
        return JobOptions.from_json({**self._in_words, "out": str(folder)})

    @property
    def _in_words(self) -> dict[str, Any]:
        return {WORDS.get(name, name): value for name, value in self.options.items()}

    @property
    def command(self) -> str:
        """What a person types to run it again."""
        words = ["dpis", "train", self.dataset]
        for name, value in self._in_words.items():
            if name != "dataset" and value is not False:
                flag = JobOptions.called(name)
                words += [flag] if value is True else [flag, str(value).removesuffix(".0")]
        return shlex.join(words)

    @property
    def json_options(self) -> dict[str, Any]:
        """The same, for a row: JSON has no infinity."""
        return {name: "inf" if value == math.inf else value for name, value in self.options.items()}

    @property
    def key(self) -> str:
        """The same for the same run, whatever table it stands in."""
        return key_of(self.json_options)


def in_todays_words(command: str) -> str:
    """The command of a row, which may call options by the paper's letters, as `dpis train` takes it now."""
    flags = {
        "--" + letter.rstrip("_").replace("_", "-"): JobOptions.called(word)
        for letter, word in WORDS.items()
    }
    return " ".join(flags.get(word, word) for word in command.split(" "))


def key_of(options: Mapping[str, Any]) -> str:
    """What tells one run from another, from the options of a row."""
    return json.dumps(options, sort_keys=True)


# ── which cells there are, and which of them are wanted ──────────────────────────────────────────────


@dataclass(frozen=True)
class CellChoice:
    """Which cells of a table are wanted; None: all there are."""

    datasets: Collection[str] | None = None
    methods: Collection[str] | None = None
    recipes: Collection[str] | None = None
    accountants: Collection[str] | None = None
    epsilons: Collection[float] | None = None
    seeds: Collection[int] = (0,)

    def __post_init__(self) -> None:
        rows = [recipe for rows in TABLE_3.values() for recipe in rows]
        known: Mapping[str, tuple[Collection[str] | None, Collection[str]]] = {
            "dataset": (self.datasets, TABLE_3),
            "method": (self.methods, {recipe.method for recipe in rows}),
            "accountant": (self.accountants, ("rdp", "pld")),
            "recipe": (
                self.recipes,
                {recipe.name for recipe in rows} | {*recipes.ablations_of_clipping("fmnist")},
            ),
        }
        for what, (asked, names) in known.items():
            for name in asked or ():
                if name not in names:
                    listed = ", ".join(sorted(names))
                    raise InputError(f"{what} must be one of {listed}, found {name!r}")
        for seed in self.seeds:
            if seed < 0:
                raise InputError(f"a seed must be a whole number from 0 on, found {seed}")

    def wants(self, cell: TableCell) -> bool:
        """Whether the cell is among them."""
        asked: list[tuple[object, Collection[Any] | None]] = [
            (cell.dataset, self.datasets),
            (cell.method, self.methods),
            (cell.recipe, self.recipes),
        ]
        if cell.epsilon is not None:
            asked += [(cell.accountant, self.accountants), (cell.epsilon, self.epsilons)]
        elif self.epsilons is not None and self.methods is None:
            return False  # without an epsilon: no answer to a question for some, unless it was named itself
        return all(wanted is None or value in wanted for value, wanted in asked)


def cells_of(table: str, choice: CellChoice) -> list[TableCell]:
    """The chosen cells of a table, the cheapest first."""
    if table not in TABLES:
        raise InputError(f"table must be one of {', '.join(TABLES)}, found {table!r}")
    known = sorted({cell.epsilon for cell in _all_cells(table, 0) if cell.epsilon is not None})
    for epsilon in choice.epsilons or ():
        if epsilon not in known:
            names = ", ".join(f"{value:g}" for value in known)
            raise InputError(f"epsilon must be one of {names} in {table}, found {epsilon:g}")
    seeds = dict.fromkeys(choice.seeds)
    wanted = [cell for seed in seeds for cell in _all_cells(table, seed) if choice.wants(cell)]
    if not wanted:
        raise InputError(f"{table} has no such cells: see `python -m reproduction {table} --list`")
    return sorted(wanted, key=about_seconds)


def _all_cells(table: str, seed: int) -> Iterator[TableCell]:
    if table == "table3":
        yield from _table_3(seed)
        return
    for dataset, name, change, epsilon in _changes_of_dpis(table):
        dpis = recipes.paper_dpis(dataset)
        settings = {**dpis.options_at(epsilon), **change}
        yield TableCell(table, dataset, dpis.method, name, epsilon, "rdp", seed, settings)


def _table_3(seed: int) -> Iterator[TableCell]:
    for dataset, rows in TABLE_3.items():
        for row in rows:
            budgets = [(e, a) for a in row.accountants for e in published.TABLE_3_EPSILONS]
            for epsilon, accountant in [(None, None)] if row.method == "sgd" else budgets:
                yield TableCell(
                    table="table3",
                    dataset=dataset,
                    method=row.method,
                    recipe=row.name,
                    epsilon=epsilon,
                    accountant=accountant,
                    seed=seed,
                    settings=row.options_at(epsilon),
                )


def _changes_of_dpis(table: str) -> Iterator[tuple[str, str, Options, float]]:
    """Data set, name of the row, what is changed in the paper's DPIS, and epsilon."""
    if table == "figure1":  # the competitors' noise follows from their plans: they need not run
        for epsilon in published.FIGURE_1_EPSILONS:
            yield published.FIGURE_1_DATASET, PAPER, recipes.FIGURE_1, epsilon
        return
    for dataset in TABLE_3:
        if table == "table4":
            for name, change in recipes.ablations_of_clipping(dataset).items():
                for epsilon in published.TABLE_4_EPSILONS:
                    yield dataset, name, change, epsilon
        elif table == "table5":
            for a_e in published.TABLE_5_A_E:
                yield dataset, PAPER, {"a_e": a_e}, published.TABLE_5_6_EPSILON
        else:
            for k in published.TABLE_6_K:
                yield dataset, PAPER, {"k": k}, published.TABLE_5_6_EPSILON


# ── about how long one takes ─────────────────────────────────────────────────────────────────────────

_START_SECONDS = 15.0
_SECONDS_PER_GRADIENT = {
    "scatter-linear": 2e-5,
    "bag-linear": 1e-5,
    "scatter-cnn": 1e-4,
    "cnn": 2e-4,
    "rnn": 1.5e-3,
}


def about_seconds(cell: TableCell) -> float:
    """Of one core, roughly: only the order matters."""
    options, n = cell.options, RECORDS[cell.dataset]
    b = float(options["batch_size"])
    equivalent = float(options.get("equivalent_batch", b))
    candidates, full_pass = equivalent, 0  # of one step; of one epoch
    if cell.method == "dpis-adaptive":
        candidates, full_pass = min(2.5 * b, 0.5 * n), n
    elif cell.method == "dpis":
        candidates = min(float(options.get("k", 5.0)) * b, 0.5 * equivalent)
    gradients_per_epoch = options.get("augmentations", 1) * (n // b * candidates + full_pass)
    gradients = options.get("epochs", 40) * gradients_per_epoch
    return float(_START_SECONDS + gradients * _SECONDS_PER_GRADIENT[_model(cell)])


def _model(cell: TableCell) -> str:
    of_systems = {
        "dp-sgd-ts": "rnn" if cell.dataset == "imdb" else "cnn",
        "dp-sgd-hf": "scatter-cnn",
    }
    name = str(cell.options.get("model", of_systems.get(cell.method, "cnn")))
    name = name.removesuffix("-relu").removesuffix("-tanh")
    return "cnn" if cell.dataset == "cifar10" and name == "scatter-cnn" else name


# ── the search for settings ──────────────────────────────────────────────────────────────────────────

FIXED = ("epsilon", "delta", "n_public", "seed", "eval_share", "out", "accountant")
"""Options that a cell sets itself."""


def for_validation(cell: TableCell, changes: Collection[str]) -> TableCell:
    """The cell measured on held-out training records, with options changed: ``("lr=8", "epochs=30")``."""
    settings = dict(cell.settings)
    for change in changes:
        name, equals, value = change.partition("=")
        name = {word: letter for letter, word in WORDS.items()}.get(name, name)
        kind = _searchable(name)
        try:
            if not (equals and value):
                raise ValueError
            settings[name] = kind(value)
        except ValueError:
            raise InputError(f"--set must be OPTION=VALUE, found {change!r}") from None
    return replace(cell, settings=settings, validation=True)


def _searchable(name: str) -> Callable[[str], Any]:
    """What makes a value of that option from text, by its type; options that a cell fixes itself are refused."""
    word = WORDS.get(name, name)
    kind: Any = shell_type(get_type_hints(JobOptions)[word]) if word in shell_knobs() else bool
    if name in FIXED or kind not in (int, float, str):
        raise InputError(f"--set {name}: not an option of `dpis train` that can be searched over")
    return kind  # type: ignore[no-any-return]
