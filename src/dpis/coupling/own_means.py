"""Means that divide by something of the whole batch, taken over every record's own terms instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dpis.coupling.owners import UNKNOWN
from dpis.errors import CouplingError, InputError
from dpis.group import warn

Function = Callable[..., Any]

OF_CLASSES: frozenset[Function] = frozenset({functional.cross_entropy, functional.nll_loss})
"""Means over terms that weigh unlike: by class weights, or zero where a target is ignored."""
OF_NUMBERS: frozenset[Function] = frozenset(
    {functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss,
     functional.binary_cross_entropy}
)  # fmt: skip
"""Means whose gradients are rounded by the size of the batch, if they are not taken over the terms."""


class OwnMeanWarning(UserWarning):
    """A mean over the whole batch was replaced by the mean of every record's own."""

    def __init__(self) -> None:
        super().__init__(
            "a mean with class weights or ignored targets divides by something of the whole batch, which would couple "
            "records. Every record's terms are averaged by themselves instead, over those that count; class weights "
            "are divided by their mean; and the mean over records is taken"
        )


class OwnMeans:
    """What is remembered of the losses of one loop.

    Class weights are public numbers, the same in every step: weights made of the targets of a batch would couple its
    records.
    """

    def __init__(self) -> None:
        self._said = False
        self._weights: dict[int, Tensor] = {}

    def take(
        self,
        function: Function,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        records: int,
        number: int,
        owners: Callable[[Tensor], Tensor],
        picked: Container[Tensor] = (),
    ) -> Tensor | None:
        """What is to stand for a loss of torch that is about to be called; None: the loss itself.

        Args:
            function: one of `OF_CLASSES` or `OF_NUMBERS`.
            args: what it is given.
            kwargs: what it is given by name.
            records: how many the batch has.
            number: how many such losses the loop computed of this batch before.
            owners: the record of every row of a tensor.
            picked: tensors whose rows were picked: not as many for every record.

        Raises:
            CouplingError: if the weights of the mean belong to the batch.
        """
        given = _signature(function).bind(*args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        if _reduction(values) != "mean" or not values["input"].requires_grad:
            return None
        by_term: Tensor = function(**values, reduction="none")
        if function in OF_NUMBERS:
            if function is not functional.binary_cross_entropy and values.get("weight") is not None:
                raise CouplingError(_WEIGHED)
            if values["input"] not in picked or len(by_term) != len(values["input"]):
                return by_term.mean()
            everyone = torch.ones_like(by_term, dtype=torch.bool)
            return _by_record(by_term, everyone, owners(values["input"]), records).mean()
        if by_term.ndim == 0:
            return None  # a single term, divided by its own weight
        counted, size = (
            torch.ones_like(by_term, dtype=torch.bool),
            self._size(values["weight"], number),
        )
        if not values["target"].is_floating_point():
            counted = values["target"] != values["ignore_index"]
        if values["weight"] is not None or not bool(counted.all()):
            self._say()
        of = owners(values["input"])
        if size == 1.0 and by_term.ndim == 1 and torch.equal(of, torch.arange(records).to(of)):
            return by_term.mean()  # one term a record; one that does not count is zero
        return _by_record(by_term / size, counted, of, records).mean()

    def require_public(self, weight: Tensor | None, number: int) -> None:
        """Weights of classes that torch does not divide by, as ``pos_weight``: the same in every step, too."""
        if weight is None:
            return
        known = self._weights.setdefault(number, weight.detach().clone())
        if not torch.equal(known, weight):
            raise CouplingError(_CHANGED)

    def _size(self, weight: Tensor | None, number: int) -> float:
        """The mean of class weights, which are the same in every step."""
        if weight is None:
            return 1.0
        self.require_public(weight, number)
        size = float(weight.double().mean())
        if not size > 0:
            raise InputError("class weights must not all be zero, nor their mean negative")
        return size

    def _say(self) -> None:
        if not self._said:
            self._said = True
            warn(OwnMeanWarning(), stacklevel=2)


_signature = lru_cache(inspect.signature)


def _reduction(values: dict[str, Any]) -> str:
    """Taken out of the arguments of a loss, in its present form or the one it had before."""
    size_average, reduce = values.pop("size_average", None), values.pop("reduce", None)
    said: str = values.pop("reduction")
    if size_average is None and reduce is None:
        return said
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _by_record(by_term: Tensor, counted: Tensor, owners: Tensor, records: int) -> Tensor:
    """The mean over the terms of every record that count; zero where none does."""
    known = owners != UNKNOWN  # else its record has no gradient here
    of, terms = owners[known], _sum_of_rows(by_term)[known]
    counts = _sum_of_rows(counted)[known].to(by_term.dtype)
    total, count = (torch.zeros(records, dtype=t.dtype, device=t.device) for t in (terms, counts))
    return total.index_add(0, of, terms) / count.index_add(0, of, counts).clamp(min=1)


def _sum_of_rows(tensor: Tensor) -> Tensor:
    return tensor.flatten(1).sum(1) if tensor.ndim > 1 else tensor


_WEIGHED = (
    "A mean with weights divides by the sum of the weights in the whole batch: every record's gradient then depends on "
    "the others and the guarantee would not hold. Use reduction='none', multiply by the weights, and take the mean"
)
_CHANGED = (
    "Class weights must be the same in every step, found others than before: if they are made of the targets of a "
    "batch, every record's gradient depends on the others and the guarantee would not hold. Fix them beforehand, from "
    "public numbers"
)
