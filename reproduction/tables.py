"""From rows to tables, beside the published figures. Pure functions: every number is computed here, from rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reproduction import published
from reproduction.published import Grid
from reproduction.recipes import OURS, PAPER, RECIPES
from reproduction.rows import Measured, Row, clips_adaptively, measured, option, select

ACCOUNTS = {
    "rdp": "Accounted by RDP, as the paper: a released count of records is charged to every method",
    "pld": "Accounted by PLD: tighter, for methods whose noise is fixed beforehand; the count is declared",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ours beside the published figure."""

    ours: Measured | None
    published: float | None
    absent: str = "not run"
    source: str = PAPER
    """Whose the published figure is, in a word."""

    @property
    def published_text(self) -> str:
        """Whose it is and what it is, to the digits that were published."""
        if self.published is None:
            return ""
        return f"{self.source} {self.published:.{1 if self.source == PAPER else 2}f}"

    @property
    def difference(self) -> float | None:
        """Ours less the published, to the hundredth of a per cent that is shown."""
        if self.ours is None or self.published is None:
            return None
        return round(self.ours.mean - self.published, 2) + 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table; a reference holds figures of others alone."""

    name: str
    detail: str
    cells: tuple[Comparison, ...]
    reference: bool = False
    beyond: bool = False
    """A recipe that is not the paper's."""
    private: bool = True
    """If not, it has no epsilon, and its one cell stands at the end."""


@dataclass(frozen=True, slots=True)
class PaperTable:
    """One table as readers see it."""

    title: str
    corner: str
    heads: tuple[str, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class AccountBlock:
    """Tables under one accountant."""

    account: str
    tables: tuple[PaperTable, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """One of the paper's tables, or ours beside other references."""

    key: str
    title: str
    intro: str
    blocks: tuple[AccountBlock, ...]
    against: str = "the paper's"
    """Whose figures ours are compared with."""


def verdict(section: Section) -> str:
    """How many cells reach the published figure, private and not, and which do not; nothing if none was run."""
    private, others = _compared(section, private=True), _compared(section, private=False)
    counts = [
        f"{sum(difference >= 0 for difference in cells.values())} of {len(cells)} {kind} cells"
        for kind, cells in (("private", private), ("non-private", others))
        if cells
    ]
    if not counts:
        return ""
    below: dict[str, list[str]] = {}
    for (line, head), difference in (private | others).items():
        if difference < 0:
            below.setdefault(line, []).append(f"{head} ({signed(difference)})".lstrip())
    reached = f"{' and '.join(counts)} that were run are at or above {section.against}."
    named = "; ".join(f"{line} {', '.join(cells)}" for line, cells in below.items())
    return reached + (f" Below: {named}." if below else "")


def _compared(section: Section, *, private: bool) -> dict[tuple[str, str], float]:
    """Ours less the published, by line and column. What is not private stands in every block, and counts once."""
    return {
        (_named_alone(block, table, line), head if line.private else ""): difference
        for block in section.blocks
        for table in block.tables
        for line in table.lines
        if line.private is private
        for head, cell in zip(table.heads, line.cells, strict=True)
        if (difference := cell.difference) is not None
    }


def _named_alone(block: AccountBlock, table: PaperTable, line: Line) -> str:
    """A line in words that no other has."""
    alone = [other.name for other in table.lines].count(line.name) == 1
    name = line.name if alone or not line.detail else f"{line.name} ({line.detail})"
    account = f"{block.account.upper()}:" if line.private else ""
    return ", ".join(filter(None, (table.title, name, account)))


# ── the paper's tables ───────────────────────────────────────────────────────────────────────────────


def sections(rows: Sequence[Row]) -> list[Section]:
    """Tables 3 to 6 and our own recipes, whatever has been run."""
    table_3 = select(rows, table="table3")
    return [
        _table_3(table_3),
        _table_4(select(rows, table="table4")),
        _of_one_option(
            select(rows, table="table5"),
            "a_e",
            published.TABLE_5,
            key="table5",
            title="Table 5: the budget schedule a_E",
            intro="DPIS at epsilon = 1. a_E is the share of epochs that budget for the rest of the run as if kappa "
            "were 1.",
            sign="a_E",
        ),
        _of_one_option(
            select(rows, table="table6"),
            "k",
            published.TABLE_6,
            key="table6",
            title="Table 6: the headroom k",
            intro="DPIS at epsilon = 1. k is how much a record's gradient norm may have grown since it was last seen.",
            sign="k",
        ),
        _ours(table_3),
    ]


def _table_3(rows: Sequence[Row]) -> Section:
    datasets = dict.fromkeys((*published.DATASETS, *sorted(row["dataset"] for row in rows)))
    blocks = tuple(
        AccountBlock(
            account,
            tuple(_by_epsilon(name, _accounted(rows, account), account) for name in datasets),
        )
        for account in ACCOUNTS
    )
    return Section(
        "table3",
        "Table 3: test accuracy by epsilon",
        "Per cent, at delta = 1e-5, of the model after the last epoch.",
        blocks,
    )


def _accounted(rows: Sequence[Row], account: str) -> list[Row]:
    return [row for row in rows if row.get("accountant") == account or row.get("method") == "sgd"]


def _by_epsilon(dataset: str, rows: Sequence[Row], account: str) -> PaperTable:
    here = [row for row in rows if row["dataset"] == dataset]
    grids = published.TABLE_3.get(dataset, {})
    ran = {row["epsilon"] for row in here if row.get("epsilon") is not None}
    epsilons = tuple(sorted({*published.TABLE_3_EPSILONS, *ran}))
    lines: list[Line] = []
    named = {(row["method"], row["recipe"]) for row in here}
    for method in published.METHODS:
        if method == "sgd":
            lines.append(_ceiling(dataset, here, len(epsilons)))
        elif method in grids or (method, PAPER) in named:
            absent = "RDP only" if (method, account) == ("dpis-adaptive", "pld") else "not run"
            lines.append(_line(here, method, PAPER, epsilons, grids.get(method), absent))
    beyond = sorted(pair for pair in named if pair[1] != PAPER or pair[0] not in published.METHODS)
    # Another model or other sampling: there is no published figure to compare with.
    for method, recipe in beyond:
        lines.append(_line(here, method, recipe, epsilons, None))
    if dataset in published.DPSUR:
        cells = tuple(Comparison(None, published.DPSUR[dataset].at(e), "") for e in epsilons)
        lines.append(Line("DPSUR", published.DPSUR_REMARK, cells, reference=True))
    heads = tuple(map(at_epsilon, epsilons))
    return PaperTable(published.DATASETS.get(dataset, dataset), "method", heads, tuple(lines))


def _line(
    rows: Sequence[Row],
    method: str,
    recipe: str,
    epsilons: Sequence[float],
    grid: Grid | None,
    absent: str = "not run",
    source: str = PAPER,
) -> Line:
    mine = [row for row in rows if (row["method"], row["recipe"]) == (method, recipe)]
    cells = tuple(
        Comparison(
            measured(row for row in mine if row.get("epsilon") == epsilon),
            None if grid is None else grid.at(epsilon),
            absent,
            source,
        )
        for epsilon in epsilons
    )
    beyond = recipe != PAPER or method not in published.METHODS
    name = method_name(method) + (f", {recipe}" if recipe != PAPER else "")
    said = RECIPES.get(recipe, "") if beyond else ""
    return Line(name, f"{method}: {said}" if said else method, cells, beyond=beyond)


def _ceiling(dataset: str, rows: Sequence[Row], columns: int) -> Line:
    """`sgd` has no epsilon: one cell, in the last column, where it is the limit."""
    mine = [row for row in rows if row["method"] == "sgd" and row["recipe"] == PAPER]
    empty = (Comparison(None, None, ""),) * (columns - 1)
    cell = Comparison(measured(mine), published.NON_PRIVATE.get(dataset))
    return Line(method_name("sgd"), "sgd: no epsilon, the ceiling", (*empty, cell), private=False)


def _table_4(rows: Sequence[Row]) -> Section:
    epsilons = sorted({*published.TABLE_4_EPSILONS, *(row["epsilon"] for row in rows)})
    kinds = (
        ("adaptive clip norm", True, published.TABLE_4_ADAPTIVE),
        ("fixed clip norm", False, published.TABLE_4_FIXED),
    )

    def lines(dataset: str, rows: Sequence[Row]) -> Iterator[Line]:
        for kind, adapts, grids in kinds:
            mine = [row for row in rows if clips_adaptively(row) is adapts]
            yield from _varied(
                mine, dataset, kind, epsilons, grids[dataset], lambda row: row.get("epsilon")
            )

    return Section(
        "table4",
        "Table 4: adaptive clipping",
        "DPIS with the clip norm adapted by an accounted release an epoch, and with a fixed one.",
        _blocks(rows, tuple(map(at_epsilon, epsilons)), lines),
    )


def _of_one_option(
    rows: Sequence[Row],
    name: str,
    grids: Mapping[str, Grid],
    *,
    key: str,
    title: str,
    intro: str,
    sign: str,
) -> Section:
    ran = {float(option(row, name)) for row in rows}
    values = sorted({*grids["mnist"].values, *ran})

    def lines(dataset: str, rows: Sequence[Row]) -> Iterator[Line]:
        return _varied(
            rows, dataset, "", values, grids[dataset], lambda row: float(option(row, name))
        )

    heads = tuple(f"{sign} = {value:g}" for value in values)
    return Section(key, title, intro, _blocks(rows, heads, lines))


def _blocks(
    rows: Sequence[Row],
    heads: tuple[str, ...],
    lines: Callable[[str, Sequence[Row]], Iterator[Line]],
) -> tuple[AccountBlock, ...]:
    """RDP always; PLD only if something was run: the adaptive method has no such account."""
    blocks = []
    for account in ACCOUNTS:
        mine = _accounted(rows, account)
        if account == "rdp" or any(row.get("accountant") == account for row in mine):
            made = [
                line
                for dataset in published.DATASETS
                for line in lines(dataset, [row for row in mine if row["dataset"] == dataset])
            ]
            blocks.append(AccountBlock(account, (PaperTable("", "dataset", heads, tuple(made)),)))
    return tuple(blocks)


def _varied(
    rows: Sequence[Row],
    dataset: str,
    detail: str,
    values: Sequence[float],
    grid: Grid,
    value_of: Callable[[Row], Any],
) -> Iterator[Line]:
    """The paper's line, then one for each other recipe or method that was run."""

    def kind(row: Row) -> tuple[str, str]:
        of_paper = RECIPES.get(row["recipe"]) == ""
        return row["method"], PAPER if of_paper else row["recipe"]

    papers = ("dpis-adaptive", PAPER)
    for method, recipe in (papers, *sorted({*map(kind, rows)} - {papers})):
        mine = [row for row in rows if kind(row) == (method, recipe)]
        cells = tuple(
            Comparison(measured(row for row in mine if value_of(row) == value), grid.at(value))
            for value in values
        )
        beyond = (method, recipe) != papers
        said = f"{method}, {recipe}" if beyond else ""
        details = ", ".join(filter(None, (detail, said)))
        yield Line(published.DATASETS[dataset], details, cells, beyond=beyond)


def _ours(rows: Sequence[Row]) -> Section:
    """The recipe that validation chose for each data set, beside DPSUR's figures."""
    epsilons = published.TABLE_3_EPSILONS
    lines: list[Line] = []
    for dataset, recipe in OURS.items():
        mine = [row for row in _accounted(rows, "pld") if row["dataset"] == dataset]
        line = _line(mine, "dpis", recipe, epsilons, published.DPSUR[dataset], source="DPSUR")
        lines.append(replace(line, name=published.DATASETS[dataset], beyond=False))
        grid = published.TABLE_3[dataset]["dpis-adaptive"]
        cells = tuple(Comparison(None, grid.at(epsilon)) for epsilon in epsilons)
        lines.append(Line("DPIS", "as published", cells, reference=True))
    table = PaperTable("", "dataset", tuple(map(at_epsilon, epsilons)), tuple(lines))
    return Section(
        "ours",
        "Beyond the paper: one recipe for each dataset",
        "Predeclared DPIS, accounted by PLD; the recipe was chosen on validation records, not searched anew at every "
        f"epsilon. Beside it the figures of DPSUR, which are higher than the paper's ({published.DPSUR_REMARK}).",
        (AccountBlock("pld", (table,)),),
        against="DPSUR's",
    )


# ── words ────────────────────────────────────────────────────────────────────────────────────────────


def method_name(method: str) -> str:
    """As the paper calls it."""
    return {**published.METHODS, "dpis": "DPIS, noise fixed beforehand"}.get(method, method)


def at_epsilon(epsilon: float) -> str:
    """As a head or a title says it."""
    return f"ε\u00a0=\u00a0{epsilon:g}"


def signed(difference: float) -> str:
    """With its sign always: the sign, not a colour, says which is higher."""
    return f"{difference:+.2f}".replace("-", "−")
