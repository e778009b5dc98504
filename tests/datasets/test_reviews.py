from __future__ import annotations

import io
import json
import tarfile

import pytest

from dpis.datasets.formats import Review, parse_reviews, reviews_from_archive
from dpis.errors import InputError


def archive(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            content = text.encode()
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_the_published_archive_becomes_sorted_lines(tmp_path):
    path = archive(
        tmp_path / "aclImdb_v1.tar.gz",
        {
            "aclImdb/test/pos/10_9.txt": "last",
            "aclImdb/test/pos/9_10.txt": "by number, not by name",
            "aclImdb/train/unsup/1_0.txt": "without a label",
            "aclImdb/train/pos/0_7.txt": 'naïve "quotes" <br />',
            "aclImdb/train/neg/2_1.txt": "bad",
            "aclImdb/imdb.vocab": "the",
            "aclImdb/train/neg/../../../evil_1.txt": "no",
        },
    )
    content = reviews_from_archive(path)
    assert [json.loads(line)["id"] for line in content.splitlines()] == [2, 0, 9, 10]
    first, second = content.decode().splitlines()[:2]
    assert first == '{"split": "train", "label": 0, "id": 2, "rating": 1, "text": "bad"}'
    assert "naïve" in second
    assert parse_reviews(content) == [
        Review("train", 0, "bad"),
        Review("train", 1, 'naïve "quotes" <br />'),
        Review("test", 1, "by number, not by name"),
        Review("test", 1, "last"),
    ]


@pytest.mark.parametrize("line", [b"{", b"[]", b"{}", b'"text"', b"\xff"])
def test_a_line_that_is_no_review_is_named(line):
    good = b'{"split": "train", "label": 0, "text": ""}\n'
    with pytest.raises(InputError, match=r"r\.jsonl, line 2: not a review"):
        parse_reviews(good + line + b"\n", "r.jsonl")
