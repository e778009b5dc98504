"""A whole text as one dense row that a linear model learns well from, even from noisy gradients.

Noise falls on every coordinate alike, so there must be few of them, and the ones that matter must be large. What
matters is not learned from records: it is said in advance, by words of praise and of blame.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpis.datasets.glove import WordVectors
from dpis.errors import InputError
from dpis.features.cache import FeatureCache
from dpis.features.texts import word_places

Array = npt.NDArray[np.float32]

FORMAT = "bag-1"
"""Part of the cache's key. Raise the number whenever features change in value or order."""

PRAISE = (
    "good great excellent wonderful superb brilliant perfect best loved enjoyable beautiful"
    " fantastic amazing favorite"
)
BLAME = "bad terrible awful horrible poor worst boring stupid waste ridiculous dull disappointing lame annoying"
"""Seeds: a person's knowledge of English, written down without counting any review."""

COLUMNS = 1000
"""Words with a coordinate of their own."""

VECTOR_SHARE = 0.5
"""Length of the averaged word vectors in a row, beside 1 for the words."""

WORD_MASS, VECTOR_MASS = 1e-3, 1e-4
"""``a`` in the weight ``a / (a + p)`` of a word with probability ``p`` in public text: rare words count fully."""

RANK_SHIFT, RANK_POWER = 20.0, 0.25
"""Which words get a coordinate: those with the largest ``affect / (RANK_SHIFT + rank)**RANK_POWER``."""

ALL_WORDS = 400_000
"""How many words GloVe 6B has."""


@dataclass(frozen=True, eq=False)
class Bag:
    """What a row is computed with; all of it from public words and vectors.

    Attributes:
        words: The vocabulary.
        column: For every word its column, or -1.
        weight: For every word what stands in its column if it occurs.
        vectors: For every word what it adds to the part of averaged vectors.
        columns: How many words have a column.
    """

    words: tuple[str, ...]
    column: npt.NDArray[np.int64]
    weight: Array
    vectors: Array
    columns: int

    @staticmethod
    def of(vectors: WordVectors, columns: int = COLUMNS) -> Bag:
        """Choose columns and weights from public vectors and ranks."""
        if columns < 0:
            raise InputError(f"columns must not be negative, found {columns}")
        ranks = vectors.ranks.numpy().astype(np.float64)
        unit = _unit_rows(_whitened(vectors.vectors.numpy().astype(np.float64)))
        affect = _affect(vectors.words, unit)
        probability = 1 / ((ranks + 1) * (np.log(ALL_WORDS) + np.euler_gamma))  # Zipf's law
        order = np.argsort(-affect / (RANK_SHIFT + ranks) ** RANK_POWER, kind="stable")[:columns]
        column = np.full(len(ranks), -1)
        column[order] = np.arange(len(order))
        return Bag(
            words=vectors.words,
            column=column,
            weight=(affect * WORD_MASS / (WORD_MASS + probability)).astype(np.float32),
            vectors=(unit * (VECTOR_MASS / (VECTOR_MASS + probability))[:, None]).astype(
                np.float32
            ),
            columns=len(order),
        )

    @property
    def size(self) -> int:
        """Coordinates of a row."""
        return self.columns + int(self.vectors.shape[1])

    def row(self, places: Sequence[int]) -> Array:
        """The row of one text: which words occur, not how often; of length 1, or 0 if there is nothing to say."""
        row = np.zeros(self.size, dtype=np.float32)
        present = np.array(sorted({*places} - {-1}), dtype=np.int64)
        if len(present):
            own = present[self.column[present] >= 0]
            row[self.column[own]] = self.weight[own]
            row[: self.columns] = _unit(row[: self.columns])
            row[self.columns :] = VECTOR_SHARE * _unit(self.vectors[present].sum(axis=0))
        return _unit(row)

    def rows(self, texts: Sequence[str]) -> Tensor:
        """The rows of all texts."""
        rows = np.zeros((len(texts), self.size), dtype=np.float32)
        for i, places in enumerate(word_places(texts, self.words)):
            rows[i] = self.row(places)
        return torch.from_numpy(rows)


def bag_features(
    texts: Sequence[str],
    vectors: WordVectors,
    columns: int = COLUMNS,
    *,
    cache_dir: str | PathLike[str] | None = None,
    cache: bool = True,
) -> Tensor:
    r"""One row of length 1 for every text, from frozen public word vectors.

    With whitened unit vectors :math:`u_w`, a word's affect is
    :math:`h_w = \max(0, \langle u_w, \bar u_{praise}\rangle, \langle u_w, \bar u_{blame}\rangle)`.
    The row joins, for the words with a column, :math:`h_w \cdot a/(a + p_w)` where :math:`w` occurs, and
    half as long the sum of :math:`u_w \cdot b/(b + p_w)` over all words that occur; :math:`p_w` is a
    word's share in public text by Zipf's law.

    Every row depends on its text, ``vectors`` and constants alone, so it costs no privacy. The seeds of praise
    and blame bring knowledge of the task: a comparison with methods that have none must say so.

    Args:
        texts: The records.
        vectors: Public word vectors, such as ``load_glove()``.
        columns: How many words have a coordinate of their own.
        cache_dir: As in ``scatter_features``. Rows are as private as the texts.
        cache: False keeps nothing on disk and reads nothing.

    Returns:
        float32 ``[N, columns + dimensions]``.
    """
    bag = Bag.of(vectors, columns)
    store = FeatureCache.open(cache_dir) if cache else None
    if store is None:
        return bag.rows(texts)
    digest = hashlib.sha256(bag.vectors.tobytes() + bag.weight.tobytes()).hexdigest()
    key = store.text_key(f"{FORMAT} columns={bag.columns} {digest}", texts, vectors.words)
    features = store.load(key, (len(texts), bag.size))
    if features is None:
        features = bag.rows(texts)
        store.save(key, features)
    return features


def _affect(words: Sequence[str], unit: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How near every word is to praise or to blame, whichever is nearer; from 0 to 1."""
    place = {word: i for i, word in enumerate(words)}
    affect = np.zeros(len(words))
    for seeds in (PRAISE, BLAME):
        known = [place[seed] for seed in seeds.split() if seed in place]
        if known:
            middle = _unit_rows(unit[known].mean(axis=0, keepdims=True))[0]
            affect = np.maximum(affect, unit @ middle)
    return affect


def _whitened(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Centred, and with the same variance in every direction: a few directions else drown the others."""
    centred = vectors - vectors.mean(axis=0)
    variances, directions = np.linalg.eigh(centred.T @ centred / max(1, len(centred)))
    floor = max(1e-6 * float(variances.max(initial=0)), np.finfo(np.float64).tiny)
    scales = 1 / np.sqrt(np.maximum(variances, floor))
    result: npt.NDArray[np.float64] = centred @ (directions * scales) @ directions.T
    return result


def _unit_rows(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def _unit(row: Array) -> Array:
    length = np.linalg.norm(row)
    return row / length if length > 0 else row
