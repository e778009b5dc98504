from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpis.datasets.cifar import RECORD, batch_from_png, parse_batch
from dpis.datasets.png import SIGNATURE, decode_rgb
from dpis.errors import InputError


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(rows: bytes, width: int, height: int, form: tuple[int, ...] = (8, 2, 0, 0, 0)) -> bytes:
    packed = zlib.compress(rows)
    middle = len(packed) // 2
    return b"".join(
        (
            SIGNATURE,
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, *form)),
            chunk(b"tEXt", b"of no interest"),
            chunk(b"IDAT", packed[:middle]),
            chunk(b"IDAT", packed[middle:]),
            chunk(b"IEND", b""),
        )
    )


def filtered(pixels: np.ndarray, kinds: list[int]) -> bytes:
    """Every row filtered as the standard says, byte by byte: the slow way, and the other way round."""
    height, width, _ = pixels.shape
    flat = pixels.reshape(height, 3 * width).astype(int)
    rows = bytearray()
    for y, kind in enumerate(kinds):
        rows.append(kind)
        for x in range(3 * width):
            a = flat[y, x - 3] if x >= 3 else 0
            b = flat[y - 1, x] if y else 0
            c = flat[y - 1, x - 3] if y and x >= 3 else 0
            p = a + b - c
            pa, pb, pc = abs(p - a), abs(p - b), abs(p - c)
            paeth = a if pa <= pb and pa <= pc else b if pb <= pc else c
            rows.append((flat[y, x] - (0, a, b, (a + b) // 2, paeth)[kind]) % 256)
    return bytes(rows)


@given(
    kinds=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    width=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_every_filter_is_undone(kinds, width, seed):
    shape = (len(kinds), width, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    content = png(filtered(pixels, kinds), width, len(kinds))
    assert np.array_equal(decode_rgb(content), pixels)


GOOD = png(bytes([0, 1, 2, 3]), 1, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a PNG"),
        (b"GIF89a", "not a PNG"),
        (GOOD[:-5], "ends within a chunk|checksum of a chunk"),
        (GOOD[:40] + b"x" + GOOD[41:], "checksum of a chunk"),
        (SIGNATURE, "damaged"),
        (png(bytes([0, 1, 2, 3]), 1, 1, (16, 2, 0, 0, 0)), "plain RGB"),
        (png(bytes([0, 1, 2, 3]), 1, 1, (8, 2, 0, 0, 1)), "plain RGB"),
        (png(bytes([0, 1, 2]), 1, 1), "does not hold the pixels"),
        (png(b"", 0, 0), "does not hold the pixels"),
        (png(bytes([5, 1, 2, 3]), 1, 1), "filter 5"),
    ],
)
def test_other_images_are_refused(content, message):
    with pytest.raises(InputError, match=message):
        decode_rgb(content)


def test_an_image_a_row_becomes_the_binary_layout():
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    content = batch_from_png(png(filtered(images.reshape(2, 1024, 3), [1, 2]), 1024, 2), [7, 3])
    assert len(content) == 2 * RECORD
    found, labels = parse_batch(content)
    assert labels.tolist() == [7, 3]
    assert np.array_equal(found, images.transpose(0, 3, 1, 2))


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match="must have 2 rows of 1024 pixels; found 1 of 1"):
        batch_from_png(GOOD, [1, 2])
    with pytest.raises(InputError, match=r"b\.bin is no list of records of 3073 bytes"):
        parse_batch(b"12", "b.bin")
