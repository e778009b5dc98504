"""Files that are either whole or absent, and a folder for each run."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dpis.accounting.ledger_writer import sync_folder, write_through
from dpis.errors import InputError

SECRET, PUBLIC = 0o600, 0o666  # the process's umask takes away from both


def write_whole(path: Path, contents: bytes | memoryview, mode: int = PUBLIC) -> None:
    """Put a new file in place of the old one, at once and on the disk.

    Raises:
        InputError: the disk is full or the folder cannot be written; the old file is untouched.
    """
    with Replacement(path, contents, mode) as new:
        new.put_in_place()


class Replacement:
    """A new file that is whole and on the disk, beside the one that it may replace; gone if the ``with`` fails.

    Args:
        path: of the file to replace, or that is to be.
        contents: of the new one.
        mode: of the new one.

    Raises:
        InputError: the disk is full or the folder cannot be written; the old file is untouched.
    """

    def __init__(self, path: Path, contents: bytes | memoryview, mode: int = PUBLIC) -> None:
        self.path, self._new = path, _unfinished(path)
        with self._plainly_refused():
            try:
                self._new.unlink(missing_ok=True)  # of a process that was killed
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with open(os.open(self._new, flags, mode), "wb") as file:
                    write_through(file, contents)
            except BaseException:
                self._remove()
                raise

    def put_in_place(self) -> None:
        """Replace the old file, at once."""
        with self._plainly_refused():
            os.replace(self._new, self.path)
            sync_folder(self.path.parent)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._new.unlink()

    @contextlib.contextmanager
    def _plainly_refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"cannot write {self.path}: {error.strerror or error}. What was there before is untouched"
            ) from None

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._remove()


def _unfinished(path: Path) -> Path:
    """One name for all attempts, so that a killed process leaves at most one; it may hold a secret."""
    return path.with_name(f".{path.name}.unfinished")


class FolderLock:
    """One run at a time works in a folder, where the platform has advisory locks: until released, or the ``with`` ends.

    Args:
        folder: which must exist; a file serves too.
        wait: until it is free.

    Raises:
        InputError: another run, of this process or another, is at work there.
    """

    def __init__(self, folder: Path, *, wait: bool = False) -> None:
        self._let_go: Callable[[], object] = lambda: None
        try:
            import fcntl
        except ImportError:  # pragma: no cover - a platform without them
            return
        descriptor = os.open(folder, os.O_RDONLY)
        self._let_go = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            self.release()
            raise InputError(
                f"{folder} is being written by another process: wait for it, or stop it"
            ) from None
        except OSError:  # pragma: no cover - a file system without locks
            pass

    def release(self) -> None:
        """Let others in; doing it twice changes nothing."""
        self._let_go()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


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

    def claim_new(self) -> FolderLock:
        """Make the folder, or take one that is empty."""
        path = self.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(path)
            if not self.checkpoint.exists():  # killed while it wrote its first
                _unfinished(self.checkpoint).unlink(missing_ok=True)
            occupied = any(path.iterdir())
        except OSError as error:
            raise InputError(f"cannot use {path} as a run folder: {error.strerror}") from None
        problem = None
        if self.checkpoint.exists():
            problem = (
                f"{path} holds an unfinished run: go on with it by resume, or choose another folder"
            )
        elif occupied:
            problem = f"{path} is not empty: a run needs a folder of its own, choose another"
        elif not os.access(path, os.W_OK | os.X_OK):
            problem = f"cannot write to the folder {path}: choose another"
        if problem is not None:
            lock.release()
            raise InputError(problem)
        return lock

    def claim(self) -> FolderLock:
        """Take the folder of an interrupted run, without what a killed process left half-written."""
        try:
            lock = FolderLock(self.path)
            self._remove_unfinished()
        except OSError as error:
            raise InputError(f"nothing to resume in {self.path}: {error.strerror}") from None
        return lock

    def remove_checkpoint(self) -> None:
        """Remove the secret, whole or half-written."""
        self.checkpoint.unlink(missing_ok=True)
        _unfinished(self.checkpoint).unlink(missing_ok=True)
        remove_parts_beside(self.checkpoint)

    def remove(self) -> None:
        """Remove every file of the run, and the folder if nothing else is in it."""
        with contextlib.suppress(OSError):
            self._remove_unfinished()
            remove_parts_beside(self.checkpoint)
            for file in self._files:
                file.unlink(missing_ok=True)
            self.path.rmdir()

    def _remove_unfinished(self) -> None:
        for file in self._files:
            _unfinished(file).unlink(missing_ok=True)

    @property
    def _files(self) -> tuple[Path, ...]:
        return self.checkpoint, self.ledger, self.model, self.loader, self.summary


def parts_beside(path: Path, number: str) -> Path:
    """A folder for what each process of a group keeps of its own; it counts once the checkpoint names it."""
    return path.with_name(f"{path.name}.parts-{number}")


def remove_parts_beside(path: Path, but: Path | None = None) -> None:
    """Remove such folders of checkpoints that were replaced, or never counted: they are secret."""
    for folder in path.parent.glob(f"{glob.escape(path.name)}.parts-*"):
        if folder != but:
            shutil.rmtree(folder, ignore_errors=True)


def next_run_folder(parent: Path) -> Path:
    """``parent/1``, ``parent/2``, …: the first number that is not taken."""
    number = 1
    while (parent / str(number)).exists():
        number += 1
    return parent / str(number)
