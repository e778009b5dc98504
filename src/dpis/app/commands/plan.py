"""`dpis plan`: how much noise for this budget?"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from dpis.app.commands.flags import flag, typed, with_flags
from dpis.app.jobs.job_options import JobOptions, shell_knobs
from dpis.options import Privacy, knobs

OFFERED = ("batch_size", "epochs", *(name for name in shell_knobs() if name in knobs(Privacy)))
"""The options of `dpis train` that decide about noise. A plan sees no data, so it must be told how much there is."""


@with_flags(flag(JobOptions, name, required=name == "n_public") for name in OFFERED)
def plan(
    *,
    adjacency: Annotated[
        str,
        typer.Option(
            metavar="add-remove|zero-out", help="Between which datasets the promise holds."
        ),
    ] = "add-remove",
    release: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MULTIPLIER[@epoch]",
            help="Another noisy statistic, paid for first; @epoch: once an epoch. May be repeated.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
    **options: Any,
) -> None:
    """How much noise would `dpis train` add with these options?"""
    from dpis.app.commands.plan_tables import (  # accounting: only when it is needed
        made_plan,
        plan_as_json,
        print_plan,
    )

    asked = JobOptions(**typed(options))
    made = made_plan(asked, adjacency, release or [])
    if asked.delta * made.workload.n_public >= 1:
        typer.echo(
            "dpis: warning: delta is not below 1 / n_public: the promise then allows to publish a record now and then. "
            f"Choose a delta well below {1 / made.workload.n_public:g}",
            err=True,
        )
    if as_json:
        typer.echo(json.dumps(plan_as_json(made)))
    else:
        print_plan(made)
