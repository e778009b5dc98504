"""Whether a loss takes every row by itself: asked of its second derivatives, and by doing it again with other rows."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from dpis.coupling.loss_tape import LossTape
from dpis.errors import CouplingError

NOTHING = 1e-5
"""Of a second derivative, relative to the largest entry: rounding."""
ROUNDING = 1e-4
"""Of a gradient that is computed again, relative to the largest entry."""
FAR = 10.0
"""How far rows are moved: so many times the largest output, and at least by so much."""
BESIDE = 0.1
"""How far rows are put from others: within a margin, but not in the same place."""

Gradients = Sequence[Tensor | None]
Outputs = Sequence[tuple[Tensor, int]]
"""Of one forward pass: where their gradients arrive, and which dimension of each counts rows."""


class UntriedLossWarning(UserWarning):
    """Whether a loss couples records could not be tried out; nothing says that it does."""


_DIVIDED_BY_THE_BATCH = {functional.cross_entropy, functional.nll_loss}
"""Means over terms that weigh unlike: by class weights, or zero where a target is ignored."""


def refuse_batch_wide_mean(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """A loss of torch that is about to be called may not divide by something of the whole batch.

    Raises:
        CouplingError: for means with class weights or ignored targets.
    """
    if function not in _DIVIDED_BY_THE_BATCH:
        return
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    values = given.arguments
    if values["reduction"] != "mean":
        return
    target, ignored = values["target"], values["ignore_index"]
    if values["weight"] is not None:
        raise CouplingError(_DIVIDED.format("class weights", "the sum of the weights"))
    if not target.is_floating_point() and bool(torch.any(target == ignored)):
        raise CouplingError(_DIVIDED.format("ignored targets", "how many targets count"))


def factor_of(loss: Tensor) -> float:
    """By which number a loss was multiplied last, as far as its graph tells: ``loss * len(part) / len(batch)``."""
    factor, node = 1.0, loss.grad_fn
    while node is not None:
        kind, other = node.name(), cast(Any, getattr(node, "_saved_other", None))
        if kind in ("MulBackward0", "DivBackward0") and _is_number(other):
            factor = factor * float(other) if kind == "MulBackward0" else factor / float(other)
        elif kind != "AliasBackward0":
            break
        node = node.next_functions[0][0]
    return factor


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


class LossProbe:
    """Looks at losses before they are differentiated: no row's gradient may change with another row.

    Half of the rows, drawn at random, are asked how their gradients change with all outputs; and the loss is computed
    again from outputs of which half of the rows are others, far away or those of other records: kinks and choices (a
    margin, the hardest of a batch) have no second derivatives. What is made of labels alone (how many there are of a
    kind) stays as it is and does not show.
    """

    def __init__(self) -> None:
        self._said = False

    def refuse_coupled(
        self, loss: Tensor, gradient: Tensor | None, passes: Sequence[Outputs], tape: LossTape
    ) -> None:
        """Look at one loss.

        Args:
            loss: about to be differentiated.
            gradient: what it is differentiated with, if it is not a single number.
            passes: the outputs that it may be made of, for each forward pass.
            tape: what was done with these.

        Raises:
            CouplingError: if it couples records.
        """
        slot = tape.slot(loss)
        loss = loss.as_subclass(Tensor)
        leaves = [leaf for outputs in passes for leaf, _ in outputs]
        if (loss.ndim and gradient is None) or not loss.requires_grad or not leaves:
            return
        generator = torch.Generator().manual_seed(sum(_rows(outputs) for outputs in passes))
        arrived = torch.autograd.grad(loss, leaves, gradient, allow_unused=True, retain_graph=True)
        if all(given is None for given in arrived):
            return
        _refuse_second_derivatives(loss, gradient, passes, generator)
        if slot is None or not _tried(tape, slot, gradient, passes, arrived, generator):
            self._say()

    def _say(self) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                "whether the loss couples records could not be tried out: it cannot be computed again from what torch "
                "tells of it (a function that is not torch's own, vmap, a hook). If the loss of a record depends on "
                "other records of its batch, no claim holds: make sure that every row has a loss of its own",
                UntriedLossWarning,
                stacklevel=2,
            )


def _refuse_second_derivatives(
    loss: Tensor, gradient: Tensor | None, passes: Sequence[Outputs], generator: torch.Generator
) -> None:
    leaves = [leaf for outputs in passes for leaf, _ in outputs]
    asked = [_some(outputs, generator) for outputs in passes]
    places = list(chain.from_iterable(asked))
    try:
        first = torch.autograd.grad(loss, leaves, gradient, create_graph=True, allow_unused=True)
        told = [
            (given.movedim(dim, 0)[rows] * _any_direction(given, dim, rows, generator)).sum()
            for given, (dim, rows) in zip(first, places, strict=True)
            if given is not None and given.requires_grad
        ]
        if not told:
            return
        total = torch.stack([value.float() for value in told]).sum()
        second = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    except RuntimeError:
        return  # it has none: what is done again tells by itself
    for change, (dim, rows) in zip(second, places, strict=True):
        if change is not None and _moves_others(change.movedim(dim, 0), rows):
            raise CouplingError(_COUPLED)


def _tried(
    tape: LossTape,
    slot: int,
    gradient: Tensor | None,
    passes: Sequence[Outputs],
    arrived: Gradients,
    generator: torch.Generator,
) -> bool:
    """Whether the loss could be computed again, and from other rows.

    Raises:
        CouplingError: if the gradients of rows changed that were as before.
    """
    leaves = [leaf for outputs in passes for leaf, _ in outputs]
    nobody = [torch.zeros(_rows(o), dtype=torch.bool) for o in passes for _ in o]
    as_it_was = _gradients_again(tape, slot, gradient, leaves, [leaf.detach() for leaf in leaves])
    if as_it_was is None or _others_differ(arrived, as_it_was, passes, nobody):
        return False
    tried = False
    for way in ("swapped", "up", "down", "anywhere", "beside", "anywhere", "beside"):
        moved = list(chain.from_iterable(_some(outputs, generator) for outputs in passes))
        values = [
            _elsewhere(leaf.detach().movedim(dim, 0), rows, way, generator).movedim(0, dim)
            for leaf, (dim, rows) in zip(leaves, moved, strict=True)
        ]
        again = _gradients_again(tape, slot, gradient, leaves, values)
        if again is None:
            continue
        tried = True
        if _others_differ(as_it_was, again, passes, [rows for _, rows in moved]):
            raise CouplingError(_COUPLED)
    return tried


def _gradients_again(
    tape: LossTape,
    slot: int,
    gradient: Tensor | None,
    leaves: Sequence[Tensor],
    values: Sequence[Tensor],
) -> Gradients | None:
    """The gradients at these values of the outputs; None, where there are none."""
    others = [value.clone().requires_grad_() for value in values]
    with torch.enable_grad():
        loss = tape.replay(slot, {id(a): b for a, b in zip(leaves, others, strict=True)})
        if loss is None or not loss.requires_grad:
            return None
        try:
            return torch.autograd.grad(loss, others, gradient, allow_unused=True)
        except RuntimeError:
            return None


def _others_differ(
    before: Gradients, after: Gradients, passes: Sequence[Outputs], moved: Sequence[Tensor]
) -> bool:
    dims = [dim for outputs in passes for _, dim in outputs]
    for one, other, dim, rows in zip(before, after, dims, moved, strict=True):
        if one is None and other is None:
            continue
        known = next(g for g in (one, other) if g is not None)
        a, b = (
            (torch.zeros_like(known) if g is None else g).movedim(dim, 0)[~rows.to(known.device)]
            for g in (one, other)
        )
        if not a.numel():
            continue
        same = (a == b) | ((a != a) & (b != b))
        change = torch.where(same, 0.0, (a - b).abs()).nan_to_num(torch.inf)
        sizes = torch.maximum(a.abs(), b.abs()).nan_to_num(0.0, 0.0, 0.0)
        if bool(change.amax() > ROUNDING * sizes.amax()):
            return True
    return False


def _elsewhere(by_row: Tensor, rows: Tensor, way: str, generator: torch.Generator) -> Tensor:
    """Other values for some rows: those of other rows, or far away."""
    count, noise = len(by_row), torch.randn(by_row.shape, generator=generator).to(by_row)
    largest = by_row.abs().nan_to_num(0.0, 0.0, 0.0).amax() if by_row.numel() else by_row.sum()
    far = FAR * largest.clamp(min=1.0)
    others = by_row
    if way in ("swapped", "beside"):
        staying = (~rows).nonzero()[:, 0]
        if len(staying):
            chosen = torch.randint(len(staying), (count,), generator=generator)
            others = by_row[staying[chosen.to(by_row.device)]]
        if way == "beside":
            others = others + BESIDE * noise
    elif way == "anywhere":
        others = by_row + far * noise
    else:
        others = by_row + (far if way == "up" else -far)
    if by_row.device.type != "cpu" and bool(((by_row >= 0) & (by_row <= 1)).all()):
        others = others.clamp(0, 1)  # a device does not survive a probability of two
    shape = [count] + [1] * (by_row.ndim - 1)
    return torch.where(rows.reshape(shape), others, by_row)


def _rows(outputs: Outputs) -> int:
    leaf, dim = outputs[0]
    return leaf.shape[dim]


def _some(outputs: Outputs, generator: torch.Generator) -> list[tuple[int, Tensor]]:
    """Half of the rows, the same in all outputs of a pass."""
    count = _rows(outputs)
    chosen = torch.randperm(count, generator=generator)[: -(-count // 2)]
    rows = torch.zeros(count, dtype=torch.bool)
    rows[chosen] = True
    return [(dim, rows.to(leaf.device)) for leaf, dim in outputs]


def _any_direction(gradient: Tensor, dim: int, rows: Tensor, generator: torch.Generator) -> Tensor:
    shape = gradient.movedim(dim, 0)[rows].shape
    return torch.randn(shape, generator=generator).to(gradient)


def _moves_others(by_row: Tensor, asked: Tensor) -> bool:
    if not by_row.numel():
        return False
    sizes = by_row.detach().abs().reshape(len(by_row), -1).nan_to_num(0.0, 0.0, 0.0).amax(1)
    return bool((sizes[~asked] > NOTHING * sizes.max()).any())


_COUPLED = (
    "The loss couples records: how it changes with the outputs of one row depends on the outputs of others (negatives "
    "from the same batch, a root or a product of means). A record's influence would pass through the gradients of "
    "others, which are clipped by themselves: the privacy guarantee would not hold. Give every row a loss of its own, "
    "and take their mean"
)
_DIVIDED = (
    "A mean with {0} divides by {1} in the whole batch: every record's gradient then depends on the others and the "
    "guarantee would not hold. Use reduction='none', average each record's own terms, and take the mean of these"
)
