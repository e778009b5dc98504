"""Whose entries are whose in a model's tensors: learned from three records, and looked at again in a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpis.coupling.neighbours import coupled, refuse_gradient_of_others, same
from dpis.gradients.layout import Growth, Layout
from dpis.gradients.rules.rule import name_of
from dpis.gradients.verdicts import Key, Shapes
from dpis.gradients.watch import Use, Watch, names_in
from dpis.group import Group


@dataclass(frozen=True, eq=False)
class Trace:
    """One forward pass on a few records."""

    watch: Watch
    uses: dict[Key, Use]
    constants: dict[Key, Shapes]
    losses: Tensor


def gradients_of(
    trace: Trace, record: int, rows_per_record: int, ranks: Group
) -> dict[Key, list[Tensor | None]]:
    """How one record's loss depends on each watched tensor."""
    if not trace.losses.ndim:  # one loss for all: losses.py refuses it
        return {key: [None for _ in use.edges] for key, use in trace.uses.items()}
    own = trace.losses[record * rows_per_record : (record + 1) * rows_per_record].sum()
    with ranks.in_a_pass():
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
            raise coupled(f"activations of another record changed in {_name_of(before)}")
        narrowed.append(fitting[0] if len(fitting) == 1 else growth)
    return tuple(narrowed)


def refuse_gradients_of(
    strangers: Tensor | slice,
    records: int,
    use: Use,
    gradients: Sequence[Tensor | None],
    layouts: Sequence[Layout],
) -> None:
    """In the places of these records there may be no gradient: their losses were left out.

    Args:
        strangers: which records, as an index.
        records: how many there are in all.
        use: the call whose watched tensors have these gradients.
        gradients: those gradients; None: nothing depends on it.
        layouts: where the records are in the watched tensors.

    Raises:
        CouplingError: if there is one.
    """
    for gradient, layout in zip(gradients, layouts, strict=True):
        if gradient is not None:
            by_record = _in_order(layout.by_unit(gradient), use.record_order)
            theirs = torch.unflatten(by_record, 0, (records, -1))[strangers]
            refuse_gradient_of_others(theirs, _name_of(use))


def _entries(
    dim: int, old: Tensor, new: Tensor, gradient: Tensor | None, order: Tensor | None
) -> Tensor:
    """Which entries along a dimension moved with a record, or move its loss."""
    entries = torch.zeros_like(new, dtype=torch.bool)
    if old.shape == new.shape and order is None:
        entries |= ~same(old.detach(), new.detach())
    if gradient is not None:
        entries |= (gradient != 0) & gradient.isfinite()
    return _in_order(entries.movedim(dim, 0).flatten(1).any(1), order)


def _in_order(entries: Tensor, order: Tensor | None) -> Tensor:
    """In packed sequences place j is not record j."""
    return entries if order is None else entries[order.argsort()]


def _name_of(use: Use) -> str:
    return f"{name_of(use.key[0])} with {', '.join(names_in(use.parameters[0].label))}"
