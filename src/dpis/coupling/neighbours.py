"""Whether a record moves its neighbours inside a model: one of three is changed, or half of a chunk is asked."""

from __future__ import annotations

import torch
from torch import Tensor

from dpis import batches
from dpis.batches import Batch
from dpis.errors import CouplingError


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
    """The losses of the other records may not move with the one that was changed.

    Raises:
        CouplingError: if one does.
    """
    if before.ndim == 0:
        return  # one loss for all is refused where records are weighted
    others = torch.arange(len(before), device=before.device) // rows_per_record != record
    if not same(before.detach()[others], after.detach()[others]).all():
        raise coupled("the loss of another record changed")


def coupled(what_changed: str) -> CouplingError:
    """After one record of three was changed."""
    return CouplingError(
        f"Records must not depend on one another, but after one record of three was changed, {what_changed}. "
        "A record's influence would then pass through the gradients of others, which are clipped by themselves: the "
        "privacy guarantee would not hold. Remove what mixes records (batch statistics, a loss normalised over the "
        "batch, attention between records)."
    )


def same(a: Tensor, b: Tensor) -> Tensor:
    """Which entries agree, but for rounding."""
    return torch.isclose(a.double(), b.double(), rtol=1e-4, atol=1e-6, equal_nan=True)


def half_of(records: int) -> Tensor:
    """Half of the records, drawn at random, as a mask: the gradients of their losses are asked for.

    Any two records that changed places, or mixed, are found out with a chance of one half or more: one backward pass
    asks about all pairs at once.
    """
    asked = torch.zeros(records, dtype=torch.bool)
    asked[torch.randperm(records)[: -(-records // 2)]] = True
    return asked


def refuse_gradient_of_others(theirs: Tensor, where: str) -> None:
    """In the places of records whose losses were left out there may be no gradient.

    A model may move records about by their values (sort them by length), or mix them, in batches that it was not
    planned on: norms would be those of other records.

    Args:
        theirs: the gradient there.
        where: the call that they are a tensor of.

    Raises:
        CouplingError: if there is one.
    """
    if theirs.any() and ((theirs != 0) & theirs.isfinite()).any():
        raise CouplingError(
            f"Records must stay in their places and not depend on one another, but in {where} the losses of some "
            "records depend on what stands in the places of others. Norms would be those of other records and clipping "
            "would bound the wrong gradients: the privacy guarantee would not hold. Do not sort or mix records inside "
            "the model; sequences may be packed by pack_padded_sequence(..., enforce_sorted=False)."
        )
