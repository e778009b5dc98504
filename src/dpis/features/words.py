"""Texts as words of a public vocabulary. Every row is a function of one text and public constants."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

import numpy as np
import torch
from torch import Tensor

from dpis.datasets.glove import WordVectors
from dpis.errors import InputError
from dpis.features.bags import bag_features
from dpis.features.cache import FeatureCache
from dpis.features.tokens import tokenise, word_places

__all__ = ["bag_features", "embedding_table", "tokenise", "word_sequences"]

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
"""Codes in word sequences; the vocabulary's first word has code ``FIRST_WORD``."""

VOCABULARY = 20_000
"""Words of the text network. The paper counted them on the reviews; here they are the most frequent in public text."""

FORMAT = "word-sequences-1"
"""Part of the cache's key. Raise the number whenever sequences change."""


def word_sequences(
    texts: Sequence[str],
    words: Sequence[str],
    length: int = 80,
    *,
    cache_dir: str | PathLike[str] | None = None,
    cache: bool = True,
) -> Tensor:
    """The last ``length`` words of every text, as codes; short texts are padded at the front.

    0 is padding, 1 a word that is not in ``words``, and ``2 + i`` is ``words[i]``.

    Args:
        texts: The records.
        words: The vocabulary: public, such as GloVe's. One counted on the texts is not free.
        length: How many words stay.
        cache_dir: As in ``scatter_features``.
        cache: False keeps nothing on disk and reads nothing.

    Returns:
        int64 ``[N, length]``.
    """
    if length < 1:
        raise InputError(f"length must be at least 1, found {length}")
    store = FeatureCache.open(cache_dir) if cache and len(words) < 2**24 - FIRST_WORD else None
    key = ""
    if store is not None:  # which keeps float32: whole up to 2**24
        key = store.text_key(f"{FORMAT} length={length}", texts, words)
        kept = store.load(key, (len(texts), length))
        if kept is not None:
            return kept.long()
    codes = np.zeros((len(texts), length), dtype=np.int64)
    for row, places in zip(codes, word_places(texts, words), strict=True):
        last = places[-length:]
        if last:
            row[-len(last) :] = np.maximum(np.array(last) + FIRST_WORD, UNKNOWN)
    sequences = torch.from_numpy(codes)
    if store is not None:
        store.save(key, sequences.float())
    return sequences


def embedding_table(vectors: WordVectors) -> Tensor:
    """A vector for every code: zeros for padding and for unknown words, then those of the vocabulary.

    Returns:
        float32 ``[2 + V, dimensions]``.
    """
    return torch.cat(
        [vectors.vectors.new_zeros(FIRST_WORD, vectors.vectors.shape[1]), vectors.vectors]
    )
