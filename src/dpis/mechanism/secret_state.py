"""The secret state of an unfinished run, tensors and all, in its checkpoint file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, Any

import torch

from dpis.errors import InputError
from dpis.runs.checkpoint import (
    DamagedCheckpointError,
    read_checkpoint,
    sealed,
    unsealed,
    write_checkpoint,
)


def save_secret_state(place: Path | IO[bytes], state: dict[str, Any]) -> None:
    """Replace the checkpoint by one that holds this state; or write it into an open file, which its owner protects."""
    buffer = io.BytesIO()  # torch has an error of its own for a full disk
    torch.save(state, buffer)
    if isinstance(place, Path):
        write_checkpoint(place, buffer.getbuffer())
    else:
        place.write(sealed(buffer.getbuffer()))


def load_secret_state(place: Path | IO[bytes], *parts: str) -> dict[str, Any]:
    """The state that was saved last: tensors and plain values alone, nothing in the file is run.

    Args:
        place: the checkpoint file, or a file that is open at the beginning of what was written.
        parts: what it must hold.

    Raises:
        InputError: there is none, it is not one of ours, or it is of another kind.
    """
    path = place if isinstance(place, Path) else Path(str(getattr(place, "name", "the file")))
    content = io.BytesIO(
        read_checkpoint(path) if isinstance(place, Path) else unsealed(place.read(), path)
    )
    try:
        state = torch.load(content, map_location="cpu", weights_only=True)
    except Exception:  # torch and pickle have many for bytes that are not theirs
        raise DamagedCheckpointError(path) from None
    if not isinstance(state, dict):
        raise DamagedCheckpointError(path)
    if not state.keys() >= set(parts):
        raise InputError(
            f"{path} is a checkpoint of another kind: a run of `dpis train` or `dpis.train` is resumed there, a loop "
            "by load_checkpoint of its PrivacyEngine. Nothing was changed"
        )
    return state
