"""GloVe word vectors: public, so that what is computed from them and one record is free."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpis.datasets.locate import find_source, read_files
from dpis.errors import InputError

RANKS = 35_000
"""Words of the file from this rank on were picked with counts of IMDb's test reviews in view: they are not read."""


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Words by their frequency in public text, the most frequent first, each with a vector.

    Attributes:
        words: All different.
        vectors: float32, ``[V, dimensions]``.
        ranks: int64, ``[V]``, increasing: the place of each word in GloVe's own list (from 0).
    """

    words: tuple[str, ...]
    vectors: Tensor
    ranks: Tensor

    def __post_init__(self) -> None:
        count = len(self.words)
        if self.vectors.dtype != torch.float32 or self.vectors.ndim != 2:
            raise InputError(f"vectors must be float32, [V, D]; found {self.vectors.dtype}")
        if len(self.vectors) != count or self.ranks.shape != (count,):
            raise InputError("words, vectors and ranks must be equally many")
        if len(set(self.words)) != count:
            raise InputError("words must be different")
        if count and not (int(self.ranks[0]) >= 0 and bool((self.ranks.diff() > 0).all())):
            raise InputError("ranks must increase")


def load_glove(vocabulary: int | None = None) -> WordVectors:
    """The 100-dimensional vectors of GloVe 6B (Wikipedia 2014 and Gigaword 5).

    The file is looked for and checked as those of datasets are. Only words among GloVe's 35,000 most
    frequent are read, 32,827 of which the file has: that choice has nothing to do with any review.

    Args:
        vocabulary: How many words, the most frequent first; None: all.
    """
    if vocabulary is not None and vocabulary < 1:
        raise InputError(f"vocabulary must be at least 1, found {vocabulary}")
    content = read_files(find_source("glove"))["vectors"]
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        ranks = arrays["glove_rank"].astype(np.int64)
        kept = np.flatnonzero(ranks < RANKS)[:vocabulary]
        return WordVectors(
            words=tuple(arrays["words"][kept].tolist()),
            vectors=torch.from_numpy(arrays["vectors"][kept]),
            ranks=torch.from_numpy(ranks[kept]),
        )
