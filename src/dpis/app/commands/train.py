"""`dpis train`: one command from data to a private model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dpis.app.commands.flags import flag, typed, with_flags
from dpis.app.jobs.job_options import JobOptions, shell_knobs
from dpis.app.processes import (
    INTERRUPTED,
    TIMEOUT,
    connected,
    launch,
    started_as_one_of_several,
    started_here,
    tell,
)
from dpis.errors import InputError
from dpis.options import default_in_words

GROUPS = (
    "Guarantee",
    "Model",
    "Training",
    "Sampling",
    "Clipping",
    "The adaptive method",
    "Records",
    "Your own file",
    "Measuring",
    "Run",
)
"""The headings of the help, what everybody needs first."""

OFFERED = [
    name
    for group in GROUPS
    for name, one in shell_knobs().items()
    if one.group == group and name != "dataset"
]


@with_flags(flag(JobOptions, name) for name in OFFERED)
def train(
    context: typer.Context,
    dataset: Annotated[
        str | None,
        typer.Argument(
            metavar="DATASET",
            help=f"{shell_knobs()['dataset'].help} [default: {default_in_words(JobOptions, 'dataset')}]",
            rich_help_panel="Arguments",
        ),
    ] = None,
    *,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Go on with an interrupted run; alone.", rich_help_panel="Run"
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object as the last line.", rich_help_panel="Run"
        ),
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train on so many processes of this machine. [default: 1; on several machines: torchrun]",
            rich_help_panel="Run",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help=f"How long a process waits for the others. [default: {TIMEOUT:g}]",
            rich_help_panel="Run",
        ),
    ] = None,
    **options: Any,
) -> None:
    """Train a private model: without arguments, DPIS on a sample of Fashion-MNIST."""
    keep_checkpoint, check_data = options.pop("keep_checkpoint"), options.pop("check_data")
    if check_data and resume is None:
        raise InputError(
            "--check-data compares data with that of an interrupted run: give --resume too"
        )
    asked = typed({"dataset": dataset, **options})
    if resume is not None and asked:
        flags = ", ".join(sorted(JobOptions.called(name) for name in asked))
        raise InputError(f"--resume goes on with what the run was started with: leave out {flags}")
    job_options = JobOptions.from_json(asked)
    if started_as_one_of_several():
        if processes is not None and not started_here():
            raise InputError("torchrun says how many processes there are: leave out --processes")
    elif processes is not None and processes > 1:
        if code := launch(context.obj, processes):
            raise typer.Exit(code)
        return
    from rich.console import Console

    from dpis.app.commands.outcome import (  # torch: only when it is needed
        outcome_as_json,
        print_outcome,
    )
    from dpis.app.jobs.training import resume_job, start_job
    from dpis.training.interrupt import InterruptedRunError
    from dpis.training.progress import ProgressBar

    reporter = ProgressBar(Console(stderr=True))
    try:
        with connected(timeout) as group:
            common: dict[str, Any] = {"keep_checkpoint": keep_checkpoint, "group": group}
            if resume is not None:
                job = resume_job(resume, reporter, check_data=bool(check_data), **common)
            else:
                job = start_job(job_options, reporter, **common)
    except InterruptedRunError as saved:  # typer says nothing of what is a KeyboardInterrupt
        tell(f"dpis: {saved}", INTERRUPTED)
        raise typer.Exit(INTERRUPTED) from None
    if not group.leads:
        return
    if as_json:
        typer.echo(json.dumps(outcome_as_json(job)))
    else:
        print_outcome(job, Console())
