"""``summary.json``: what a finished run says of itself. Written without private values, read with suspicion."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dpis.accounting import Unit
from dpis.errors import InputError
from dpis.runs.folder import RunFolder, write_whole

PROTECTS = {Unit.RECORD: "one record", Unit.USER: "one user with all of their rows"}
"""Whom a claim protects, in words."""


def versions() -> dict[str, str]:
    """Of everything the numbers depend on."""
    packages = ("dpis", "torch", "dp-accounting", "numpy")
    return {name: version(name) for name in packages} | {"python": platform.python_version()}


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────


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

    def as_json(self) -> dict[str, Any]:
        """For the file; what is private is absent unless asked for, and a metric that is no number is null."""
        values = dict(vars(self))
        values["metrics"] = _finite(self.metrics)
        values["history"] = [_finite(epoch) for epoch in self.history]
        if self.gradient_evaluations is None:
            del values["gradient_evaluations"]
        return values

    def write(self, folder: RunFolder) -> None:
        """Put it into its place in a run's folder."""
        text = json.dumps(self.as_json(), indent=2, allow_nan=False) + "\n"
        write_whole(folder.summary, text.encode())


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    infinite = {k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    return {name: None if name in infinite else value for name, value in values.items()}


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────

_SHAPE: dict[str, type | tuple[type, ...]] = {
    "method": str,
    "claim": (dict, type(None)),
    "not_for_release": list,
    "metrics": dict,
    "notes": list,
    "config": dict,
    "recipe": dict,
    "history": list,
    "stopped_early": bool,
    "versions": dict,
}
_OF_AN_EPOCH = (
    "kappa",
    "clip_norm",
    "grad_noise_multiplier",
    "noise_multiplier",
    "sampling_rate",
    "held_out_accuracy",
    "held_out_squared_error",
)


def read_summary(folder: RunFolder) -> Mapping[str, Any]:
    """The summary of a run that is complete.

    Raises:
        InputError: there is no finished run, or its summary is not one.
    """
    path = folder.path
    if not path.is_dir():
        raise InputError(
            f"{path} is no folder and holds no finished run: name the folder of a finished run"
        )
    if not (folder.summary.is_file() and folder.model.is_file()):
        unfinished = folder.checkpoint.exists()
        hint = f": it is unfinished, go on with `dpis train --resume {path}`" if unfinished else ""
        raise InputError(f"{path} holds no finished run{hint}")
    return _parsed(folder.summary)


def _parsed(path: Path) -> Mapping[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path} is not a run's summary: it is no JSON") from None
    problem = _problem_of(summary)
    if problem is not None:
        raise InputError(f"{path} is not a run's summary: {problem}")
    return dict(summary)


def _problem_of(summary: object) -> str | None:
    if not isinstance(summary, dict):
        return "no object"
    for name, kind in _SHAPE.items():
        if not isinstance(summary.get(name, ...), kind):
            return f"its field {name!r} is missing or of the wrong type"
    claim = summary["claim"]
    if claim is not None and not all(_is_number(claim.get(name)) for name in ("epsilon", "delta")):
        return "its claim has no epsilon and delta"
    if not all(_is_number(value) or value is None for value in summary["metrics"].values()):
        return "its metrics are no numbers"
    for epoch in summary["history"]:
        if not isinstance(epoch, dict) or not _is_number(epoch.get("epoch")):
            return "its history is no list of epochs"
        values = [epoch.get(name) for name in _OF_AN_EPOCH]
        if not all(_is_number(value) or value is None for value in values):
            return "its history holds something that is no number"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
