"""Whether every record's loss depends on its own activations alone, in a chunk as it is run.

The plan learns from three records where each record stands. A model may still move records about by their values (sort
them by length), or mix them, in batches it has not seen yet: norms would then be those of other records, and clipping
would bound the wrong gradients. The gradient of the losses of *some* records tells: it must vanish in the places of all
others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpis.errors import CouplingError
from dpis.gradients.call_plan import Placed, Plan, layouts_of
from dpis.gradients.layout import Layout
from dpis.gradients.rules.rule import name_of
from dpis.gradients.watch import Use, Watch, names_in


def probe(watch: Watch, plan: Plan, losses: Tensor, records: int) -> None:
    """Ask half of the records, drawn at random, for the gradients of their losses.

    Any two records that changed places, or mixed, are found out with a chance of one half or more: one backward pass
    asks about all pairs at once.

    Args:
        watch: what a forward pass did, all of it in the plan.
        plan: where the records are.
        losses: one a row.
        records: how many there are.

    Raises:
        CouplingError: if a loss depends on what stands in the place of another record.
    """
    rows = len(losses)
    asked = torch.zeros(records, dtype=torch.bool)
    asked[torch.randperm(records)[: -(-records // 2)]] = True
    asked = asked.to(losses.device)
    uses = [use for use in watch.uses if isinstance(plan[use.key], Placed)]
    total = losses[asked.repeat_interleave(rows // records)].sum()
    others = (~asked).nonzero().squeeze(1)
    for use, gradients in zip(uses, watch.backward(total, uses), strict=True):
        refuse_gradients_of(others, records, use, gradients, layouts_of(use, plan, rows) or ())


def refuse_gradients_of(
    strangers: Tensor | slice,
    records: int,
    use: Use,
    gradients: Sequence[Tensor | None],
    layouts: Sequence[Layout],
) -> None:
    """In the places of these records there may be no gradient: their losses were left out.

    Args:
        strangers: the indices of the records.
        records: how many there are in all.
        use: the call whose watched tensors have these gradients.
        gradients: those gradients; None: nothing depends on it.
        layouts: where the records are in the watched tensors.

    Raises:
        CouplingError: if there is one.
    """
    for gradient, layout in zip(gradients, layouts, strict=True):
        if gradient is None:
            continue
        by_record = layout.by_unit(gradient)
        if use.record_order is not None:
            by_record = by_record[use.record_order.argsort()]
        theirs = torch.unflatten(by_record, 0, (records, -1))[strangers]
        if theirs.any() and ((theirs != 0) & theirs.isfinite()).any():
            names = ", ".join(names_in(use.parameters[0].label))
            raise CouplingError(_MOVED.format(name_of(use.key[0]), names))


_MOVED = (
    "Records must stay in their places and not depend on one another, but in {} with {} the losses of some records "
    "depend on what stands in the places of others. Norms would be those of other records and clipping would bound the "
    "wrong gradients: the privacy guarantee would not hold. Do not sort or mix records inside the model; sequences may "
    "be packed by pack_padded_sequence(..., enforce_sorted=False)."
)
