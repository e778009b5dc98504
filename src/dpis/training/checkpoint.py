"""The secret state of an unfinished run: written whole or not at all, readable by its owner only."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from dpis.errors import InputError
from dpis.training.files import SECRET, write_whole

FORMAT = "dpis-checkpoint/1"
NOTICE = (
    "SECRET: this file holds the key of the run's noise and a gradient norm of every record. Whoever has it can undo "
    "the protection. It is deleted when the run is complete."
)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at once: a crash leaves the old or the new, never half."""
    buffer = io.BytesIO()  # torch has an error of its own for a full disk
    torch.save({"notice": NOTICE, "format": FORMAT, **state}, buffer)
    write_whole(path, buffer.getbuffer(), mode=SECRET)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state that was saved last.

    Raises:
        InputError: there is none, or it is not one of ours.
    """
    if not path.exists():
        raise InputError(
            f"nothing to resume in {path.parent}: it holds no {path.name} (a run that is complete deletes it)"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # torch and pickle have many for bytes that were changed
        raise InputError(
            f"{path} is damaged, the run cannot go on from it: put back a copy of that file, or start the run anew in "
            "another folder. What the unfinished run has released counts as spent: its ledger tells"
        ) from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise InputError(f"{path} is not a checkpoint of this version ({FORMAT})")
    return state
