"""Whether a loss takes every row by itself, as far as its second derivatives tell."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from dpis.gradients import CouplingError
from dpis.gradients.deferred import Pass

NOTHING = 1e-5
"""Relative to the largest entry: rounding."""


def refuse_coupled_loss(loss: Tensor, passes: Sequence[Pass]) -> None:
    """The gradient of one row's loss may not change with the outputs of another row.

    Half of the rows, drawn at random, are asked how their gradients change with all outputs. What normalises by
    something else than outputs (how many labels of a kind there are) does not show here, nor where a loss has no second
    derivatives.

    Args:
        loss: about to be differentiated.
        passes: the forward passes whose outputs it may be made of.

    Raises:
        CouplingError: if one does.
    """
    leaves = [leaf for passed in passes for leaf, _ in passed.leaves]
    if loss.ndim or not loss.requires_grad or not leaves:
        return
    generator = torch.Generator().manual_seed(sum(passed.rows for passed in passes))
    asked = [_some(passed, generator) for passed in passes]
    places = list(chain.from_iterable(asked))
    try:
        first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        told = [
            (gradient.movedim(dim, 0)[rows] * _any_direction(gradient, dim, rows, generator)).sum()
            for gradient, (dim, rows) in zip(first, places, strict=True)
            if gradient is not None and gradient.requires_grad
        ]
        if not told:
            return
        total = torch.stack([value.float() for value in told]).sum()
        second = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    except RuntimeError:
        return  # it has no second derivatives
    for change, (dim, rows) in zip(second, places, strict=True):
        if change is not None and _moves_others(change.movedim(dim, 0), rows):
            raise CouplingError(_COUPLED)


def _some(passed: Pass, generator: torch.Generator) -> list[tuple[int, Tensor]]:
    """Half of the rows, the same in all outputs of a pass."""
    chosen = torch.randperm(passed.rows, generator=generator)[: -(-passed.rows // 2)]
    rows = torch.zeros(passed.rows, dtype=torch.bool)
    rows[chosen] = True
    return [(dim, rows.to(leaf.device)) for leaf, dim in passed.leaves]


def _any_direction(gradient: Tensor, dim: int, rows: Tensor, generator: torch.Generator) -> Tensor:
    shape = gradient.movedim(dim, 0)[rows].shape
    return torch.randn(shape, generator=generator).to(gradient)


def _moves_others(by_row: Tensor, asked: Tensor) -> bool:
    sizes = by_row.detach().abs().flatten(1).nan_to_num(0.0, 0.0, 0.0).amax(1)
    return bool((sizes[~asked] > NOTHING * sizes.max()).any())


_COUPLED = (
    "The loss couples records: how it changes with the outputs of one row depends on the outputs of others (negatives "
    "from the same batch, a root or a product of means). A record's influence would pass through the gradients of "
    "others, which are clipped by themselves: the privacy guarantee would not hold. Give every row a loss of its own, "
    "and take their mean"
)
