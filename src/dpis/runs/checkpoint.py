"""The file of an unfinished run's secret state: written whole or not at all, readable by its owner only.

Its first line names the format and the sha256 of all that follows: a notice, a newline, the state as bytes. The
checksum shows accidents; whoever can write the file has the run's key anyway.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from dpis.errors import InputError
from dpis.runs.folder import SECRET, write_whole

FORMAT = "dpis-checkpoint/4"
NOTICE = (
    "SECRET: this file holds the key of the run's noise and a gradient norm of every record. Whoever has it can undo "
    "the protection. It is deleted when the run is complete."
)
_OTHER_VERSIONS = (b"PK\x03\x04", b"dpis-checkpoint/")  # the first was torch's archive alone


class DamagedCheckpointError(InputError):
    """The file is not what was written."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} is damaged, the run cannot go on from it: put back a copy of that file, or start the run anew in "
            "another folder. What the unfinished run has released counts as spent: its ledger tells"
        )


def write_checkpoint(path: Path, state: bytes | memoryview) -> None:
    """Replace the checkpoint at once: a crash leaves the old or the new, never half."""
    write_whole(path, sealed(state), mode=SECRET)


def sealed(state: bytes | memoryview) -> bytes:
    """The state with what says that it is whole, and secret, in front."""
    checksum = hashlib.sha256(notice := f"{NOTICE}\n".encode())
    checksum.update(state)
    return b"".join((_first_line(checksum.hexdigest()), notice, state))


def read_checkpoint(path: Path) -> memoryview:
    """The state that was written last.

    Raises:
        InputError: there is none, it is not whole, or another version wrote it.
    """
    if not path.exists():
        raise InputError(
            f"nothing to resume in {path.parent}: it holds no {path.name} (a run that is complete deletes it)"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    return unsealed(content, path)


def unsealed(content: bytes, path: Path) -> memoryview:
    """The state that `sealed` was given.

    Args:
        content: what it made of it.
        path: of the file that held it, for errors.

    Raises:
        InputError: it is not whole, or another version wrote it.
    """
    if content.startswith(_OTHER_VERSIONS) and not content.startswith(f"{FORMAT} ".encode()):
        raise InputError(
            f"{path} is a checkpoint of another version, this one reads {FORMAT}: go on with the version of dpis that "
            "wrote it, or start the run anew in another folder"
        )
    start = len(_first_line("0" * 64))
    body = memoryview(content)[start:]
    if content[:start] != _first_line(hashlib.sha256(body).hexdigest()):
        raise DamagedCheckpointError(path)
    return body[len(NOTICE.encode()) + 1 :]


def _first_line(checksum: str) -> bytes:
    return f"{FORMAT} sha256 {checksum}\n".encode()
