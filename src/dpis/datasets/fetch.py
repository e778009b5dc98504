"""Public data is fetched when somebody says so, checked bit by bit, and put in place whole."""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dpis.datasets.catalogue import PublicSource
from dpis.datasets.download import FetchError, Progress
from dpis.datasets.locate import (
    find_file,
    find_source,
    is_published,
    read_packed,
)
from dpis.datasets.providers import PROVIDERS, Files, Published
from dpis.errors import InputError
from dpis.private_files import cache_folder

_BROKEN = (tarfile.TarError, zlib.error, EOFError, ValueError, LookupError)
"""What a damaged archive may cause, whatever it was converted with."""


@dataclass(frozen=True)
class Fetched:
    """Where the files are, and whether they had been there before."""

    folder: Path
    was_there: bool


def fetch(
    name: str,
    to: Path | None = None,
    archive: Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Fetched:
    """Get the dataset called ``name``, from the first of its places that has it.

    Args:
        name: A known one.
        to: A folder, in which the dataset has one of its own; by default ``data`` in the user's cache.
        archive: The file that was published, fetched by other means; nothing is downloaded.
        progress: Told of bytes.

    Raises:
        InputError: It cannot be had, or not be written. Nothing is left but unfinished downloads (``.part``).
    """
    source = find_source(name)
    folder = _target(to) / source.folder
    try:
        if _complete(folder, source):
            return Fetched(folder, was_there=True)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if archive is not None:
                _from_archive(source, folder, archive)
            else:
                _from_providers(source, folder, progress)
        finally:
            with contextlib.suppress(OSError):  # it is empty if nothing came
                folder.rmdir()
    except OSError as error:
        where = error.filename or folder
        raise InputError(f"{source.name}: {where}: {error.strerror or error}") from error
    return Fetched(folder, was_there=False)


def _target(to: Path | None) -> Path:
    cache = cache_folder()
    if to is not None:
        return to.expanduser()
    if cache is None:
        raise InputError("DPIS_CACHE is off, so say where to put the files: --to DIR")
    return cache / "data"


def _complete(folder: Path, source: PublicSource) -> bool:
    for file in source.files.values():
        path = find_file(folder, file)
        try:
            if path is None or not is_published(read_packed(path), file):
                return False
        except InputError:  # damaged: it will be replaced
            return False
    return True


def _from_providers(source: PublicSource, folder: Path, progress: Progress) -> None:
    problems = []
    for provider in PROVIDERS.get(source.name, ()):
        try:
            _install(source, folder, partial(provider.files, folder, progress=progress))
        except FetchError as error:
            problems.append(str(error))
        else:
            for tried in PROVIDERS[source.name]:
                tried.clear(folder)
            return
    said = f" ({'; '.join(problems)})" if problems else ""
    raise InputError(f"{source.name} could not be fetched{said}: {source.by_hand}")


def _from_archive(source: PublicSource, folder: Path, archive: Path) -> None:
    providers = PROVIDERS.get(source.name, ())
    published = [p for p in providers if isinstance(p, Published) and len(p.md5) == 1]
    if not published:
        raise InputError(f"{source.name} is not made from one archive: {source.by_hand}")
    try:
        _install(source, folder, lambda scratch: published[0].files_of(archive))
    except FetchError as error:
        raise InputError(str(error)) from error


def _install(source: PublicSource, folder: Path, get: Callable[[Path], Files]) -> None:
    """Write and check every file aside, then move all of them to their names."""
    wanted = {file.name: file for file in source.files.values()}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as aside:
        scratch, ready = Path(aside) / "scratch", Path(aside) / "ready"
        scratch.mkdir()
        ready.mkdir()
        try:
            for name, content in get(scratch):
                file = wanted.pop(name.removesuffix(".gz"))
                (ready / name).write_bytes(content)
                if not is_published(read_packed(ready / name), file):
                    raise FetchError(f"{file.name} as it came is not the published one (sha256)")
        except _BROKEN as error:
            raise FetchError(f"what came is damaged ({error})") from error
        if wanted:
            raise FetchError(f"what came lacks {', '.join(wanted)}")
        for path in sorted(ready.iterdir()):
            os.replace(path, folder / path.name)
            twin = path.name.removesuffix(".gz") if path.suffix == ".gz" else f"{path.name}.gz"
            (folder / twin).unlink(
                missing_ok=True
            )  # a wrong one, or this would not have been fetched
