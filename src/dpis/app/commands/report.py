"""`dpis report`: a finished run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpis.app.commands.verify import DOES_NOT_HOLD


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    out: Annotated[
        Path | None, typer.Option(help="The page to write. [default: RUN/report.html]")
    ] = None,
) -> None:
    """Write one HTML page of a finished run: result, guarantee, charts. Exit code 1: its ledger does not verify."""
    from dpis.app.page import read_run, render_run
    from dpis.errors import InputError
    from dpis.runs.folder import write_whole

    found = read_run(run)
    path = run / "report.html" if out is None else out
    if path.is_dir() or path.resolve() in {file.resolve() for file in _files_of(run)}:
        raise InputError(f"{path} cannot be the page: choose another file")
    write_whole(path, render_run(found).encode())
    typer.echo(f"wrote {path}")
    if found.problem is not None:
        typer.echo(f"does not hold: {found.problem}")
        raise typer.Exit(DOES_NOT_HOLD)


def _files_of(run: Path) -> list[Path]:
    """What a page must never replace."""
    return [file for file in run.iterdir() if file.name != "report.html"]
