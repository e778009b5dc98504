"""Bounds of numeric columns from one accounted release: noisy histograms over fixed public cells.

The cells do not depend on the data. Octaves ``[2^e, 2^(e+1))`` of both signs from ``2^-20`` to ``2^64``, with one cell
for what is nearer to zero, find out where a column lies; sixteen equal parts of each octave tell how far into the last
octaves it reaches (a year lies in 2016..2048 rather than in 1024..2048). Larger values count in the outermost cells.

A record adds one count to an octave and one to a part, in each column where it has a value. So the largest change one
record makes to all the counts together is

    Δ = sqrt(2 · columns)

in L2, under add/remove and zero-out alike. At user level each row of a user with r rows counts 1/r, which keeps Δ.

    counts = bucket_counts(columns)
    noisy  = counts + noise_std · Normal(0, I),   noise_std = 1.001 · multiplier · Δ     one event Gaussian(multiplier)
    bounds = bounds_from_counts(noisy, noise_std)                                         free: post-processing
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dpis.errors import InputError
from dpis.files.users import codes_by_appearance

LOWEST_EXPONENT, HIGHEST_EXPONENT = -20, 64
PARTS = 16
"""Equal parts of an octave."""

LARGEST_COUNT = 1e300
"""Sums of counts must not overflow, whatever the noise."""

DEFAULT_BOUNDS = (-1.0, 1.0)
"""Bounds of a column whose counts do not rise above the noise."""

OCTAVE_THRESHOLD = 4.5
"""An octave counts as filled above this many noise stds: a false one in 169 empty ones has probability 6e-4."""

WEAK, CLEAR = 2.0, 3.0
"""Beside a filled octave and inside it, where a mistake costs a factor of two at most: a weak sign is enough to keep
records inside the bounds, to leave them outside or to suppose the other sign takes a clear one."""

THIN = 0.01
"""A piece at the end with less than this share of a column is not worth wider bounds, however clearly it is there."""


def _edges(parts: int) -> NDArray[np.float64]:
    octaves = 2.0 ** np.arange(LOWEST_EXPONENT, HIGHEST_EXPONENT)
    lower = (octaves[:, None] * (1 + np.arange(parts) / parts)).ravel()
    positive = np.append(lower, 2.0**HIGHEST_EXPONENT)
    return np.concatenate([-positive[::-1], positive])


_OCTAVE_EDGES, _PART_EDGES = _edges(1), _edges(PARTS)
_OCTAVES, _FINE = len(_OCTAVE_EDGES) - 1, len(_PART_EDGES) - 1
_ZERO = _OCTAVES // 2
CELLS = _OCTAVES + _FINE
"""Counts a column."""


def sensitivity(columns: int) -> float:
    """Largest L2 change of `bucket_counts` by one record (or user): ``sqrt(2 · columns)``."""
    if columns < 1:
        raise InputError(f"a release of bounds needs at least one column, found {columns}")
    return math.sqrt(2 * columns)


def bucket_counts(
    columns: Sequence[NDArray[np.float64]], weights: NDArray[np.float64] | None = None
) -> torch.Tensor:
    """Exact counts, float64 ``[columns, CELLS]``: octaves, then parts. Private until noise is added.

    Args:
        columns: arrays of one length; NaN is a missing value and counts nowhere.
        weights: one a row, if a record is a user: `one_over_rows`.
    """
    counts = np.zeros((len(columns), CELLS))
    for column, out in zip(columns, counts, strict=True):
        known = ~np.isnan(column)
        values = np.clip(column[known], _PART_EDGES[0], _PART_EDGES[-1])
        share = None if weights is None else weights[known]
        for edges, part in ((_OCTAVE_EDGES, out[:_OCTAVES]), (_PART_EDGES, out[_OCTAVES:])):
            cells = np.searchsorted(edges, values, side="right") - 1
            cells = np.minimum(cells, len(edges) - 2)
            part += np.bincount(cells, weights=share, minlength=len(edges) - 1)
    return torch.from_numpy(counts)


def bounds_from_counts(noisy: torch.Tensor, noise_std: float) -> list[tuple[float, float]]:
    """Bounds that hold the bulk of every column; finite and ``low < high`` whatever the counts.

    From the first to the last octave that rises above the noise, its neighbours as long as they hold something, and
    the same octaves of the other sign if they do. The two ends then move inwards by halves, as long as the outer half
    holds next to nothing and the inner clearly something. What is outside will be clipped. If nothing rises above
    the noise: `DEFAULT_BOUNDS`.
    """
    if noisy.ndim != 2 or noisy.shape[1] != CELLS:
        raise InputError(
            f"counts must have the shape [columns, {CELLS}], found {tuple(noisy.shape)}"
        )
    if not 0 <= noise_std < math.inf:
        raise InputError(f"noise_std must be a finite number >= 0, found {noise_std!r}")
    table = noisy.detach().to("cpu", torch.float64).numpy()
    table = np.clip(np.where(np.isfinite(table), table, 0.0), -LARGEST_COUNT, LARGEST_COUNT)
    return [_Column(row[:_OCTAVES], row[_OCTAVES:], noise_std).bounds() for row in table]


@dataclass(frozen=True, slots=True)
class _Column:
    """Noisy counts of one column."""

    octaves: NDArray[np.float64]
    parts: NDArray[np.float64]
    noise_std: float

    def bounds(self) -> tuple[float, float]:
        filled = np.flatnonzero(self.octaves > OCTAVE_THRESHOLD * self.noise_std)
        if not len(filled):
            return DEFAULT_BOUNDS
        thin = THIN * float(self.octaves[filled].sum())
        first, last = self._with_neighbours(int(filled[0]), int(filled[-1]), thin)
        if first == last == _ZERO:
            return float(_OCTAVE_EDGES[_ZERO]), float(_OCTAVE_EDGES[_ZERO + 1])
        low = 0.0 if first == _ZERO else float(_PART_EDGES[self._end(first, thin, lower=True)])
        high = 0.0 if last == _ZERO else float(_PART_EDGES[self._end(last, thin, lower=False)])
        return low, high

    def _with_neighbours(self, first: int, last: int, thin: float) -> tuple[int, int]:
        enough = max(WEAK * self.noise_std, thin)
        while first > 0 and self.octaves[first - 1] > enough:
            first -= 1
        while last < _OCTAVES - 1 and self.octaves[last + 1] > enough:
            last += 1
        if first <= _ZERO <= last:
            return first, last
        mirror_first, mirror_last = _OCTAVES - 1 - last, _OCTAVES - 1 - first
        mirror = self.octaves[mirror_first : mirror_last + 1]
        if mirror.sum() > max(CLEAR * self.noise_std * math.sqrt(len(mirror)), thin):
            return min(first, mirror_first), max(last, mirror_last)
        return first, last

    def _end(self, octave: int, thin: float, *, lower: bool) -> int:
        """The edge at which a range that ends in this octave ends, searched by halves."""
        begin = octave * PARTS if octave < _ZERO else (octave - 1) * PARTS + 1
        end = begin + PARTS
        while end - begin > 1:
            middle = (begin + end) // 2
            outer, inner = ((begin, middle), (middle, end))[:: 1 if lower else -1]
            noise = self.noise_std * math.sqrt(middle - begin)
            outer_count, inner_count = (self.parts[slice(*half)].sum() for half in (outer, inner))
            if outer_count > max(WEAK * noise, thin):
                begin, end = outer
            elif inner_count > max(CLEAR * noise, thin):  # no less than WEAK: two ends never cross
                begin, end = inner
            else:
                break
        return begin if lower else end


def one_over_rows(user_ids: NDArray[np.generic]) -> NDArray[np.float64]:
    """What each row of a user counts, so that all of them together count once."""
    codes = codes_by_appearance(user_ids)
    shares: NDArray[np.float64] = 1.0 / np.bincount(codes)[codes]
    return shares
