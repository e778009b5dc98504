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

from dpis.gradients.batches import Batch
from dpis.gradients.rules.base import CouplingError

Loss = Callable[[Any, Any], Tensor]
"""``loss(output, target)``: one value a row, or one for the whole batch (a sum or a mean)."""
Objective = Callable[[nn.Module, Batch], Tensor]
"""``objective(module, batch)``: the same, for models with several inputs or outputs."""


def objective_of(loss: Loss) -> Objective:
    """Run the module on all but the last entry of the batch, compare with the last.

    Losses of ``torch.nn`` are asked for their terms, and the terms of one row are then summed or
    averaged, as their ``reduction`` says. In one case that is not what torch does: class weights
    or ``ignore_index`` together with ``mean`` divide by a number that depends on all records of
    the batch. Here each row's sum is divided by the number of its own terms that count.
    """
    row_losses = _by_row(loss)

    def objective(module: nn.Module, batch: Batch) -> Tensor:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise TypeError(
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


def _by_row(loss: Loss) -> Loss:
    terms = _terms_of_module(loss) if isinstance(loss, nn.Module) else _terms_of_function(loss)
    if terms is None or terms.reduction == "none":
        return loss

    def row_losses(output: Any, target: Any) -> Tensor:
        by_term: Tensor = terms.function(output, target)
        by_term = by_term.reshape(by_term.shape[0], -1)
        if terms.reduction != "mean":
            return by_term.sum(1)
        if terms.ignored is not None and not target.is_floating_point():
            counted: Tensor = (target != terms.ignored).reshape(by_term.shape[0], -1).sum(1)
            return by_term.sum(1) / counted.clamp(min=1)
        return by_term.mean(1)

    return row_losses


def _terms_of_module(loss: nn.Module) -> _Terms | None:
    if not isinstance(getattr(loss, "reduction", None), str):
        return None
    reduction = str(loss.reduction)
    terms = copy.copy(loss)
    setattr(terms, "reduction", "none")  # noqa: B010 (to type checkers a Tensor or a Module)
    return _Terms(terms, reduction, getattr(loss, "ignore_index", None))


def _terms_of_function(loss: Any) -> _Terms | None:
    partial = isinstance(loss, functools.partial)
    function, settings = (loss.func, loss.keywords) if partial else (loss, {})
    if getattr(function, "__module__", "") != functional.__name__:
        return None
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    if "reduction" not in defaults:
        return None
    settings = defaults | settings
    terms = functools.partial(loss, reduction="none")
    return _Terms(terms, settings["reduction"], settings.get("ignore_index"))


def weighted_total(
    losses: Tensor, records: int, rows_per_record: int, present: Tensor | None, scale: str | None
) -> Tensor:
    """``Σ_i l_i`` over records, where ``l_i`` is the mean over the rows of record ``i``.

    Args:
        losses: one a row, or one for the batch.
        records: how many there are.
        rows_per_record: K.
        present: ``[records, K]``, False for rows that only fill up; they count nothing.
        scale: for one loss for the batch: whether it is the ``"sum"`` or the ``"mean"``.
    """
    rows = records * rows_per_record
    if losses.ndim == 0 and scale is not None:
        if present is not None:
            raise ValueError(
                "Rows that only fill up a record need one loss a row to be left out; found one "
                "loss for the whole batch. Return a loss of shape [rows]."
            )
        return losses * records if scale == "mean" else losses / rows_per_record
    if losses.shape != (rows,):
        raise ValueError(
            f"One loss a row is required, shape ({rows},); found {tuple(losses.shape)}. Sum or "
            "average over positions and outputs, but not over rows."
        )
    if present is None:
        return losses.sum() / rows_per_record
    shares = present / present.sum(1, keepdim=True).clamp(min=1)
    return torch.where(present.flatten(), losses * shares.flatten().to(losses), 0.0).sum()


def refuse_penalty(losses: Tensor, of_parameters_alone: bool) -> None:
    """Refuse a loss with a term that belongs to no record.

    Args:
        losses: as the objective returned them.
        of_parameters_alone: whether they are the result of a call with parameters that does not
            grow with the batch, such as ``mean + penalty``.
    """
    if of_parameters_alone:
        raise CouplingError(
            "A loss must be made of the losses of its records; found a term that depends on "
            "parameters and on no record, such as a weight penalty. It would be clipped and "
            "sampled as if it were data. Leave it out and use the optimizer's weight_decay, which "
            "costs no privacy."
        )


def scalar_scale(loss_of: Callable[[Tensor], Tensor], device: torch.device) -> str | None:
    """Whether a loss with one value for the batch is the sum or the mean over its records.

    Args:
        loss_of: the loss of the records with these indices, without dropout.
        device: where indices live.

    Returns:
        ``"sum"``, ``"mean"``, or None if there is one loss a row anyway.

    Raises:
        CouplingError: if it is neither, as when it is normalised by something batch-wide.
    """
    if loss_of(torch.tensor([0], device=device)).ndim:
        return None
    first, second, third, all_three = (
        float(loss_of(torch.tensor(index, device=device))) for index in ([0], [1], [2], [0, 1, 2])
    )
    total = first + second + third
    tolerance = 1e-4 * (abs(first) + abs(second) + abs(third))
    if abs(total / 3 - all_three) <= tolerance:
        return "mean"
    if abs(total - all_three) <= tolerance:
        return "sum"
    raise CouplingError(
        "A loss with one value for the batch must be the sum or the mean of its records' losses; "
        f"found {first:.6g}, {second:.6g} and {third:.6g} for three records alone, {all_three:.6g} "
        "for all together. A normaliser that depends on the whole batch (class weights, "
        "ignore_index or a count of tokens with 'mean') couples records, and the privacy guarantee "
        "does not hold. Return one loss a record instead."
    )
