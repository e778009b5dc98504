"""`dpis verify`: does a finished run's claim hold?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpis.errors import BrokenLedgerError

if TYPE_CHECKING:
    from dpis.accounting import Verdict

DOES_NOT_HOLD = 1


def verify(
    ledger: Annotated[Path, typer.Argument(help="The run's ledger.jsonl.")],
    model: Annotated[
        Path | None,
        typer.Option(help="The released model file, to compare with the ledger's end line."),
    ] = None,
) -> None:
    """Recompute epsilon from a ledger alone. Exit code 0: the claim holds; 1: it does not; 2: not a ledger."""
    from dpis.accounting import verify_ledger  # seconds: only when it is needed

    try:
        verdict = verify_ledger(ledger, model)
    except BrokenLedgerError as error:
        typer.echo(f"does not hold: {error}")
        raise typer.Exit(DOES_NOT_HOLD) from None
    typer.echo(describe(verdict))
    if not verdict.holds:
        raise typer.Exit(DOES_NOT_HOLD)


def describe(verdict: Verdict) -> str:
    """The verdict in words, the answer first."""
    from dpis.accounting import Mode

    header, end = verdict.ledger.header, verdict.ledger.end
    claim = f"(epsilon = {header.claim.epsilon:g}, delta = {header.claim.delta:g})"
    lines = [f"holds: {claim}" if verdict.holds else f"does not hold: {verdict.problem}"]
    if verdict.not_for_release:
        lines.append(f"not for release: {', '.join(verdict.not_for_release)}")
    planned = sum(run.count for run in header.planned)
    of_plan = f" of {planned:,} planned" if header.mode is Mode.PREDECLARED else ""
    lines += [
        f"  claim      {claim} for one {header.unit}, {header.adjacency} adjacency",
        f"  n_public   {header.n_public:,} ({header.n_public_source})",
        f"  mode       {header.mode}",
        f"  events     {len(verdict.ledger.entries):,}{of_plan}",
        f"  epsilon    {verdict.epsilon_spent:.6g} recomputed for what was released, "
        f"{verdict.epsilon_claimable:.6g} for what the claim covers",
        f"  model      {'no end line' if end is None else 'sha256 ' + end.model_sha256}",
        "  The hash chain shows accidents, not a forger: trust in the file is trust in who kept it.",
    ]
    return "\n".join(lines)
