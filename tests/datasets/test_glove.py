from __future__ import annotations

import dataclasses
import hashlib
import io
from types import MappingProxyType

import numpy as np
import pytest
import torch

from dpis.datasets import locate
from dpis.datasets.glove import WordVectors, load_glove
from dpis.errors import InputError


@pytest.fixture
def file(monkeypatch, tmp_path):
    """A tiny file of word vectors, three words of which may be read."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        words=np.array(["the", ",", "film", "unwatchable"]),
        glove_rank=np.array([0, 1, 34_999, 35_000], dtype=np.int32),
        vectors=np.arange(8, dtype=np.float32).reshape(4, 2),
    )
    content = buffer.getvalue()
    source = locate.SOURCES["glove"]
    described = dataclasses.replace(
        source.files["vectors"], sha256=hashlib.sha256(content).hexdigest()
    )
    replaced = dataclasses.replace(source, files={"vectors": described})
    monkeypatch.setattr(locate, "SOURCES", MappingProxyType({"glove": replaced}))
    monkeypatch.setenv("DPIS_DATA", str(tmp_path))
    monkeypatch.setenv("DPIS_CACHE", "off")
    path = tmp_path / described.name
    path.write_bytes(content)
    return path


def test_words_picked_with_the_reviews_in_view_are_not_read(file):
    vectors = load_glove()
    assert vectors.words == ("the", ",", "film")
    assert vectors.ranks.tolist() == [0, 1, 34_999]
    assert vectors.vectors.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert vectors.vectors.dtype == torch.float32


def test_the_most_frequent_words_come_first(file):
    assert load_glove(2).words == ("the", ",")
    assert load_glove(9).words == load_glove().words


def test_no_words_are_refused(file):
    with pytest.raises(InputError, match="at least 1"):
        load_glove(0)


def test_another_file_is_refused(file):
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match="not the published file"):
        load_glove()


def test_a_missing_file_says_where_it_was_looked_for(file):
    file.unlink()
    with pytest.raises(InputError, match=r"glove was not found in .*DPIS_DATA"):
        load_glove()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"words": ("a", "a")}, "different"),
        ({"words": ("a",)}, "equally many"),
        ({"vectors": torch.zeros(2, 3).double()}, "float32"),
        ({"vectors": torch.zeros(2)}, "float32"),
        ({"ranks": torch.tensor([1, 1])}, "increase"),
        ({"ranks": torch.tensor([-1, 1])}, "increase"),
    ],
)
def test_vectors_that_do_not_fit_their_words_are_refused(changes, message):
    parts = {"words": ("a", "b"), "vectors": torch.zeros(2, 3), "ranks": torch.tensor([0, 4])}
    with pytest.raises(InputError, match=message):
        WordVectors(**(parts | changes))
