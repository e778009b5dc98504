"""Losses of records: what a loss for the whole batch means for each of them."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpis.batches import Batch
from dpis.errors import CouplingError, InputError

Loss = Callable[[Any, Any], Tensor]
"""``loss(output, target)``: one value a row, or one for the whole batch (a sum or a mean)."""
Objective = Callable[[nn.Module, Batch], Tensor]
"""``objective(module, batch)``: the same, for models with several inputs or outputs."""


def objective_of(loss: Loss) -> Objective:
    """Run the module on all but the last entry of the batch, compare with the last.

    Losses of ``torch.nn`` are asked for their terms, and the terms of one row are then summed or
    averaged, as their ``reduction`` says. In one case that is not what torch does: class weights
    or ``ignore_index`` together with ``mean`` divide by a number that depends on all records of
    the batch. Here each row's sum is divided by the number of its own terms that count. Other losses with one value
    for the batch are asked for every row alone.
    """
    terms = _Terms.of(loss)
    if terms is None:
        row_losses: Loss = functools.partial(_row_by_row, loss)
    else:
        row_losses = loss if terms.reduction == "none" else terms.of_rows

    def objective(module: nn.Module, batch: Batch) -> Tensor:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise InputError(
                "A loss(output, target) needs batches of the form (input, ..., target); found "
                f"{type(batch).__name__}. For others give objective=, a function of the module and "
                "the batch that returns one loss a row."
            )
        *inputs, target = batch
        return row_losses(module(*inputs), target)

    return objective


@dataclass(frozen=True)
class _Terms:
    """A loss of ``torch.nn`` taken apart.

    Attributes:
        function: the loss of every single term.
        reduction: what torch would do with the terms of the whole batch.
        ignored: the class whose terms do not count, for losses that have one.
    """

    function: Loss
    reduction: str
    ignored: int | None

    @staticmethod
    def of(loss: Any) -> _Terms | None:
        """None: it is not a loss of ``torch.nn``."""
        if isinstance(loss, nn.Module):
            if not isinstance(getattr(loss, "reduction", None), str):
                return None
            by_term = copy.copy(loss)
            setattr(by_term, "reduction", "none")  # noqa: B010 (to type checkers a Tensor or a Module)
            return _Terms(by_term, str(loss.reduction), getattr(loss, "ignore_index", None))
        partial = isinstance(loss, functools.partial)
        function, given = (loss.func, loss.keywords) if partial else (loss, {})
        if getattr(function, "__module__", "") != functional.__name__:
            return None
        defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
        settings = defaults | given
        if "reduction" not in defaults:
            return None
        terms = functools.partial(loss, reduction="none")
        return _Terms(terms, settings["reduction"], settings.get("ignore_index"))

    def of_rows(self, output: Any, target: Any) -> Tensor:
        """The terms of every row, summed or averaged."""
        by_term: Tensor = self.function(output, target)
        if by_term.ndim == 1:
            return by_term  # one term a row: its sum and its mean (one that does not count is zero)
        by_term = by_term.reshape(by_term.shape[0], -1)
        if self.reduction != "mean":
            return by_term.sum(1)
        if self.ignored is not None and not target.is_floating_point():
            counted: Tensor = (target != self.ignored).reshape(by_term.shape[0], -1).sum(1)
            return by_term.sum(1) / counted.clamp(min=1)
        return by_term.mean(1)


def _row_by_row(loss: Loss, output: Any, target: Any) -> Tensor:
    """A loss that is not known: one value a row as it stands, one for the batch taken apart.

    A value for the whole batch may be divided by something that depends on all of its records. Asked for each row
    alone, it depends on nothing else.
    """
    value = loss(output, target)
    if value.ndim:
        return value
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
        raise InputError(
            "A loss for the whole batch can only be taken apart where output and target are tensors; found "
            f"{type(output).__name__} and {type(target).__name__}. What such a loss divides by may depend on all "
            "records, and the privacy guarantee would not hold. Return one loss a row, or give objective=."
        )
    try:
        each = torch.func.vmap(lambda o, t: loss(o[None], t[None]), randomness="different")
        return each(output, target)
    except (RuntimeError, NotImplementedError, ValueError):
        rows = range(len(output))
        return torch.stack([loss(output[i : i + 1], target[i : i + 1]) for i in rows])


def weighted_total(
    losses: Tensor,
    records: int,
    rows_per_record: int,
    present: Tensor | None,
    real: int | None = None,
) -> Tensor:
    """``Σ_i l_i`` over records, where ``l_i`` is the mean over the rows of record ``i``.

    Args:
        losses: one a row.
        records: how many there are.
        rows_per_record: K.
        present: ``[records, K]``, False for rows that only fill up; they count nothing.
        real: the records after the first so many only fill up a chunk; they count nothing.

    Raises:
        CouplingError: for one loss for the whole batch: whether it is a plain sum of the losses of records
            or divided by something that depends on all of them does not show.
    """
    rows = records * rows_per_record
    if losses.ndim == 0:
        raise CouplingError(
            "One loss a row is required of an objective; found one for the whole batch. Whether it is normalised over "
            "the batch (class weights, ignore_index, a count of tokens) or holds a term that belongs to no record (a "
            "weight penalty: use the optimizer's weight_decay) does not show, and either couples records: the privacy "
            "guarantee would not hold. Return the losses of the rows, shape [rows]."
        )
    if losses.shape != (rows,):
        raise InputError(
            f"One loss a row is required, shape ({rows},); found {tuple(losses.shape)}. Sum or "
            "average over positions and outputs, but not over rows."
        )
    if real is not None:
        losses = losses[: real * rows_per_record]
        present = None if present is None else present[:real]
    if present is None:
        return losses.sum() / rows_per_record
    shares = present / present.sum(1, keepdim=True).clamp(min=1)
    return torch.where(present.flatten(), losses * shares.flatten().to(losses), 0.0).sum()
