"""Features on disk, one file for each set of records: private, whole or absent.

A file is a plain ``.npy`` (``numpy.load`` reads it) with the SHA-256 of all that stands before as its last
32 bytes. It appears under its name in one step, when it is complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpis.datasets.locate import cache_folder

DIGEST_BYTES = 32
STALE_SECONDS = 24 * 3600
"""After so long, an unfinished file is what a killed process left behind."""


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

    def key(self, recipe: str, images: Tensor) -> str:
        """A hash of everything that features depend on: the recipe, and the images bit by bit."""
        array = images.detach().cpu().contiguous()
        digest = hashlib.sha256(f"{recipe}\n{array.dtype} {tuple(array.shape)}\n".encode())
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
        return torch.from_numpy(features)

    def save(self, key: str, features: Tensor) -> None:
        """Keep features under ``key``. What goes wrong is a warning: they are at hand all the same."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_stale()
            self._write(self.path(key), features.detach().cpu().contiguous().numpy())
        except OSError as error:
            warnings.warn(
                f"features were not kept in {self.folder} ({error.strerror or error}), and will be computed again"
                " next time: set DPIS_CACHE to a folder with room, or to off",
                CacheWarning,
                stacklevel=3,
            )

    def path(self, key: str) -> Path:
        """The file of ``key``."""
        return self.folder / f"{key}.npy"

    def _write(self, path: Path, features: npt.NDArray[np.float32]) -> None:
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".unfinished-")  # of mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                digest = hashlib.sha256()
                for block in _npy_blocks(features):
                    digest.update(block)
                    file.write(block)
                file.write(digest.digest())
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _remove_stale(self) -> None:
        for left in self.folder.glob(".unfinished-*"):
            try:
                if time.time() - left.stat().st_mtime > STALE_SECONDS:
                    left.unlink()
            except FileNotFoundError:
                continue


def _npy_blocks(array: npt.NDArray[np.float32]) -> Iterator[bytes | memoryview]:
    """The bytes of a ``.npy`` file, a bit at a time, so that nothing large is copied."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    yield header.getvalue()
    flat = array.reshape(-1).view(np.uint8).data
    for start in range(0, len(flat), 1 << 24):
        yield flat[start : start + (1 << 24)]
