"""The promise: a budget (epsilon, delta), and between which data sets it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from dpis.errors import InputError
from dpis.options import Choice

SMALLEST_EPSILON, LARGEST_EPSILON = 1e-4, 1000.0
LARGEST_DELTA = 0.1


@dataclass(frozen=True, slots=True)
class Budget:
    """An (epsilon, delta) promise: ``P(M(D) ∈ S) ≤ exp(epsilon)·P(M(D') ∈ S) + delta``."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise InputError(f"epsilon must be a finite number above 0, found {self.epsilon!r}")
        if self.epsilon < SMALLEST_EPSILON:
            raise InputError(
                f"epsilon = {self.epsilon:g} leaves nothing to learn from: the smallest taken is {SMALLEST_EPSILON:g}"
            )
        if self.epsilon > LARGEST_EPSILON:
            raise InputError(
                f"epsilon = {self.epsilon:g} is no promise any more: the largest taken is {LARGEST_EPSILON:g}"
            )
        if not 0 < self.delta < 1:
            raise InputError(f"delta must lie strictly between 0 and 1, found {self.delta!r}")
        if self.delta > LARGEST_DELTA:
            raise InputError(
                f"delta = {self.delta:g} is no promise: the largest taken is {LARGEST_DELTA:g}, and below 1 / number "
                "of records is what protects each of them"
            )

    def split(self, share: float) -> tuple[Budget, Budget]:
        """Two budgets that add up to this one: ``share`` of it, and the rest.

        For a release whose outcome the plan of the rest depends on (a noisy N in predeclared mode):
        by basic composition the two promises together are this one.
        """
        if not 0 < share < 1:
            raise InputError(f"share must lie strictly between 0 and 1, found {share!r}")
        first = Budget(self.epsilon * share, self.delta * share)
        return first, Budget(self.epsilon - first.epsilon, self.delta - first.delta)


class Adjacency(Choice):
    """Which two data sets the promise keeps apart."""

    ADD_REMOVE = "add-remove"
    """One has a record more; the number of records is not revealed."""

    ZERO_OUT = "zero-out"
    """One record is replaced by nothing at the same declared count: the number of records is public."""

    @classmethod
    def parse(cls, name: str, what: str | None = None) -> Self:
        """The adjacency of that name; replace-one is refused with what to do instead."""
        if name == "replace-one":
            raise InputError(
                "replace-one adjacency is not supported: Poisson sampling is accounted for adding or "
                "removing a record. Use add-remove; by group privacy its (epsilon, delta) implies "
                "(2 epsilon, (1 + exp(epsilon)) delta) for replacing one"
            )
        return super().parse(name, what)
