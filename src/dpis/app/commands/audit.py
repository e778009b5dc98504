"""`dpis audit`: does the claim survive an attack?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpis.app.commands.flags import flag, typed, with_flags
from dpis.app.commands.train import OFFERED
from dpis.app.jobs.job_options import JobOptions, shell_knobs
from dpis.errors import InputError
from dpis.options import Privacy, default_in_words, knobs

if TYPE_CHECKING:
    from dpis.auditing import Findings
    from dpis.mechanism import Config

REFUTED = 1
"""The exit code if more leaked than the claim allows."""

_NOT_OFFERED = ("keep_checkpoint", "check_data", "diagnostics")
AUDIT = "Audit"


@with_flags(flag(JobOptions, name) for name in OFFERED if name not in _NOT_OFFERED)
def audit(
    dataset: Annotated[
        str | None,
        typer.Argument(
            metavar="DATASET",
            help=f"As for `dpis train`. [default: {default_in_words(JobOptions, 'dataset')}]",
            rich_help_panel="Arguments",
        ),
    ] = None,
    *,
    mechanism: Annotated[
        bool,
        typer.Option(
            "--mechanism",
            help="Attack sampling, clipping and noise alone, on their worst case; needs --n-public.",
            rich_help_panel=AUDIT,
        ),
    ] = False,
    case: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="Attack a model of your own on a few records: the factory makes (model, batch, loss); the first "
            "record of the batch is the canary.",
            rich_help_panel=AUDIT,
        ),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            min=100,
            help="Of --mechanism or --case: more of them show more. [default: 1000000, or 300]",
            show_default=False,
            rich_help_panel=AUDIT,
        ),
    ] = None,
    canaries: Annotated[
        int,
        typer.Option(
            min=1,
            help="Planted among the records: more of them show more, and cost more accuracy. [default: 1000]",
            show_default=False,
            rich_help_panel=AUDIT,
        ),
    ] = 1000,
    black_box: Annotated[
        bool,
        typer.Option(
            "--black-box",
            help="Canaries are records with a wrong label, found by the model's losses: shows far less.",
            rich_help_panel=AUDIT,
        ),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            help="Train without canaries, too, to see what they cost.", rich_help_panel=AUDIT
        ),
    ] = True,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object.", rich_help_panel=AUDIT),
    ] = False,
    **options: Any,
) -> None:
    """Attack the claim: a lower bound on epsilon beside it. Exit code 1: more leaked than the claim allows."""
    asked = typed({"dataset": dataset, **options})
    if case is not None:
        found = _of_case(asked, case, runs or 300)
    elif mechanism:
        found = _of_mechanism(asked, runs or 1_000_000)
    else:
        found = _of_run(asked, canaries, black_box, compare)
    _show(found, as_json)


def _of_run(asked: dict[str, Any], canaries: int, black_box: bool, compare: bool) -> Findings:
    from rich.console import Console

    from dpis.app.jobs.audits import audit_job
    from dpis.auditing.black_box import MislabelledCanaries
    from dpis.auditing.canaries import Canaries
    from dpis.training.interrupt import InterruptedRunError
    from dpis.training.progress import ProgressBar

    reporter = ProgressBar(Console(stderr=True))
    planted = MislabelledCanaries(canaries) if black_box else Canaries(canaries)
    try:
        return audit_job(JobOptions.from_json(asked), planted, reporter, compare=compare)
    except InterruptedRunError:
        raise InputError("interrupted: an audit is not resumed, start it anew") from None


def _of_mechanism(asked: dict[str, Any], runs: int) -> Findings:
    from dpis.auditing.mechanism_audit import audit_mechanism  # torch: only when it is needed

    if "n_public" not in asked:
        raise InputError("--mechanism looks at no data, so it must be told --n-public")
    return audit_mechanism(_config(asked, "--mechanism", asked["n_public"]), runs=runs)


def _of_case(asked: dict[str, Any], case: str, runs: int) -> Findings:
    from dpis.app.jobs.audits import worst_case
    from dpis.auditing.model_audit import audit_model

    tried = worst_case(case)
    return audit_model(_config(asked, "--case", tried.records), tried, runs=runs)


def _config(asked: dict[str, Any], flag_of_audit: str, records: int) -> Config:
    """What was asked for, without data."""
    from dpis.mechanism import Config

    used = {"batch_size", "epochs"} | (shell_knobs().keys() & knobs(Privacy).keys())
    if unused := sorted(JobOptions.called(name) for name in asked.keys() - used):
        raise InputError(f"{flag_of_audit} looks at no dataset: leave out {', '.join(unused)}")
    options = JobOptions(**asked)
    batch, epochs = options.batch_size, options.epochs
    return Config.settle(options.privacy, records=records, batch_size=batch, epochs=epochs)


def _show(found: Findings, as_json: bool) -> None:
    from dpis.auditing.findings import in_words

    typer.echo(json.dumps(found.to_json()) if as_json else "\n".join(in_words(found)))
    if found.refuted:
        raise typer.Exit(REFUTED)
