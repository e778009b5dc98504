"""Files that are either whole or absent, and a folder for each run."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dpis.errors import InputError

SECRET, PUBLIC = 0o600, 0o644


def write_whole(path: Path, write: Callable[[Path], None], mode: int = PUBLIC) -> None:
    """Let ``write`` fill a new file, then put it in place of the old one, at once and on the disk.

    Raises:
        InputError: the disk is full or the folder cannot be written; the old file is untouched.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        try:
            os.fchmod(handle, mode)
            os.close(handle)
            write(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.chmod(temporary, mode)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}. What was there before is untouched"
        ) from None


def _sync_folder(folder: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where everything of one run is."""

    path: Path

    @property
    def model(self) -> Path:
        """The released weights."""
        return self.path / "model.safetensors"

    @property
    def loader(self) -> Path:
        """How to use the weights with plain PyTorch."""
        return self.path / "model.py"

    @property
    def ledger(self) -> Path:
        """The claim and every event."""
        return self.path / "ledger.jsonl"

    @property
    def summary(self) -> Path:
        """What was run, what is claimed, what came out."""
        return self.path / "summary.json"

    @property
    def checkpoint(self) -> Path:
        """The secret state of an unfinished run."""
        return self.path / "checkpoint.secret"

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """A new folder, or one that is empty."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            occupied = any(path.iterdir())
        except OSError as error:
            raise InputError(f"cannot use {path} as a run folder: {error.strerror}") from None
        folder = cls(path)
        if folder.checkpoint.exists():
            raise InputError(
                f"{path} holds an unfinished run: go on with it by resume, or choose another folder"
            )
        if occupied:
            raise InputError(
                f"{path} is not empty: a run needs a folder of its own, choose another"
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise InputError(f"cannot write to the folder {path}: choose another")
        return folder


def next_run_folder(parent: Path) -> Path:
    """``parent/1``, ``parent/2``, …: the first number that is not taken."""
    number = 1
    while (parent / str(number)).exists():
        number += 1
    return parent / str(number)
