"""What a finished run says of itself, read from its folder with suspicion."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpis.errors import InputError
from dpis.runs.folder import RunFolder

_NUMBERS = ("kappa", "clip_norm", "grad_noise_multiplier", "noise_multiplier", "sampling_rate")
_HELD_OUT = ("held_out_accuracy", "held_out_squared_error")

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
