"""IMDb's reviews (Maas et al. 2011): one JSON object a line, made from the archive that was published."""

from __future__ import annotations

import json
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

from dpis.errors import InputError

SPLITS = ("train", "test")
FOLDERS = ("neg", "pos")
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
