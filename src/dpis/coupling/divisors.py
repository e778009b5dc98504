"""Numbers that a loop divides or multiplies a loss by: public, or how many records there are, not made of the batch.

``(losses * mask).sum() / mask.sum()`` divides by a number of the whole batch. Nothing tells where a number comes from.
But a public one is the same in every step, and one that counts records is as much for every record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpis.errors import CouplingError

Function = Callable[..., Any]

_DIVISIONS: frozenset[Function] = frozenset(
    {torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.div_, Tensor.divide, Tensor.true_divide,
     Tensor.__truediv__, Tensor.__itruediv__}
)  # fmt: skip
_PRODUCTS: frozenset[Function] = frozenset(
    {torch.mul, torch.multiply, Tensor.mul, Tensor.mul_, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__,
     Tensor.__imul__}
)  # fmt: skip
SCALINGS: frozenset[Function] = _DIVISIONS | _PRODUCTS
"""What brings a number to a loss."""

OFF = 1e-5
"""Relative: a number in float32 is rounded."""


class Divisors:
    """What the losses of one loop were divided by so far, in the order of the calls of a step.

    Args:
        mean: losses are means: they may be divided by the number of records.
    """

    def __init__(self, mean: bool) -> None:
        self._mean = mean
        self._known: dict[int, tuple[float, int]] = {}
        self._constant: dict[int, bool] = {}
        self._by_record: dict[int, bool] = {}

    def take(self, function: Function, args: Sequence[Any], number: int, records: int) -> bool:
        """A scaling that is about to happen.

        Args:
            function: one of `SCALINGS`.
            args: what it is given.
            number: how many such numbers the loop has used for this batch before.
            records: of the batch.

        Returns:
            Whether there was such a number.

        Raises:
            CouplingError: if the number is neither the same in every step, nor as many for every record.
        """
        value = _number(function, args)
        if value is None or not records or not math.isfinite(value):
            return False
        if function in _PRODUCTS and value:
            value = 1 / value
        first, count = self._known.setdefault(number, (value, records))
        same = self._constant.get(number, True) and math.isclose(value, first, rel_tol=OFF)
        each = self._by_record.get(number, self._mean) and math.isclose(
            value / records, first / count, rel_tol=OFF
        )
        if not (same or each):
            raise CouplingError(_OF_THE_BATCH)
        self._constant[number], self._by_record[number] = same, each
        return True


def _number(function: Function, args: Sequence[Any]) -> float | None:
    """A tensor of one number, without gradient; or a whole number that divides a single one."""
    if len(args) != 2:
        return None
    one, other = args
    if function in _PRODUCTS and isinstance(other, Tensor) and other.requires_grad:
        one, other = other, one
    if not isinstance(one, Tensor) or not one.requires_grad:
        return None
    if isinstance(other, Tensor):
        return float(other) if other.ndim == 0 and not other.requires_grad else None
    whole = type(other) is int and one.ndim == 0 and function in _DIVISIONS
    return float(other) if whole else None


_OF_THE_BATCH = (
    "The loss couples records: it was divided (or multiplied) by another number than in the step before, and not by as "
    "much for every record. If it is made of the batch (mask.sum()), every record's gradient depends on the others and "
    "the guarantee would not hold. Divide every record's loss by a number of its own, and take the mean over records. "
    "If it is public, a schedule say, give it as a float: loss * float(factor)"
)
