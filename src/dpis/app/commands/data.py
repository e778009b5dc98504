"""``dpis data``: what is known by name, where it is, and how to get what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dpis.datasets.download import Progress

data = typer.Typer(
    name="data",
    help="Public datasets: which are known, where they are, how to get them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@data.command("list")
def list_data() -> None:
    """Show every dataset known by name, where its files are, or how to get them."""
    from dpis.datasets.locate import available

    locations = available()
    width = max(len(location.name) for location in locations)
    for location in locations:
        where = str(location.folder) if location.folder else f"missing: {location.how_to_get}"
        typer.echo(f"{location.name:{width}}  {where}")


@data.command("fetch")
def fetch_data(
    name: Annotated[str, typer.Argument(help="A dataset's name; `dpis data list` shows them.")],
    to: Annotated[
        Path | None,
        typer.Option(help="Put the files into a folder here; DPIS_DATA must then be set to it."),
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Take them from the published archive, downloaded before (cifar10, imdb).",
        ),
    ] = None,
) -> None:
    """Get a dataset, check it against published checksums, and put it where `dpis train` finds it.

    An interrupted download goes on where it stopped.
    """
    from dpis.datasets.fetch import fetch

    with _bar() as progress:
        fetched = fetch(name, to, archive, progress)
    typer.echo(f"{'already in' if fetched.was_there else 'fetched to'} {fetched.folder}")


@contextmanager
def _bar() -> Iterator[Progress]:
    """A progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not Console(stderr=True).is_terminal,
    )
    tasks: dict[str, TaskID] = {}

    def progress(what: str, done: int, total: int | None) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what.rpartition("/")[2], total=total)
        bars.update(tasks[what], completed=done, total=total)

    with bars:
        yield progress
