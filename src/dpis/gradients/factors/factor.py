"""What a factor is: it answers the norms of per-example gradients, and their weighted sums.

Sums are made in blocks of records, and in float64 where float32 does not hold the numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import isfinite
from typing import Self

import torch
from torch import Tensor

from dpis.gradients.factors.norms import Squares, doubtful, total_of

# Which records are kept: their indices, or a slice of all.
Kept = Tensor | slice

RECORDS_AT_ONCE = 512
"""So many records are summed in float32; blocks of them are added up in float64.

A sum of ``m`` contributions of norm one has norm at most ``m``, so each addition rounds by at most ``6e-8 m`` of one
contribution. With 512 that is 3e-5; for whole blocks of contributions that all point the same way, up to 9e-5 was
measured, on several machines. One record more may shift all blocks behind it, whose errors are independent:
``9e-5 √(2 blocks)``, below 4e-4 for `MANY_RECORDS`.
"""

MANY_RECORDS = 1 << 12
"""More than these are summed in float64 within their blocks, too."""

LEAST_WEIGHT = 1e-30
"""Smaller weights lose digits in float32."""

REMADE_AT_ONCE = 8
"""So many records are computed anew together. Always so many: the last bits must not depend on how many there are."""


@dataclass(frozen=True, eq=False)
class Factor(ABC):
    """The per-example gradients of one parameter, without (necessarily) holding them.

    With ``G_i`` the gradient of record ``i``, a factor answers ``||G_i||²`` for every record and
    ``Σ_i w_i G_i`` for weights chosen afterwards. Both come from the same stored tensors, so a sum
    clipped by these norms is clipped exactly. Factors are values: no method changes one.
    """

    @property
    @abstractmethod
    def records(self) -> int:
        """How many records the factor holds."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The shape of the parameter (or of the view of it) these are gradients of."""

    @abstractmethod
    def squares(self) -> Squares:
        """``||G_i||²`` for every record, in the precision of the factor, and what it may lack."""

    @abstractmethod
    def quick_sum(self, weights: Tensor) -> Tensor:
        """``Σ_i weights_i G_i``, of the parameter's shape; not finite where float32 does not hold the numbers.

        In float64 where several blocks of records were added up.
        """

    @abstractmethod
    def vanishes(self) -> Tensor:
        """``[records]``: True where a stored tensor is zero throughout, and so the gradient."""

    @abstractmethod
    def explicit(self) -> Tensor:
        """Every ``G_i``, shape ``[records, *shape]``: for tests, and cross terms of last resort."""

    @abstractmethod
    def fold(self, rows_per_record: int) -> Factor:
        """Read each run of ``rows_per_record`` rows as one record; its gradient is their sum."""

    @abstractmethod
    def select(self, kept: Kept) -> Self:
        """The records with these indices alone."""

    @abstractmethod
    def double(self) -> Self:
        """The same numbers in float64, which holds the squares of all products of two of them."""

    def squared_norms(self) -> Tensor:
        """``||G_i||²`` for every record, shape ``[records]``, in float64, whatever the size of the numbers."""
        return squared_norms((self,))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """``Σ_i weights_i G_i``, of the parameter's shape, in float64 where float32 does not do.

        Records of weight zero are left out before anything is multiplied. They cost nothing, and a
        gradient among them that is not finite does not spoil the sum: ``0 * nan`` is ``nan``.
        """
        kept, exactly = kept_by(weights)
        if kept is None:
            return finite_sum(self, weights, exactly)
        return finite_sum(self.select(kept), chosen(weights, kept), exactly)


def squared_norms(factors: Sequence[Factor], records: int | None = None) -> Tensor:
    """``Σ ||G_i||²`` over factors of parts that do not overlap, shape ``[records]``, in float64.

    Args:
        factors: of the same records.
        records: the first so many; None: all.
    """
    return squared_norms_and_doubts(factors, records)[0]


def squared_norms_and_doubts(
    factors: Sequence[Factor], records: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """The same, and which records float32 does not do for; None: there are none.

    Their squares were made anew in float64. So must be their part of a sum: what is left of terms that cancel may be no
    longer than what float32 rounds in adding them up.
    """
    found, lost = total_of([factor.squares() for factor in factors])
    squares = Squares(found[:records], lost[:records] if isinstance(lost, Tensor) else lost)
    doubts = doubtful(squares)
    if not bool(doubts.any()):
        return squares.found, None
    places, result = doubts.nonzero().squeeze(1), squares.found.clone()
    zero = reduce(torch.logical_and, (factor.select(places).vanishes() for factor in factors))
    result[places[zero]] = 0.0
    places = places[~zero]
    for first in range(0, len(places), REMADE_AT_ONCE):
        few = places[first : first + REMADE_AT_ONCE]
        filled = torch.cat([few, few[-1:].expand(REMADE_AT_ONCE - len(few))])
        exact = total_of([factor.select(filled).double().squares() for factor in factors])
        result[few] = exact.found[: len(few)]
    return result, places if len(places) else None


def finite_sum(factor: Factor, weights: Tensor, exactly: bool) -> Tensor:
    """``Σ_i weights_i G_i``, in float64 where float32 does not do.

    A side that is scaled by weights may be too large for float32 where the other is tiny, or zero.

    Args:
        factor: of records that all have a weight.
        weights: theirs, none zero.
        exactly: in float64 from the start.
    """
    if not exactly:
        total = factor.quick_sum(weights)
        if isfinite(float(total.sum())):
            return total
    return factor.double().quick_sum(weights)


@dataclass(frozen=True, eq=False)
class Stored(Factor):
    """Made of tensors that have one entry for each record in front."""

    @property
    def records(self) -> int:
        """The length of any of the tensors."""
        return next(len(stored) for stored in vars(self).values() if isinstance(stored, Tensor))

    @abstractmethod
    def block_sum(self, weights: Tensor) -> Tensor:
        """``Σ_i weights_i G_i`` of a block of records, in the precision of the factor."""

    def quick_sum(self, weights: Tensor) -> Tensor:
        """Block by block: in float64 where several were added up, else as `block_sum` gives it."""
        records = self.records
        if records <= RECORDS_AT_ONCE:
            return self.block_sum(weights)
        total = torch.zeros((), dtype=torch.float64, device=weights.device)
        for first in range(0, records, RECORDS_AT_ONCE):
            place = slice(first, min(first + RECORDS_AT_ONCE, records))
            block = self.select(place)
            block = block.double() if records > MANY_RECORDS else block
            part = block.block_sum(weights[place])
            total = total.add_(part) if total.ndim else part.double()
        return total

    def vanishes(self) -> Tensor:
        """One tensor of zeros is enough: gradients are sums of products with each."""
        stored = [t for t in vars(self).values() if isinstance(t, Tensor) and t.is_floating_point()]
        moved = [
            t.reshape(self.records, t[:1].numel() * len(t) // self.records).any(1) for t in stored
        ]
        return ~reduce(torch.logical_and, moved)

    def select(self, kept: Kept) -> Self:
        """These entries of every tensor."""
        return self.each_tensor(lambda tensor: chosen(tensor, kept))

    def double(self) -> Self:
        """Every tensor but indices."""
        return self.each_tensor(lambda t: t.double() if t.is_floating_point() else t)

    def each_tensor(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same factor with every tensor changed."""
        stored = vars(self).items()
        return replace(self, **{n: change(t) for n, t in stored if isinstance(t, Tensor)})


@dataclass(frozen=True, eq=False)
class OverPositions(Stored):
    """Its tensors are ``[records, positions, ...]``: ``G_i`` is a sum over positions.

    Rows of one record and uses of one weight are further positions, so their cross terms are
    counted exactly.
    """

    def fold(self, rows_per_record: int) -> Self:
        """The rows of a record become positions."""
        if rows_per_record == 1:
            return self
        records = self.records // rows_per_record
        return self.each_tensor(lambda tensor: tensor.reshape(records, -1, *tensor.shape[2:]))

    def join(self, other: Self) -> Self:
        """The sum of both: the other's positions after these."""
        others = (stored for stored in vars(other).values() if isinstance(stored, Tensor))
        return self.each_tensor(lambda tensor: torch.cat([tensor, next(others)], dim=1))


@dataclass(frozen=True, eq=False)
class Compound(Factor):
    """The sum of other factors of the same records."""

    terms: tuple[Factor, ...]

    @property
    def records(self) -> int:
        """How many records the factor holds."""
        return self.terms[0].records

    def fold(self, rows_per_record: int) -> Self:
        """Term by term."""
        return self._each(lambda term: term.fold(rows_per_record))

    def select(self, kept: Kept) -> Self:
        """Term by term."""
        return self._each(lambda term: term.select(kept))

    def double(self) -> Self:
        """Term by term."""
        return self._each(lambda term: term.double())

    def vanishes(self) -> Tensor:
        """Where all terms do."""
        return reduce(torch.logical_and, (term.vanishes() for term in self.terms))

    def _each(self, change: Callable[[Factor], Factor]) -> Self:
        return replace(self, terms=tuple(map(change, self.terms)))


def chosen(tensor: Tensor, kept: Kept) -> Tensor:
    """The rows of a tensor that are kept: a view where they are a slice."""
    return tensor[kept] if isinstance(kept, slice) else tensor.index_select(0, kept)


def kept_by(weights: Tensor) -> tuple[Kept | None, bool]:
    """The records of non-zero weight, and whether a weight among them is so small that float32 loses digits.

    None: all are kept. If only the last ones have no weight, what is kept is a slice.
    """
    least = float(weights.abs().amin()) if len(weights) else LEAST_WEIGHT
    if least != 0.0:
        return None, not least >= LEAST_WEIGHT
    kept = weights.nonzero().squeeze(1)
    first = slice(len(kept))
    at_front = bool(weights[first].all())
    _, exactly = kept_by(weights[kept])
    return first if at_front else kept, exactly


def widest(sums: Sequence[Tensor]) -> torch.dtype:
    """A precision that holds all of them: some may be float64, others not."""
    return reduce(torch.promote_types, (total.dtype for total in sums))
