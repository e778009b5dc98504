"""CIFAR-10's binary layout, and how a PNG with one image in each row becomes it."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from dpis.datasets.formats import RECORD, batch_from_png, parse_batch
from dpis.errors import InputError

IMAGES = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)


def saved(pixels: np.ndarray, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


GOOD = saved(IMAGES.reshape(2, 1024, 3))
MIDDLE = len(GOOD) // 2


def test_an_image_a_row_becomes_the_binary_layout():
    content = batch_from_png(GOOD, [7, 3])
    assert len(content) == 2 * RECORD
    found, labels = parse_batch(content)
    assert labels.tolist() == [7, 3]
    assert np.array_equal(found, IMAGES.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GIF89a",
        GOOD[:8],
        GOOD[:20],
        GOOD[:MIDDLE],
        GOOD[:MIDDLE] + b"xyz" + GOOD[MIDDLE + 3 :],
        saved(IMAGES.reshape(2, 1024, 3), "BMP"),
    ],
    ids=["empty", "gif", "signature", "header", "cut", "changed", "bmp"],
)
def test_what_is_no_whole_png_is_one_clear_line(content):
    with pytest.raises(InputError, match=r"^b is not a PNG image, or a damaged one: get it again$"):
        batch_from_png(content, [1, 2], "b")


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"must have 3 rows of 1024 pixels .*; found 2 of 1024"):
        batch_from_png(GOOD, [1, 2, 3])
    with pytest.raises(InputError, match=r"found 2 of 1024 \(L\)"):
        batch_from_png(saved(IMAGES.reshape(2, 1024, 3)[:, :, 0]), [1, 2])
    with pytest.raises(InputError, match=r"b\.bin is no list of records of 3073 bytes"):
        parse_batch(b"12", "b.bin")
