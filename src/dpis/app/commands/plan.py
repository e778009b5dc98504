"""`dpis plan`: how much noise for this budget?"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from dpis.app.commands.flags import flag, with_flags
from dpis.app.jobs.job_options import PlanOptions

SAID = ("epsilon", "n_public", "batch_size", "epochs")
"""What a plan cannot do without."""
OFFERED = (*SAID, "delta", "kappa", "equivalent_batch", "accountant", "reserve_share", "decay_rate")


HELP = {
    "accountant": "Predeclared: pld (default) or rdp. Adaptive: rdp.",
    "decay_rate": "Predeclared: noise falls as exp(-rate * epoch), typically 0.001 to 0.01.",
}


@with_flags(flag(PlanOptions, name, required=name in SAID, help=HELP.get(name)) for name in OFFERED)
def plan(
    *,
    mode: Annotated[
        str,
        typer.Option(
            metavar="predeclared|adaptive", help="What the claim rests on.", show_default=True
        ),
    ] = "predeclared",
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
    """How much noise does this budget ask for?"""
    from dpis.app.commands.plan_tables import (  # accounting: only when it is needed
        made_plan,
        plan_as_json,
        print_plan,
    )

    asked = PlanOptions(**{name: value for name, value in options.items() if value is not None})
    made = made_plan(asked, mode=mode, adjacency=adjacency, releases=release or [])
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
