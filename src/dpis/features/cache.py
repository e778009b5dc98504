"""Features on disk, one file for each set of records: private, whole or absent.

A file is a plain ``.npy`` (``numpy.load`` reads it) with the SHA-256 of all that stands before as its last
32 bytes. It appears under its name in one step, when it is complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpis.private_files import cache_folder, written_whole
from dpis.stored_rows import Column, MappedRows, StoredRows, blocks_of

DIGEST_BYTES = 32


class CacheWarning(UserWarning):
    """Features could not be kept on disk. They are right, and will be computed again next time."""


@dataclass(frozen=True)
class FeatureCache:
    """A folder of features. Features tell about single records: folder and files are the owner's alone."""

    folder: Path

    @staticmethod
    def open(folder: str | PathLike[str] | None = None) -> FeatureCache | None:
        """The cache in ``folder``, by default in the user's cache; None if ``DPIS_CACHE=off``."""
        if folder is not None:
            return FeatureCache(Path(folder))
        default = cache_folder()
        return None if default is None else FeatureCache(default / "features")

    def key(self, recipe: str, images: Column) -> str:
        """A hash of everything that features depend on: the recipe, and the images bit by bit."""
        kind = images.example().dtype if isinstance(images, StoredRows) else images.dtype
        digest = hashlib.sha256(f"{recipe}\n{kind} {tuple(images.shape)}\n".encode())
        for block in blocks_of(images, len(images)):
            array = block.detach().cpu().contiguous()
            digest.update(array.flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def text_key(self, recipe: str, texts: Sequence[str], words: Sequence[str]) -> str:
        """A hash of everything that features of texts depend on: the recipe, the vocabulary, and the texts."""
        content = json.dumps([recipe, list(words), list(texts)])
        return hashlib.sha256(content.encode()).hexdigest()

    def load(self, key: str, shape: tuple[int, ...]) -> Tensor | None:
        """The features under ``key``, mapped from the file; None if there are none that are whole.

        The map is private to this process: writing to the tensor changes memory, not the file.
        """
        features = self._mapped(key, shape)
        return None if features is None else torch.from_numpy(features)

    def stored(self, key: str, shape: tuple[int, ...], keeper: object = None) -> MappedRows | None:
        """The features under ``key``, to be read by index; None if there are none that are whole."""
        features = self._mapped(key, shape)
        if features is None:
            return None
        path, offset = self.path(key), features.offset
        return MappedRows(path, features.dtype, shape, offset, keeper=keeper)

    def _mapped(self, key: str, shape: tuple[int, ...]) -> Any:
        path = self.path(key)
        try:
            whole = np.memmap(path, dtype=np.uint8, mode="r")
            body, digest = whole[:-DIGEST_BYTES], whole[-DIGEST_BYTES:]
            if hashlib.sha256(body.data).digest() != digest.tobytes():
                return None
            features = np.load(path, mmap_mode="c", allow_pickle=False)
        except (OSError, ValueError):  # absent, unreadable, empty, or not what numpy writes
            return None
        if features.shape != shape or features.dtype != np.float32:
            return None
        return features

    def save(self, key: str, features: Tensor) -> None:
        """Keep features under ``key``. What goes wrong is a warning: they are at hand all the same."""
        self.write(key, tuple(features.shape), torch.split(features, 1024))

    def write(self, key: str, shape: tuple[int, ...], blocks: Iterable[Tensor]) -> None:
        """Keep features of this shape that come block by block. What goes wrong is a warning."""
        try:
            with written_whole(self.path(key)) as file:
                digest = hashlib.sha256()
                for part in _npy_parts(shape, blocks):
                    digest.update(part)
                    file.write(part)
                file.write(digest.digest())
        except OSError as error:
            warnings.warn(
                f"features were not kept in {self.folder} ({error.strerror or error}), and will be computed again"
                " next time: set DPIS_CACHE to a folder with room, or to off",
                CacheWarning,
                stacklevel=4,
            )

    def path(self, key: str) -> Path:
        """The file of ``key``."""
        return self.folder / f"{key}.npy"


def _npy_parts(shape: tuple[int, ...], blocks: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a ``.npy`` file, a bit at a time, so that nothing large is copied."""
    header = io.BytesIO()
    about = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, about)
    yield header.getvalue()
    for block in blocks:
        array: npt.NDArray[np.float32] = block.detach().cpu().contiguous().numpy()
        yield array.reshape(-1).view(np.uint8).data
