"""The secret state of an unfinished run: written whole or not at all, readable by its owner only.

Its first line names the format and the sha256 of all that follows: a notice, a newline, what torch stores. The sum
shows accidents; whoever can write the file has the run's key anyway.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import torch

from dpis.errors import InputError
from dpis.runs.folder import SECRET, write_whole

FORMAT = "dpis-checkpoint/2"
NOTICE = (
    "SECRET: this file holds the key of the run's noise and a gradient norm of every record. Whoever has it can undo "
    "the protection. It is deleted when the run is complete."
)
_OTHER_VERSIONS = (b"PK\x03\x04", b"dpis-checkpoint/")  # the first was torch's archive alone


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at once: a crash leaves the old or the new, never half."""
    buffer = io.BytesIO()  # torch has an error of its own for a full disk
    torch.save(state, buffer)
    write_whole(path, sealed(buffer.getbuffer()), mode=SECRET)


def sealed(payload: bytes | memoryview) -> bytes:
    """The payload with what says that it is whole, and secret, in front."""
    checksum = hashlib.sha256(notice := f"{NOTICE}\n".encode())
    checksum.update(payload)
    return b"".join((_first_line(checksum.hexdigest()), notice, payload))


def _first_line(checksum: str) -> bytes:
    return f"{FORMAT} sha256 {checksum}\n".encode()


def _opened(content: bytes) -> memoryview | None:
    """The payload; None if it is not what was sealed."""
    start = len(_first_line("0" * 64))
    body = memoryview(content)[start:]
    if content[:start] != _first_line(hashlib.sha256(body).hexdigest()):
        return None
    return body[len(NOTICE.encode()) + 1 :]


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
    if content.startswith(_OTHER_VERSIONS) and not content.startswith(f"{FORMAT} ".encode()):
        raise InputError(
            f"{path} is a checkpoint of another version, this one reads {FORMAT}: go on with the version of dpis that "
            "wrote it, or start the run anew in another folder"
        )
    payload = _opened(content)
    try:
        state = None if payload is None else _loaded(payload)
    except Exception:  # torch and pickle have many for bytes that are not theirs
        state = None
    if not isinstance(state, dict):
        raise InputError(
            f"{path} is damaged, the run cannot go on from it: put back a copy of that file, or start the run anew in "
            "another folder. What the unfinished run has released counts as spent: its ledger tells"
        )
    return state


def _loaded(payload: memoryview) -> Any:
    """Tensors and plain values alone: nothing in the file is run."""
    return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
