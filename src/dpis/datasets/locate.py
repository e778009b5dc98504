"""Where public data is looked for, and whether what is found there is what was published. No torch here.

Nothing is downloaded here. Files are recognised by what they hold, not by how they were packed: the
checksums are those of the unpacked content, so the original ``.gz`` files, Debian's (packed anew) and
unpacked ones all pass, and nothing else does.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dpis.datasets.catalogue import ALIASES, SOURCES, DataFile, PublicSource
from dpis.errors import InputError
from dpis.private_files import cache_folder

SYSTEM_FOLDER = Path("/usr/share/datasets")
"""Where Debian's dataset packages put their files."""


@dataclass(frozen=True)
class Location:
    """Where a dataset was found (not yet checked), or None, and how to get it."""

    name: str
    folder: Path | None
    how_to_get: str


def available() -> tuple[Location, ...]:
    """All data known by name, and where it is. Files are looked for, not read."""
    return tuple(
        Location(source.name, find_folder(source), source.how_to_get) for source in SOURCES.values()
    )


def find_source(name: str) -> PublicSource:
    """What is known of the data called ``name``."""
    key = name.lower()
    source = SOURCES.get(ALIASES.get(key, key))
    if source is None:
        known = ", ".join([*SOURCES, *ALIASES])
        raise InputError(f"no dataset is called {name!r}: known names are {known}")
    return source


def find_folder(source: PublicSource) -> Path | None:
    """The first folder that has all files of ``source``; None if there is none."""
    for folder in folders(source):
        if not absent(folder, source):
            return folder
    return None


def folders(source: PublicSource) -> tuple[Path, ...]:
    """Where the files of ``source`` are looked for, in this order."""
    chosen, cache = os.environ.get("DPIS_DATA", ""), cache_folder()
    places = (
        *([Path(chosen).expanduser()] if chosen else []),
        SYSTEM_FOLDER,
        *([cache / "data"] if cache is not None else []),
    )
    return tuple(
        folder
        for place in places
        for folder in (place / source.folder, *([place] if source.flat else []))
    )


def read_files(source: PublicSource) -> Mapping[str, bytes]:
    """The unpacked content of every file of ``source``, checked.

    Raises:
        InputError: The files are nowhere, or one of them is not the published one.
    """
    folder = find_folder(source)
    if folder is not None:
        return {role: _checked(folder, file) for role, file in source.files.items()}
    places = folders(source)
    lacking = ((folder, absent(folder, source)) for folder in places)
    incomplete = next(
        (
            f"; {folder} lacks {', '.join(files)}"
            for folder, files in lacking
            if len(files) < len(source.files)
        ),
        "",
    )
    where = ", ".join(map(str, places))
    raise InputError(f"{source.name} was not found in {where}{incomplete}: {source.how_to_get}")


def _checked(folder: Path, file: DataFile) -> bytes:
    path = find_file(folder, file)
    if path is None:
        raise InputError(f"{folder / file.name} was there a moment ago and is gone")
    content = read_packed(path)
    if not is_published(content, file):
        raise InputError(
            f"{path} is not the published file (sha256 of its content"
            f" {hashlib.sha256(content).hexdigest()}, required {file.sha256}): delete it and get it again"
        )
    return content


def absent(folder: Path, source: PublicSource) -> list[str]:
    """The files of ``source`` that are not in ``folder``."""
    return [file.name for file in source.files.values() if find_file(folder, file) is None]


def find_file(folder: Path, file: DataFile) -> Path | None:
    """``file`` in ``folder``, packed or not; None if it is not there."""
    for path in (folder / f"{file.name}.gz", folder / file.name):
        if path.is_file():
            return path
    return None


def read_packed(path: Path) -> bytes:
    """The content of a file, unpacked if it is packed with gzip."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path} is damaged ({error}): get it again") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def is_published(content: bytes, file: DataFile) -> bool:
    """Whether ``content`` is that of ``file``, bit by bit."""
    return hashlib.sha256(content).hexdigest() == file.sha256
