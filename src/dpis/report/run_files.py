"""A finished run as its folder shows it: the summary, read with suspicion, and what its ledger proves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpis.accounting import Verdict, verify_ledger
from dpis.errors import BrokenLedgerError, InputError

_NUMBERS = ("kappa", "clip_norm", "grad_noise_multiplier", "noise_multiplier", "sampling_rate")
_HELD_OUT = ("held_out_accuracy", "held_out_squared_error")


@dataclass(frozen=True, slots=True)
class RunReport:
    """A finished run as its folder shows it.

    Attributes:
        folder: where it is.
        summary: as written by the run; nothing in it is believed about the guarantee.
        verdict: what the ledger proves; None if there is none (`sgd`), or if it contradicts itself.
        problem: why the claim does not hold; None if it does, or if nothing is claimed.
    """

    folder: Path
    summary: Mapping[str, Any]
    verdict: Verdict | None
    problem: str | None

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
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: name the folder of a finished run")
    summary_file, model = folder / "summary.json", folder / "model.safetensors"
    if not (summary_file.is_file() and model.is_file()):
        unfinished = (folder / "checkpoint.secret").exists()
        hint = (
            f": it is unfinished, go on with `dpis train --resume {folder}`" if unfinished else ""
        )
        raise InputError(f"{folder} holds no finished run{hint}")
    summary = _read_summary(summary_file)
    ledger = folder / "ledger.jsonl"
    if summary["claim"] is None and not ledger.exists():
        return RunReport(folder, summary, None, None)
    try:
        verdict = verify_ledger(ledger, model)
    except BrokenLedgerError as error:
        return RunReport(folder, summary, None, str(error))
    return RunReport(folder, summary, verdict, verdict.problem or _contradiction(summary, verdict))


def _contradiction(summary: Mapping[str, Any], verdict: Verdict) -> str | None:
    claim, proven = summary["claim"], verdict.ledger.header.claim
    if claim is None or (claim["epsilon"], claim["delta"]) != (proven.epsilon, proven.delta):
        return (
            f"summary.json does not claim what the ledger proves, epsilon = {proven.epsilon:g} and "
            f"delta = {proven.delta:g}: one of the two files was changed"
        )
    return None


_SHAPE: dict[str, tuple[type, ...]] = {
    "method": (str,),
    "claim": (dict, type(None)),
    "not_for_release": (list,),
    "metrics": (dict,),
    "notes": (list,),
    "config": (dict,),
    "recipe": (dict,),
    "history": (list,),
    "stopped_early": (bool,),
    "versions": (dict,),
}


def _read_summary(path: Path) -> Mapping[str, Any]:
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
    for name, kinds in _SHAPE.items():
        if not isinstance(summary.get(name, ...), kinds):
            return f"its field {name!r} is missing or of the wrong type"
    claim = summary["claim"]
    if claim is not None and not all(_number(claim.get(name)) for name in ("epsilon", "delta")):
        return "its claim has no epsilon and delta"
    if not all(_number(value) or value is None for value in summary["metrics"].values()):
        return "its metrics are no numbers"
    for epoch in summary["history"]:
        if not isinstance(epoch, dict) or not _number(epoch.get("epoch")):
            return "its history is no list of epochs"
        if any(
            not (_number(epoch.get(name)) or epoch.get(name) is None)
            for name in (*_NUMBERS, *_HELD_OUT)
        ):
            return "its history holds something that is no number"
    return None


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
