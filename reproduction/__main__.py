"""`python -m reproduction`: the paper's tables, cell by cell, from a clone of this repository."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from dpis.app.commands.flags import with_flags
from dpis.app.commands.verify import DOES_NOT_HOLD
from dpis.app.entry import run
from dpis.errors import InputError
from reproduction.table_cells import CellChoice, TableCell, cells_of, for_validation

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
ResultsFolder = Annotated[Path, typer.Option(help="Folder of the rows.")]
RESULTS, RUNS = Path("results"), Path("runs/reproduce")


def _run(
    chosen: Callable[[CellChoice], list[TableCell]],
    default_seeds: str = "0",
    *,
    datasets: Annotated[Names, typer.Option(help="Such as fmnist,mnist. [default: all]")] = None,
    methods: Annotated[Names, typer.Option(help="Such as dpis,dp-sgd-hf. [default: all]")] = None,
    recipes: Annotated[
        Names, typer.Option(help="Rows by name, such as paper,linear. [default: all]")
    ] = None,
    accountants: Annotated[Names, typer.Option(help="rdp, pld. [default: both]")] = None,
    epsilons: Annotated[Names, typer.Option(help="Such as 1,3. [default: all]")] = None,
    seeds: Annotated[
        Names, typer.Option(help="Such as 0,1,2. [default: 0, to tune 100]", show_default=False)
    ] = None,
    budget_minutes: Annotated[
        float | None, typer.Option(help="Begin no cell after so long. [default: no limit]")
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Cells at once, each on one core; 1: one cell on all cores.")
    ] = 2,
    results: ResultsFolder = RESULTS,
    runs: Annotated[Path, typer.Option(help="Folder of the run folders.")] = RUNS,
    list_only: Annotated[
        bool, typer.Option("--list", help="Print the commands of the cells; run nothing.")
    ] = False,
) -> None:
    """Run what is missing of the cells that were asked for. Every command that runs cells has these options."""
    from reproduction.results import Results
    from reproduction.runner import run_missing

    cells = chosen(
        CellChoice(
            datasets=_listed("--datasets", datasets, str),
            methods=_listed("--methods", methods, str),
            recipes=_listed("--recipes", recipes, str),
            accountants=_listed("--accountants", accountants, str),
            epsilons=_listed("--epsilons", epsilons, float),
            seeds=_listed("--seeds", default_seeds if seeds is None else seeds, int) or (),
        )
    )
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


def _listed(flag: str, text: Names, kind: Callable[[str], T]) -> list[T] | None:
    try:
        return None if text is None else [kind(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{flag} must be numbers with commas between, found {text!r}") from None


TABLES = {
    "table3": "Accuracy of every method, and the rows beyond the paper.",
    "table4": "Adaptive clipping: with and without.",
    "table5": "The budget schedule: a_E.",
    "table6": "The headroom: k.",
    "figure1": "Noise by epoch.",
}
OPTIONS = [
    one
    for one in inspect.signature(_run, eval_str=True).parameters.values()
    if one.kind is inspect.Parameter.KEYWORD_ONLY
]


def _table_command(table: str, text: str) -> None:
    @reproduce.command(table, help=text)
    @with_flags(OPTIONS)
    def command(**options: Any) -> None:
        _run(lambda choice: cells_of(table, choice), **options)


for table, text in TABLES.items():
    _table_command(table, text)


@reproduce.command()
@with_flags(OPTIONS)
def tune(
    *,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="OPTION=VALUE", help="Another option of `dpis train`. May be repeated."
        ),
    ] = None,
    **options: Any,
) -> None:
    """Cells of Table 3 measured on a tenth of the training records, to choose settings; the test set stays unread."""

    def cells(choice: CellChoice) -> list[TableCell]:
        return [for_validation(cell, changes or ()) for cell in cells_of("table3", choice)]

    _run(cells, "100", **options)


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
    typer.echo(
        f"{len(rows)} rows of the tables: {out}. Rows of the search for settings are not shown"
    )


@reproduce.command()
def verify(results: ResultsFolder = RESULTS) -> None:
    """Check the ledger of every row. Exit code 0: all claims hold; 1: not all do."""
    from reproduction.ledgers import check_ledgers

    count, problems = check_ledgers(results)
    for problem in problems:
        typer.echo(problem)
    whose = "one for every private row, of the tables and of the search for settings"
    typer.echo(f"{count - len(problems)} of {count} ledgers hold: {whose}")
    if problems:
        raise typer.Exit(DOES_NOT_HOLD)


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return run(reproduce, "python -m reproduction", arguments)


if __name__ == "__main__":
    sys.exit(main())
