"""What a finished run says of itself: config, claim, metrics, versions. No times, nothing private."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpis.accounting import Adjacency, CountSource, Unit
from dpis.mechanism import Method
from dpis.mechanism.plan import OpenEnded
from dpis.runs.values import config_to_json, versions

if TYPE_CHECKING:
    from dpis.training.run import Run

PROTECTS = {Unit.RECORD: "one record", Unit.USER: "one user with all of their rows"}
"""Whom a claim protects, in words."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The contents of ``summary.json``.

    Attributes:
        method: by name.
        claim: epsilon, delta, adjacency, unit of protection, mode; None for `sgd`.
        not_for_release: why the model must stay in the house although the numbers are right.
        metrics: on held-out data, of the released weights after the last epoch.
        notes: what the claim covers and what not, in sentences.
        config: every public number that was chosen.
        recipe: what else was chosen by whoever started the run.
        history: released values by epoch.
        stopped_early: before the plan's end, on a held-out metric.
        model_sha256: of the released weights.
        versions: of what the numbers depend on.
        gradient_evaluations: private; only with diagnostics.
    """

    method: str
    claim: dict[str, Any] | None
    not_for_release: tuple[str, ...]
    metrics: dict[str, float]
    notes: tuple[str, ...]
    config: dict[str, Any]
    recipe: dict[str, Any]
    history: list[dict[str, Any]]
    stopped_early: bool
    model_sha256: str
    versions: dict[str, str]
    gradient_evaluations: int | None = None

    @classmethod
    def of(
        cls,
        run: Run,
        *,
        metrics: dict[str, float],
        history: list[dict[str, Any]],
        stopped_early: bool,
        model_sha256: str,
        gradient_evaluations: int | None,
    ) -> Summary:
        """Of a run whose model has just been written."""
        marks = {"seeded": run.key.seeded, "diagnostics": run.options.diagnostics}
        return cls(
            method=run.config.method.value,
            claim=_claim(run),
            not_for_release=tuple(name for name, marked in marks.items() if marked),
            metrics=metrics,
            notes=_notes(run),
            config=json.loads(config_to_json(run.config)),
            recipe=dict((run.options.recipe or {}).get("public", {})),
            history=history,
            stopped_early=stopped_early,
            model_sha256=model_sha256,
            versions=versions(),
            gradient_evaluations=gradient_evaluations,
        )

    def as_json(self) -> dict[str, Any]:
        """For the file; what is private is absent unless asked for, and a metric that is no number is null."""
        values = dict(vars(self))
        values["metrics"] = _finite(self.metrics)
        values["history"] = [_finite(epoch) for epoch in self.history]
        if self.gradient_evaluations is None:
            del values["gradient_evaluations"]
        return values


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    infinite = {k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    return {name: None if name in infinite else value for name, value in values.items()}


def _claim(run: Run) -> dict[str, Any] | None:
    accounting = run.mechanism.plan.accounting
    if accounting is None or isinstance(accounting, OpenEnded):
        return None
    return {
        "epsilon": accounting.budget.epsilon,
        "delta": accounting.budget.delta,
        "adjacency": accounting.adjacency.value,
        "protects": PROTECTS[Unit.USER if run.options.user_level else Unit.RECORD],
        "n_public": run.mechanism.plan.workload.n_public,
        "n_public_source": run.mechanism.plan.config.n_public_source.value,
        "mode": "adaptive" if run.config.method is Method.DPIS_ADAPTIVE else "predeclared",
    }


def _notes(run: Run) -> tuple[str, ...]:
    plan = run.mechanism.plan
    if plan.accounting is None or isinstance(plan.accounting, OpenEnded):
        return ("sgd is not private: this model may reveal its training data.",)
    notes = []
    if plan.accounting.adjacency is Adjacency.ZERO_OUT:
        notes.append(
            "The number of records is treated as public: it was read from the data set. Give n_public to protect it."
        )
    if plan.accounting.budget.delta * plan.workload.n_public >= 1:
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
    return tuple(notes)
