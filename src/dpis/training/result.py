"""What comes out of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpis.accounting import Budget
from dpis.runs.summary import Summary


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """Private values, for the operator alone."""

    gradient_evaluations: int
    """Rows whose gradients were computed: every view of a record, and rows that only fill one up."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out of a run.

    Attributes:
        folder: where its files are.
        claim: what is guaranteed; None: nothing.
        metrics: on held-out data, of the released weights after the last epoch.
        epochs: how many were trained.
        summary: as it stands in the folder.
        diagnostics: private values; None unless they were asked for.
    """

    folder: Path
    claim: Budget | None
    metrics: dict[str, float]
    epochs: int
    summary: Summary
    diagnostics: Diagnostics | None
