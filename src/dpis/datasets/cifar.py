"""CIFAR-10's binary layout: one byte for the label, then 32 x 32 pixels of red, of green and of blue."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpis.datasets.png import decode_rgb
from dpis.errors import InputError

SIDE = 32
PIXELS = 3 * SIDE * SIDE
RECORD = 1 + PIXELS

Bytes = npt.NDArray[np.uint8]


def parse_batch(content: bytes, name: str = "the file") -> tuple[Bytes, Bytes]:
    """Images ``[N, 3, 32, 32]`` and labels ``[N]`` of one file; ``name`` is for the error message."""
    if len(content) % RECORD:
        raise InputError(
            f"{name} is no list of records of {RECORD} bytes: it is damaged, get it again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    return records[:, 1:].reshape(-1, 3, SIDE, SIDE), records[:, 0]


def batch_from_png(png: bytes, labels: list[int], name: str = "the file") -> bytes:
    """The binary layout of images that stand one in each row of a PNG of 1,024 columns."""
    pixels = decode_rgb(png, name)
    if pixels.shape != (len(labels), SIDE * SIDE, 3):
        raise InputError(
            f"{name} must have {len(labels)} rows of {SIDE * SIDE} pixels;"
            f" found {pixels.shape[0]} of {pixels.shape[1]}"
        )
    records = np.empty((len(labels), RECORD), dtype=np.uint8)
    records[:, 0] = labels
    records[:, 1:] = pixels.transpose(0, 2, 1).reshape(len(labels), PIXELS)
    return records.tobytes()
