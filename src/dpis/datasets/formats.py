"""The formats of public data: idx (the MNIST family), CIFAR-10's batches, IMDb's reviews."""

from __future__ import annotations

import io
import json
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dpis.errors import InputError

Bytes = npt.NDArray[np.uint8]


def parse_idx(content: bytes, name: str = "the file") -> Bytes:
    """The array in an idx file of unsigned bytes: a type, a shape, and the entries, all big-endian.

    Args:
        content: Of the file.
        name: For the error message.

    Example:
        >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
        array([7, 8, 9], dtype=uint8)
    """
    if len(content) < 4 or content[:2] != b"\0\0":
        raise InputError(f"{name} is not an idx file: it does not begin with two zero bytes")
    kind, dimensions = content[2], content[3]
    if kind != 0x08:
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


# ── CIFAR-10: one byte for the label, then 32 x 32 pixels of red, of green and of blue ───────────────

SIDE = 32
PIXELS = 3 * SIDE * SIDE
RECORD = 1 + PIXELS


def parse_batch(content: bytes, name: str = "the file") -> tuple[Bytes, Bytes]:
    """Images ``[N, 3, 32, 32]`` and labels ``[N]`` of one file; ``name`` is for the error message."""
    if len(content) % RECORD:
        raise InputError(
            f"{name} is no list of records of {RECORD} bytes: it is damaged, get it again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    return records[:, 1:].reshape(-1, 3, SIDE, SIDE), records[:, 0]


def batch_from_png(png: bytes, labels: list[int], name: str = "the file") -> bytes:
    """The binary layout of images that stand one in each row of an RGB image of 1,024 columns."""
    from PIL import Image  # here alone, so that nothing else waits for it

    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            size, pixels = image.size, np.asarray(image)
    except (OSError, SyntaxError, ValueError):  # whatever Pillow says of what is not one
        raise InputError(f"{name} is not a PNG image, or a damaged one: get it again") from None
    if pixels.shape != (len(labels), SIDE * SIDE, 3):
        raise InputError(
            f"{name} must have {len(labels)} rows of {SIDE * SIDE} pixels in red, green and blue;"
            f" found {size[1]} of {size[0]} ({image.mode})"
        )
    records = np.empty((len(labels), RECORD), dtype=np.uint8)
    records[:, 0] = labels
    records[:, 1:] = pixels.transpose(0, 2, 1).reshape(len(labels), PIXELS)
    return records.tobytes()


# ── IMDb's reviews (Maas et al. 2011): one JSON object a line, made from the archive published ───────

SPLITS, FOLDERS = ("train", "test"), ("neg", "pos")
_MEMBER = re.compile(r"(?:\./)?aclImdb/(train|test)/(neg|pos)/(\d+)_(\d+)\.txt")


@dataclass(frozen=True)
class Review:
    """One review; ``label`` is 0 for a bad film."""

    split: str
    label: int
    text: str


def parse_reviews(content: bytes, name: str = "the file") -> list[Review]:
    """The reviews in their file's order; ``name`` is for the error message."""
    reviews = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            fields = json.loads(line)
            review = Review(fields["split"], fields["label"], fields["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{name}, line {number}: not a review ({error!r})") from error
        reviews.append(review)
    return reviews


def reviews_from_archive(path: Path) -> bytes:
    """The lines of ``aclImdb_v1.tar.gz``: train before test, bad before good, by number."""
    lines: list[tuple[tuple[int, int, int], str]] = []
    with tarfile.open(path) as archive:
        for member in archive:
            match = _MEMBER.fullmatch(member.name)
            file = archive.extractfile(member) if match else None
            if match is None or file is None:
                continue
            split, folder, number, rating = match.groups()
            label = FOLDERS.index(folder)
            record = {
                "split": split,
                "label": label,
                "id": int(number),
                "rating": int(rating),
                "text": file.read().decode(),
            }
            place = (SPLITS.index(split), label, int(number))
            lines.append((place, json.dumps(record, ensure_ascii=False) + "\n"))
    return "".join(line for _, line in sorted(lines)).encode()
