"""From the blocks of one direction to what belongs to each record.

A *block list* holds one tensor ``[steps, active, features]`` for every block, in the order of the
steps. What is returned has one row for each place of the batch in front; a step at which a record
is no longer at work counts as zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpis.gradients.rules.recurrent.steps import Timetable


def is_contracted(timetable: Timetable, weight: Tensor) -> bool:
    """Whether a record's gradient of ``weight`` is smaller than the positions it is a sum over.

    It is then also the cheaper way to its norm: ``steps·I·O`` products against ``steps²·(I + O)`` for
    the Gram matrices. For a packed batch it is the only way: the steps of its longest record
    change with the batch, and nothing but the number of records may change the shape of what is watched.
    """
    return timetable.packed or weight.numel() <= timetable.steps * sum(weight.shape)


def contracted(grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """``Σ_t grads_t ⊗ inputs_t`` for every record, ``[records, O, I]``."""
    pairs = zip(grads, inputs, strict=True)
    products = ((left.permute(1, 2, 0), right.permute(1, 0, 2)) for left, right in pairs)
    total = torch.bmm(*next(products))  # at the first step every record is at work
    for left, right in products:
        total[: len(left)].baddbmm_(left, right)
    return total


def summed(timetable: Timetable, grads: Sequence[Tensor]) -> Tensor:
    """``Σ_t grads_t`` for every record, ``[records, O]``."""
    total = grads[0].new_zeros(timetable.records, grads[0].shape[-1])
    for block in grads:
        total[: block.shape[1]] += block.sum(0)
    return total


def positions(timetable: Timetable, blocks: Sequence[Tensor]) -> Tensor:
    """Every step of every record, ``[records, steps, features]``."""
    result = blocks[0].new_zeros(timetable.records, timetable.steps, blocks[0].shape[-1])
    first = 0
    for block in blocks:
        steps, active, _ = block.shape
        result[:active, first : first + steps] = block.transpose(0, 1)
        first += steps
    return result
