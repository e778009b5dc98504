"""Where public data is looked for, and whether what is found there is what was published. No torch here.

Nothing is downloaded here. Files are recognised by what they hold, not by how they were packed: the
checksums are those of the unpacked content, so the original ``.gz`` files, Debian's (packed anew) and
unpacked ones all pass, and nothing else does.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dpis.datasets.catalogue import ALIASES, SOURCES, DataFile, PublicSource
from dpis.datasets.folders import cache_folder
from dpis.datasets.idx import read_packed
from dpis.errors import InputError

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
    if folder is None:
        raise InputError(_missing(source))
    return {role: _checked(folder, file) for role, file in source.files.items()}


def absent(folder: Path, source: PublicSource) -> list[str]:
    """The files of ``source`` that are not in ``folder``."""
    return [file.name for file in source.files.values() if find_file(folder, file) is None]


def find_file(folder: Path, file: DataFile) -> Path | None:
    """``file`` in ``folder``, packed or not; None if it is not there."""
    for path in (folder / f"{file.name}.gz", folder / file.name):
        if path.is_file():
            return path
    return None


def is_published(content: bytes, file: DataFile) -> bool:
    """Whether ``content`` is that of ``file``, bit by bit."""
    return hashlib.sha256(content).hexdigest() == file.sha256


def _missing(source: PublicSource) -> str:
    """One line: what is not there, where it was looked for, how to get it."""
    incomplete = ""
    for folder in folders(source):
        lacking = absent(folder, source)
        if len(lacking) < len(source.files):
            incomplete = f"; {folder} lacks {', '.join(lacking)}"
            break
    where = ", ".join(str(folder) for folder in folders(source))
    return f"{source.name} was not found in {where}{incomplete}: {source.how_to_get}"


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
