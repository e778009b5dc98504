"""`python -m reproduction`: the paper's tables, cell by cell, from a clone of this repository."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dpis.app.commands.verify import DOES_NOT_HOLD
from dpis.app.entry import run
from dpis.errors import InputError

if TYPE_CHECKING:
    from reproduction.table_cells import CellChoice, TableCell

T = TypeVar("T")

reproduce = typer.Typer(
    name="reproduce",
    help="Run the paper's tables, cell by cell; render and verify what was run.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Names = str | None
Datasets = Annotated[Names, typer.Option(help="Such as fmnist,mnist. [default: all]")]
Methods = Annotated[Names, typer.Option(help="Such as dpis,dp-sgd-hf. [default: all]")]
Recipes = Annotated[Names, typer.Option(help="Rows by name, such as paper,linear. [default: all]")]
Accountants = Annotated[Names, typer.Option(help="rdp, pld. [default: both]")]
Epsilons = Annotated[Names, typer.Option(help="Such as 1,3. [default: all]")]
Seeds = Annotated[str, typer.Option(help="Such as 0,1,2.")]
Minutes = Annotated[
    float | None, typer.Option(help="Begin no cell after so long. [default: no limit]")
]
Processes = Annotated[
    int, typer.Option(min=1, help="Cells at once, each on one core; 1: one cell on all cores.")
]
ResultsFolder = Annotated[Path, typer.Option(help="Folder of the rows.")]
RunsFolder = Annotated[Path, typer.Option(help="Folder of the run folders.")]
ListOnly = Annotated[
    bool, typer.Option("--list", help="Print the commands of the cells; run nothing.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="OPTION=VALUE", help="Another option of `dpis train`. May be repeated."
    ),
]

RESULTS, RUNS = Path("results"), Path("runs/reproduce")


def _table_command(table: str, text: str) -> None:
    def command(
        datasets: Datasets = None,
        methods: Methods = None,
        recipes: Recipes = None,
        accountants: Accountants = None,
        epsilons: Epsilons = None,
        seeds: Seeds = "0",
        budget_minutes: Minutes = None,
        processes: Processes = 2,
        results: ResultsFolder = RESULTS,
        runs: RunsFolder = RUNS,
        list_only: ListOnly = False,
    ) -> None:
        from reproduction.table_cells import cells_of

        chosen = _choice(datasets, methods, recipes, accountants, epsilons, seeds)
        _run(cells_of(table, chosen), results, runs, processes, budget_minutes, list_only)

    command.__doc__ = text
    reproduce.command(table)(command)


_table_command("table3", "Accuracy of every method, and the rows beyond the paper.")
_table_command("table4", "Adaptive clipping: with and without.")
_table_command("table5", "The budget schedule: a_E.")
_table_command("table6", "The headroom: k.")
_table_command("figure1", "Noise by epoch.")


@reproduce.command()
def tune(
    datasets: Datasets = None,
    methods: Methods = None,
    recipes: Recipes = None,
    accountants: Accountants = None,
    epsilons: Epsilons = None,
    seeds: Seeds = "100",
    budget_minutes: Minutes = None,
    processes: Processes = 2,
    results: ResultsFolder = RESULTS,
    runs: RunsFolder = RUNS,
    list_only: ListOnly = False,
    changes: Changes = None,
) -> None:
    """Cells of Table 3 measured on a tenth of the training records, to choose settings; the test set stays unread."""
    from reproduction.table_cells import cells_of, for_validation

    chosen = _choice(datasets, methods, recipes, accountants, epsilons, seeds)
    cells = [for_validation(cell, changes or ()) for cell in cells_of("table3", chosen)]
    _run(cells, results, runs, processes, budget_minutes, list_only)


@reproduce.command()
def report(
    results: ResultsFolder = RESULTS,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write there: a page if it ends in .html, the tables if in .md. [default: print the tables]"
        ),
    ] = None,
) -> None:
    """The tables beside the paper's, and figures, from the rows that are there."""
    from dpis.runs.folder import write_whole
    from reproduction.pages import render_page, render_text
    from reproduction.results import some_rows

    rows = some_rows(results)
    if out is None:
        typer.echo(render_text(rows))
        return
    renderers = {".html": render_page, ".md": render_text}
    if out.suffix not in renderers:
        raise InputError(f"--out must end in .html or .md, found {str(out)!r}")
    write_whole(out, (renderers[out.suffix](rows) + "\n").encode())
    typer.echo(f"{len(rows)} rows: {out}")


@reproduce.command()
def verify(results: ResultsFolder = RESULTS) -> None:
    """Check the ledger of every row. Exit code 0: all claims hold; 1: not all do."""
    from reproduction.ledgers import check_ledgers

    count, problems = check_ledgers(results)
    for problem in problems:
        typer.echo(problem)
    typer.echo(f"{count - len(problems)} of {count} ledgers hold")
    if problems:
        raise typer.Exit(DOES_NOT_HOLD)


def _choice(
    datasets: Names,
    methods: Names,
    recipes: Names,
    accountants: Names,
    epsilons: Names,
    seeds: str,
) -> CellChoice:
    from reproduction.table_cells import CellChoice

    return CellChoice(
        datasets=_listed("--datasets", datasets, str),
        methods=_listed("--methods", methods, str),
        recipes=_listed("--recipes", recipes, str),
        accountants=_listed("--accountants", accountants, str),
        epsilons=_listed("--epsilons", epsilons, float),
        seeds=_listed("--seeds", seeds, int) or (),
    )


def _listed(flag: str, text: Names, kind: Callable[[str], T]) -> list[T] | None:
    try:
        return None if text is None else [kind(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{flag} must be numbers with commas between, found {text!r}") from None


def _run(
    cells: list[TableCell],
    results: Path,
    runs: Path,
    processes: int,
    budget_minutes: float | None,
    list_only: bool,
) -> None:
    from reproduction.results import Results
    from reproduction.runner import run_missing

    minutes = math.inf if budget_minutes is None else budget_minutes
    if not minutes >= 0:
        raise InputError(f"--budget-minutes must be a number from 0 on, found {minutes:g}")
    if list_only:
        for cell in cells:
            typer.echo(cell.command)
        return
    outcome = run_missing(
        cells,
        Results(results),
        runs,
        processes=processes,
        budget_minutes=minutes,
        say=lambda line: typer.echo(line, err=True),
    )
    typer.echo(
        f"{outcome.there + outcome.run} of {len(cells)} cells are there, {outcome.run} of them run now"
        + (f", {outcome.left} left for lack of time" if outcome.left else "")
    )
    if outcome.failed:
        raise InputError(f"{len(outcome.failed)} of {len(cells)} cells failed, as told above")


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return run(reproduce, "python -m reproduction", arguments)


if __name__ == "__main__":
    sys.exit(main())
