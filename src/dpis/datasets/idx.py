"""The idx format of the MNIST family: a type, a shape, and the entries, all big-endian."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dpis.errors import InputError

GZIP_MAGIC = b"\x1f\x8b"
UNSIGNED_BYTE = 0x08


def read_packed(path: Path) -> bytes:
    """The content of a file, unpacked if it is packed with gzip."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(GZIP_MAGIC) else content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path} is damaged ({error}): get it again") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def parse_idx(content: bytes, name: str = "the file") -> npt.NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes; ``name`` is for the error message.

    Example:
        >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
        array([7, 8, 9], dtype=uint8)
    """
    if len(content) < 4 or content[:2] != b"\0\0":
        raise InputError(f"{name} is not an idx file: it does not begin with two zero bytes")
    kind, dimensions = content[2], content[3]
    if kind != UNSIGNED_BYTE:
        raise InputError(f"{name} holds idx type {kind:#04x}: only unsigned bytes (0x08) are read")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise InputError(f"{name} ends within its header: it is damaged, get it again")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, offset=4))
    entries = int(np.prod(shape, dtype=object))
    if len(content) - start != entries:
        raise InputError(
            f"{name} announces {entries} entries and holds {len(content) - start}: it is damaged, get it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
