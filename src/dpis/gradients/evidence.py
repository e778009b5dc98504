"""Whose entries move when one record changes: the order of records, and whether they couple."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpis import batches
from dpis.batches import Batch
from dpis.errors import CouplingError
from dpis.gradients.layout import Growth
from dpis.gradients.rules.rule import name_of
from dpis.gradients.watch import Key, Shapes, Use, Watch, names_in


@dataclass(frozen=True, eq=False)
class Trace:
    """One forward pass on a few records."""

    watch: Watch
    uses: dict[Key, Use]
    constants: dict[Key, Shapes]
    losses: Tensor


def with_one_changed(
    batch: Batch, record: int, rows_per_record: int, keep_order: bool = False
) -> Batch:
    """Three records, one of them replaced by another, so that every value is one that occurs.

    Where all records are equal in a tensor, floating-point values shrink a little instead, and whole numbers lose their
    last entry.

    Args:
        batch: the three records.
        record: which of them to replace.
        rows_per_record: K.
        keep_order: replace it by its neighbour: if records come in some order (the longest first), they still do.
    """

    def differs(other: int) -> bool:
        by_tensor = (torch.split(tensor, rows_per_record) for tensor in batches.tensors(batch))
        return any(not torch.equal(records[record], records[other]) for records in by_tensor)

    others = [other for other in range(3) if other != record]
    if keep_order:
        others.sort(key=lambda other: abs(other - record))
    source = next((other for other in others if differs(other)), others[0])

    def change(tensor: Tensor) -> Tensor:
        records = list(torch.split(tensor, rows_per_record))
        own = records[record]
        if any(not torch.equal(own, other) for other in records):
            records[record] = records[source]
        elif tensor.is_floating_point():
            records[record] = own * (1 - 0.01 * torch.rand_like(own))
        elif tensor.ndim > 1:
            changed = own.clone()
            changed[..., -1] = 0  # a mask loses its end, a text its last word
            records[record] = changed
        return torch.cat(records)

    return batches.apply(change, batch)


def refuse_coupled_losses(before: Tensor, after: Tensor, record: int, rows_per_record: int) -> None:
    """The losses of the other records may not move with this one.

    Raises:
        CouplingError: if one does.
    """
    if before.ndim == 0:
        return  # one loss for all: losses.py asks whether it is a sum or a mean
    others = torch.arange(len(before), device=before.device) // rows_per_record != record
    if not _same(before.detach()[others], after.detach()[others]).all():
        raise CouplingError(_COUPLED.format("the loss of another record changed"))


def gradients_of(trace: Trace, record: int, rows_per_record: int) -> dict[Key, list[Tensor | None]]:
    """How one record's loss depends on each watched tensor."""
    if not trace.losses.ndim:  # one loss for all: losses.py refuses it
        return {key: [None for _ in use.edges] for key, use in trace.uses.items()}
    own = trace.losses[record * rows_per_record : (record + 1) * rows_per_record].sum()
    gradients = trace.watch.backward(own, list(trace.uses.values()))
    return dict(zip(trace.uses, gradients, strict=True))


def narrow(
    growths: Sequence[Growth],
    before: Use,
    after: Use | None,
    gradients: Sequence[Tensor | None],
    record: int,
    rows_per_record: int,
) -> tuple[Growth, ...]:
    """Drop the orders of records and positions that one record's entries contradict.

    Args:
        growths: which dimension of each watched tensor grows.
        before: the use with the three records as they are.
        after: the same with one record changed; None if the call was not made.
        gradients: of that record's loss, with respect to the watched tensors after the change.
        record: which of the three was changed.
        rows_per_record: K.

    Raises:
        CouplingError: if no order is left: entries of another record moved.
    """
    if after is None:
        return tuple(growths)
    narrowed = []
    values = zip(growths, before.watched, after.watched, gradients, strict=True)
    for growth, old, new, gradient in values:
        own = _entries(growth.dim, old, new, gradient, after.record_order)
        rows = 3 * rows_per_record
        fitting = [
            order
            for order in growth.orders()
            if not own[order.owners(own, rows, rows_per_record) != record].any()
        ]
        if not fitting:
            raise CouplingError(_COUPLED.format(_where(before)))
        narrowed.append(fitting[0] if len(fitting) == 1 else growth)
    return tuple(narrowed)


def _entries(
    dim: int, old: Tensor, new: Tensor, gradient: Tensor | None, order: Tensor | None
) -> Tensor:
    """Which entries along a dimension moved with a record, or move its loss."""
    entries = torch.zeros_like(new, dtype=torch.bool)
    if old.shape == new.shape and order is None:
        entries |= ~_same(old.detach(), new.detach())
    if gradient is not None:
        entries |= (gradient != 0) & gradient.isfinite()
    along = entries.movedim(dim, 0).flatten(1).any(1)
    return along if order is None else along[order.argsort()]  # place j is not record j


def _same(a: Tensor, b: Tensor) -> Tensor:
    return torch.isclose(a.double(), b.double(), rtol=1e-4, atol=1e-6, equal_nan=True)


def _where(use: Use) -> str:
    names = ", ".join(names_in(use.parameters[0].label))
    return f"activations of another record changed in {name_of(use.key[0])} with {names}"


_COUPLED = (
    "Records must not depend on one another, but after one record of three was changed, {}. "
    "A record's influence would then pass through the gradients of others, which are clipped by "
    "themselves: the privacy guarantee would not hold. Remove what mixes records (batch "
    "statistics, a loss normalised over the batch, attention between records)."
)
