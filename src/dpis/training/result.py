"""What comes out of a run, and what is said about it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpis.accounting import Adjacency, Budget, CountSource, Unit
from dpis.runs.summary import PROTECTS, Summary, versions
from dpis.training.run import Run, config_to_json


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


def summary_of(
    run: Run,
    *,
    metrics: dict[str, float],
    history: list[dict[str, Any]],
    stopped_early: bool,
    model_sha256: str,
    diagnostics: Diagnostics | None,
) -> Summary:
    """Of a run whose model has just been written."""
    marks = {
        "seeded": run.key.seeded,
        "diagnostics": run.options.diagnostics,
        "audit": run.options.audited,
    }
    return Summary(
        method=run.config.method.value,
        claim=_claim(run),
        not_for_release=tuple(name for name, marked in marks.items() if marked),
        metrics=metrics,
        notes=tuple(_notes(run)),
        config=json.loads(config_to_json(run.config)),
        recipe=dict((run.options.recipe or {}).get("public", {})),
        history=history,
        stopped_early=stopped_early,
        model_sha256=model_sha256,
        versions=versions(),
        gradient_evaluations=None if diagnostics is None else diagnostics.gradient_evaluations,
    )


def _claim(run: Run) -> dict[str, Any] | None:
    plan = run.mechanism.plan
    if plan.claim is None:
        return None
    return {
        "epsilon": plan.claim.epsilon,
        "delta": plan.claim.delta,
        "adjacency": plan.privacy.adjacency.value,
        "protects": PROTECTS[Unit.USER if run.options.user_level else Unit.RECORD],
        "n_public": plan.workload.n_public,
        "n_public_source": plan.config.n_public_source.value,
        "mode": "adaptive" if plan.privacy.adapts else "predeclared",
    }


def _notes(run: Run) -> list[str]:
    """What the claim covers and what not."""
    plan = run.mechanism.plan
    if plan.claim is None:
        return ["sgd is not private: this model may reveal its training data."]
    notes = []
    if plan.privacy.adjacency is Adjacency.ZERO_OUT:
        notes.append(
            "The number of records is treated as public: it was read from the data set. Give n_public to protect it."
        )
    if plan.claim.delta * plan.workload.n_public >= 1:
        notes.append(
            "delta is not below 1 / number of records: the promise then allows to publish a record now and then. "
            "Choose a smaller delta."
        )
    if plan.config.n_public_source is CountSource.RELEASED:
        notes.append("The number of records was released with noise, and paid for.")
    notes += [
        "Held-out records that the model was measured on are not protected, nor is what you learn by comparing runs "
        "(tuning on this data spends a budget of its own).",
        "The claim is that of the whole plan, also after an early stop.",
    ]
    for what in (run.options.recipe or {}).get("public_by_confirmation", ()):
        notes.append(f"You confirmed that the {what} are public: they were read from the data.")
    if run.options.batch_shaped:
        notes.append(
            "Norms are batch-shaped: the rounding of a record's norm may depend on its batch. That the model does not "
            "see how far a record is padded was tried out on some records, not proved."
        )
    return notes
