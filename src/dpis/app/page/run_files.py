"""A finished run as its folder shows it: the summary, read with suspicion, and what its ledger proves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpis.accounting import Verdict, verify_ledger
from dpis.auditing.findings import FILE, Findings
from dpis.errors import BrokenLedgerError
from dpis.runs.folder import RunFolder
from dpis.runs.summary import read_summary


@dataclass(frozen=True, slots=True)
class RunReport:
    """A finished run as its folder shows it.

    Attributes:
        folder: where it is.
        summary: as written by the run; nothing in it is believed about the guarantee.
        verdict: what the ledger proves; None if there is none (`sgd`), or if it contradicts itself.
        problem: why the claim does not hold; None if it does, or if nothing is claimed.
        audit: what an attack on this run found; None if it was not audited.
    """

    folder: Path
    summary: Mapping[str, Any]
    verdict: Verdict | None
    problem: str | None
    audit: Findings | None = None

    @property
    def private(self) -> bool:
        """Whether the run claims anything."""
        return self.summary["claim"] is not None

    @property
    def marks(self) -> tuple[str, ...]:
        """Why the model is not for release."""
        said = tuple(self.summary["not_for_release"])
        proven = () if self.verdict is None else self.verdict.not_for_release
        return tuple(dict.fromkeys((*proven, *said)))


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────


def read_run(folder: Path) -> RunReport:
    """Read a run's folder and verify its ledger.

    Raises:
        InputError: there is no finished run, or its summary is not one.
        LedgerError: a file that is no ledger at all.
    """
    files = RunFolder(folder)
    summary = read_summary(files)
    if summary["claim"] is None and not files.ledger.exists():
        return RunReport(folder, summary, None, None)
    try:
        verdict = verify_ledger(files.ledger, files.model)
    except BrokenLedgerError as error:
        return RunReport(folder, summary, None, str(error))
    problem = verdict.problem or _contradiction(summary, verdict)
    return RunReport(folder, summary, verdict, problem, _audit(folder))


def _audit(folder: Path) -> Findings | None:
    path = folder / FILE
    return Findings.read(path) if path.is_file() else None


def _contradiction(summary: Mapping[str, Any], verdict: Verdict) -> str | None:
    claim, proven = summary["claim"], verdict.ledger.header.claim
    if claim is None or (claim["epsilon"], claim["delta"]) != (proven.epsilon, proven.delta):
        return (
            f"summary.json does not claim what the ledger proves, epsilon = {proven.epsilon:g} and "
            f"delta = {proven.delta:g}: one of the two files was changed"
        )
    return None
