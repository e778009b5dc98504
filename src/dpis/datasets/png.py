"""Pixels of a PNG file: the plain kind, eight bits a channel, RGB, not interlaced."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from dpis.errors import InputError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
RGB_8_BITS = (8, 2, 0, 0, 0)
CHANNELS = 3

Pixels = npt.NDArray[np.uint8]


def decode_rgb(content: bytes, name: str = "the file") -> Pixels:
    """uint8 ``[height, width, 3]``; ``name`` is for the error message.

    A PNG file is a list of chunks. The data chunks together are a zlib stream of rows, each with a
    leading byte that says how the row was filtered: what was subtracted from every byte before packing.
    """
    width = height = 0
    packed = bytearray()
    for kind, body in _chunks(content, name):
        if kind == b"IHDR":
            width, height, *form = struct.unpack(">IIBBBBB", body)
            if tuple(form) != RGB_8_BITS:
                raise InputError(f"{name} is not a plain RGB image with eight bits a channel")
        elif kind == b"IDAT":
            packed += body
    try:
        filtered = np.frombuffer(zlib.decompress(packed), np.uint8)
    except zlib.error as error:
        raise InputError(f"{name} is damaged ({error}): get it again") from error
    if width * height == 0 or len(filtered) != height * (1 + CHANNELS * width):
        raise InputError(f"{name} does not hold the pixels that it announces: get it again")
    return _unfiltered(filtered.reshape(height, -1), name).reshape(height, width, CHANNELS)


def _chunks(content: bytes, name: str) -> Iterator[tuple[bytes, bytes]]:
    if not content.startswith(SIGNATURE):
        raise InputError(f"{name} is not a PNG image")
    place = len(SIGNATURE)
    while place < len(content):
        if place + 12 > len(content):
            raise InputError(f"{name} ends within a chunk: it is damaged, get it again")
        size, kind = struct.unpack_from(">I4s", content, place)
        body = content[place + 8 : place + 8 + size]
        tail = content[place + 8 + size : place + 12 + size]
        if tail != struct.pack(">I", zlib.crc32(kind + body)):
            raise InputError(f"{name} is damaged (checksum of a chunk): get it again")
        yield kind, body
        place += 12 + size


def _unfiltered(rows: Pixels, name: str) -> Pixels:
    """Undo the filters. Rows depend on the row above, and on the pixel to the left within a row."""
    height, width = rows.shape[0], (rows.shape[1] - 1) // CHANNELS
    pixels = np.zeros((height, width, CHANNELS), dtype=np.uint8)
    above = np.zeros((width, CHANNELS), dtype=np.uint8)
    for i, kind in enumerate(rows[:, 0]):
        row = rows[i, 1:].reshape(width, CHANNELS)
        if kind == 0:
            pixels[i] = row
        elif kind == 1:  # the pixel to the left: sums of all before, modulo 256
            pixels[i] = np.cumsum(row, axis=0, dtype=np.uint8)
        elif kind == 2:  # the pixel above
            pixels[i] = row + above
        elif kind in (3, 4):
            predict = _mean if kind == 3 else _paeth
            pixels[i] = _by_pixel(row, above, predict)
        else:
            raise InputError(f"{name} has a row with filter {kind}: it is damaged, get it again")
        above = pixels[i]
    return pixels


def _by_pixel(row: Pixels, above: Pixels, predict: Callable[[int, int, int], int]) -> Pixels:
    """For the filters that cannot be undone all at once: byte by byte."""
    result: list[list[int]] = []
    left, corner = [0] * CHANNELS, [0] * CHANNELS
    for values, up in zip(row.tolist(), above.tolist(), strict=True):
        left = [
            (v + predict(a, b, c)) & 255
            for v, a, b, c in zip(values, left, up, corner, strict=True)
        ]
        corner = up
        result.append(left)
    return np.array(result, dtype=np.uint8)


def _mean(left: int, up: int, corner: int) -> int:
    return (left + up) // 2


def _paeth(left: int, up: int, corner: int) -> int:
    """Whichever of the three is nearest to ``left + up - corner``; in this order if equally near."""
    return min((left, up, corner), key=lambda value: abs(left + up - corner - value))
