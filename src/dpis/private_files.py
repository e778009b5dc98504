"""Files that only their owner can read, whole or absent: copies of private data that spare reading it again."""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

STALE_SECONDS = 24 * 3600
"""After so long, an unfinished file is what a killed process left behind."""


def cache_folder() -> Path | None:
    """``$DPIS_CACHE``, else ``$XDG_CACHE_HOME/dpis``, else ``~/.cache/dpis``; not created here.

    None if ``DPIS_CACHE=off``: nothing is to be kept.
    """
    chosen = os.environ.get("DPIS_CACHE", "")
    if chosen.lower() == "off":
        return None
    if chosen:
        return Path(chosen).expanduser()
    platform = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(platform) if platform else Path("~/.cache").expanduser()) / "dpis"


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write and to read: under its name in one step, when it is complete, or not at all.

    Its folder is made if it is not there; both are the owner's alone.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_stale(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")  # of mode 0600
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _remove_stale(folder: Path) -> None:
    for left in folder.glob(".unfinished-*"):
        try:
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                left.unlink()
        except FileNotFoundError:
            continue


class PassingFolder:
    """A folder of the owner's alone that goes with this object: for copies where nothing is to be kept."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dpis-")
        self.path = Path(self._folder.name)
        self._end = weakref.finalize(self, self._folder.cleanup)


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """By what a file is known again without being read."""

    path: str
    size: int
    modified: int
    changed: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """As it is now. ``changed`` is the time of the last change of anything, which no program sets back."""
        status = path.stat()
        return cls(
            str(path.resolve()),
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_ino,
        )
