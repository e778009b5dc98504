"""Texts as words of a public vocabulary. Every row is a function of one text and public constants."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from os import PathLike

import numpy as np
import torch
from torch import Tensor

from dpis.datasets.glove import WordVectors
from dpis.errors import InputError
from dpis.features.cache import FeatureCache

_TAG = re.compile(r"<[a-z/][^<>]*>")
_DOTS = re.compile(r"\.{2,}|…")
_TOKEN = re.compile(
    r"""'(?:s|m|d|re|ve|ll)\b          # what stays of he's, I'm, they've
      | n't\b                           # and of don't
      | (?:[^\W\d_]\.){2,}              # u.s.
      | \b(?:mr|mrs|ms|dr|st|jr|vs)\.
      | \d+(?:[.,]\d+)+                 # 1,000
      | [^\W_]+(?:-[^\W_]+)*            # words with their hyphens, 10, 1990s, 2nd
      | \.\.\. | -{2,}
      | \S                              # any other sign by itself
    """,
    re.VERBOSE,
)

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
"""Codes in word sequences; the vocabulary's first word has code ``FIRST_WORD``."""

VOCABULARY = 20_000
"""Words of the text network. The paper counted them on the reviews; here they are the most frequent in public text."""

FORMAT = "word-sequences-1"
"""Part of the cache's key. Raise the number whenever sequences change."""


def tokenise(text: str) -> list[str]:
    """Split a text as GloVe's was: lower case, signs apart, ``don't`` as ``do`` and ``n't``; HTML tags go.

    Example:
        >>> tokenise("I don't like Mr. Bean's 2nd film....<br />It's so-so!")
        ['i', 'do', "n't", 'like', 'mr.', 'bean', "'s", '2nd', 'film', '...', 'it', "'s", 'so-so', '!']
    """
    text = _TAG.sub(" ", text.lower().replace("’", "'"))
    text = text.replace("n't", " n't").replace("cannot", "can not")
    return _TOKEN.findall(_DOTS.sub(" ... ", text))


def word_places(texts: Sequence[str], words: Sequence[str]) -> Iterator[list[int]]:
    """For every text the places of its words in ``words``, -1 for others.

    A compound that is not there is taken apart at its hyphens.

    Example:
        >>> list(word_places(["A well-made film.", ""], ["a", "well", "film"]))
        [[0, 1, -1, 2, -1], []]
    """
    place = {word: i for i, word in enumerate(words)}
    for text in texts:
        places = []
        for token in tokenise(text):
            if token in place or "-" not in token.strip("-"):
                places.append(place.get(token, -1))
            else:
                places.extend(place.get(part, -1) for part in token.split("-"))
        yield places


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
    # The cache keeps float32, which is exact up to 2**24.
    store = FeatureCache.open(cache_dir) if cache and len(words) < 2**24 - FIRST_WORD else None
    if store is None:
        return _sequences(texts, words, length)
    key = store.text_key(f"{FORMAT} length={length}", texts, words)
    kept = store.load(key, (len(texts), length))
    if kept is not None:
        return kept.long()
    sequences = _sequences(texts, words, length)
    store.save(key, sequences.float())
    return sequences


def _sequences(texts: Sequence[str], words: Sequence[str], length: int) -> Tensor:
    codes = np.zeros((len(texts), length), dtype=np.int64)
    for row, places in zip(codes, word_places(texts, words), strict=True):
        last = places[-length:]
        if last:
            row[-len(last) :] = np.maximum(np.array(last) + FIRST_WORD, UNKNOWN)
    return torch.from_numpy(codes)


def embedding_table(vectors: WordVectors) -> Tensor:
    """A vector for every code: zeros for padding and for unknown words, then those of the vocabulary.

    Returns:
        float32 ``[2 + V, dimensions]``.
    """
    return torch.cat(
        [vectors.vectors.new_zeros(FIRST_WORD, vectors.vectors.shape[1]), vectors.vectors]
    )
