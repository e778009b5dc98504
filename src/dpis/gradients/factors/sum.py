"""Several uses of the same elements: one norm and one sum, cross terms included."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import combinations

import torch
from torch import Tensor

from dpis.gradients.aligned import product
from dpis.gradients.factors.dense import Dense
from dpis.gradients.factors.factor import Compound, Factor, OverPositions
from dpis.gradients.factors.lookup import Lookup
from dpis.gradients.factors.norms import Squares, lost_in, squares_of_terms, total_of
from dpis.gradients.factors.outer import Outer


@dataclass(frozen=True, eq=False)
class Sum(Compound):
    """``G_i = Σ_k G_i^(k)``: different kinds of use of the same elements.

    ``||Σ_k G^(k)||² = Σ_k ||G^(k)||² + 2 Σ_{k<m} <G^(k), G^(m)>``.
    """

    @property
    def shape(self) -> torch.Size:
        """The shape all terms have."""
        return self.terms[0].shape

    def squares(self) -> Squares:
        """Squares and cross terms, which may cancel."""
        own = total_of([term.squares() for term in self.terms])
        pairs = [inner_products(a, b) for a, b in combinations(self.terms, 2)]
        cross, lost = (reduce(torch.add, each) for each in zip(*pairs, strict=True))
        return squares_of_terms(own.found + 2 * cross, own.found, own.lost + 2 * lost)

    def quick_sum(self, weights: Tensor) -> Tensor:
        """The terms' sums, added up."""
        return reduce(torch.add, (term.quick_sum(weights) for term in self.terms))

    def explicit(self) -> Tensor:
        """The terms' gradients, added up."""
        return reduce(torch.add, (term.explicit() for term in self.terms))


def inner_products(a: Factor, b: Factor) -> tuple[Tensor, Tensor]:
    """``<A_i, B_i>`` for every record, and what it may lack because numbers were too small, in float64."""
    if isinstance(a, Lookup) and isinstance(b, Outer):
        return inner_products(b, a)
    if isinstance(a, Outer) and isinstance(b, Lookup):
        # Σ_{l,m} g_l[index_m] <x_l, e_m>: never a table a record
        L = a.inputs.shape[1]
        picked = a.output_grads.gather(2, b.indices[:, None, :].expand(-1, L, -1))
        inner = (picked * product(a.inputs, b.output_grads.mT)).sum((1, 2)).double()
        most = picked.abs().amax((1, 2)).double()
        return inner, (most * a.inputs.shape[2] + 1) * lost_in(L * b.indices.shape[1])
    inner = (a.explicit().double() * b.explicit().double()).reshape(a.records, -1).sum(1)
    return inner, torch.zeros_like(inner)


def join(a: Factor, b: Factor) -> Factor:
    """``A + B``."""
    if isinstance(a, OverPositions) and isinstance(b, type(a)):
        return a.join(b)
    if type(a) is type(b) is Dense:
        return Dense(a.gradients + b.gradients)
    if not isinstance(a, Sum):
        return Sum((a, b))
    for k, term in enumerate(a.terms):  # one of the same kind, if there is one
        if type(term) is type(b) and not isinstance(joined := join(term, b), Sum):
            return Sum((*a.terms[:k], joined, *a.terms[k + 1 :]))
    return Sum((*a.terms, b))
