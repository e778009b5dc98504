"""Whether a loss takes every row by itself: asked of its second derivatives, and by doing it again with other rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dpis.coupling.loss_tape import LossTape
from dpis.errors import CouplingError
from dpis.group import warn

NOTHING = 1e-5
"""Of a second derivative, relative to the largest entry: rounding."""
ROUNDING = 1e-4
"""Of a gradient that is computed again, relative to the largest entry."""
FAR = 10.0
"""How far rows are moved: so many times the largest output, and at least by so much."""
BESIDE = 0.1
"""How far rows are put from others: within a margin, but not in the same place."""

WAYS = "swapped", "up", "down", "anywhere", "beside", "anywhere", "beside"
"""Where half of the rows are moved to, and then the other half; each time other halves."""

Gradients = Sequence[Tensor | None]
Outputs = Sequence[tuple[Tensor, int]]
"""Of one forward pass: where their gradients arrive, and which dimension of each counts rows."""


class UntriedLossWarning(UserWarning):
    """Whether a loss couples records could not be tried out; nothing says that it does."""


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
    again from outputs of which one half of the rows are others, then the other half: those of other records, or far
    away. Kinks and choices (a margin, the hardest of a batch) have no second derivatives. What is made of labels alone
    (how many there are of a kind) stays as it is and does not show.
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
        if (loss.ndim and gradient is None) or not loss.requires_grad or not passes:
            return
        look = _Look(loss, gradient, passes, tape)
        arrived = look.gradients()
        if all(given is None for given in arrived):
            return
        look.refuse_second_derivatives()
        if not look.replayed(arrived) and not self._said:
            self._said = True
            warn(
                "whether the loss couples records could not be tried out: it cannot be computed again from what torch "
                "tells of it (a function that is not torch's own, vmap, a hook). If the loss of a record depends on "
                "other records of its batch, no claim holds: make sure that every row has a loss of its own",
                UntriedLossWarning,
                stacklevel=2,
            )


class _Look:
    """One loss, and the outputs that it may be made of."""

    def __init__(
        self, loss: Tensor, gradient: Tensor | None, passes: Sequence[Outputs], tape: LossTape
    ) -> None:
        self._tape, self._slot = tape, tape.slot(loss)
        self._loss, self._gradient = loss.as_subclass(Tensor), gradient
        self._leaves = [leaf for outputs in passes for leaf, _ in outputs]
        self._dims = [dim for outputs in passes for _, dim in outputs]
        self._rows = [(outputs[0][0].shape[outputs[0][1]], len(outputs)) for outputs in passes]
        self._generator = torch.Generator().manual_seed(sum(rows for rows, _ in self._rows))

    def gradients(self, create_graph: bool = False) -> Gradients:
        """Those of the outputs; None where the loss does not depend on one."""
        return torch.autograd.grad(
            self._loss,
            self._leaves,
            self._gradient,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )

    def refuse_second_derivatives(self) -> None:
        asked = self._half()
        try:
            told = []
            for given, dim, rows in zip(self.gradients(True), self._dims, asked, strict=True):
                if given is not None and given.requires_grad:
                    theirs = given.movedim(dim, 0)[rows]
                    told.append((theirs * self._noise_like(theirs)).sum().float())
            if not told:
                return
            total = torch.stack(told).sum()
            second = torch.autograd.grad(total, self._leaves, allow_unused=True, retain_graph=True)
        except RuntimeError:
            return  # it has none: what is done again tells by itself
        for change, dim, rows in zip(second, self._dims, asked, strict=True):
            if change is not None and change.numel():
                sizes = change.detach().movedim(dim, 0).abs().nan_to_num(0.0, 0.0, 0.0)
                if bool((sizes[~rows] > NOTHING * sizes.max()).any()):
                    raise CouplingError(_COUPLED)

    def replayed(self, arrived: Gradients) -> bool:
        """Whether the loss could be computed again, and from other rows.

        Raises:
            CouplingError: if the gradients of rows changed that were as before.
        """
        nobody = [torch.zeros_like(rows) for rows in self._half()]
        as_it_was = self._gradients_at([leaf.detach() for leaf in self._leaves])
        if as_it_was is None or self._others_differ(arrived, as_it_was, nobody):
            return False
        tried = False
        for way in WAYS:
            half = self._half()
            for moved in (half, [~rows for rows in half]):
                again = self._gradients_at(self._elsewhere(way, moved))
                if again is not None and self._others_differ(as_it_was, again, moved):
                    raise CouplingError(_COUPLED)
                tried |= again is not None
        return tried

    def _gradients_at(self, values: Sequence[Tensor]) -> Gradients | None:
        """The gradients at these values of the outputs; None, where there are none."""
        if self._slot is None:
            return None
        others = [value.clone().requires_grad_() for value in values]
        by_leaf = {id(leaf): other for leaf, other in zip(self._leaves, others, strict=True)}
        with torch.enable_grad():
            loss = self._tape.replay(self._slot, by_leaf)
            if loss is None or not loss.requires_grad:
                return None
            try:
                return torch.autograd.grad(loss, others, self._gradient, allow_unused=True)
            except RuntimeError:
                return None

    def _others_differ(self, before: Gradients, after: Gradients, moved: Sequence[Tensor]) -> bool:
        """Whether the gradient of a row that was not moved is another."""
        for one, other, dim, rows in zip(before, after, self._dims, moved, strict=True):
            known = other if one is None else one
            if known is None or bool(rows.all()) or not known.numel():
                continue
            a, b = (
                (torch.zeros_like(known) if g is None else g).movedim(dim, 0)[~rows]
                for g in (one, other)
            )
            same = (a == b) | ((a != a) & (b != b))
            change = torch.where(same, 0.0, (a - b).abs()).nan_to_num(torch.inf)
            sizes = torch.maximum(a.abs(), b.abs()).nan_to_num(0.0, 0.0, 0.0)
            if bool(change.amax() > ROUNDING * sizes.amax()):
                return True
        return False

    def _half(self) -> list[Tensor]:
        """For every output a mask of half of its rows, drawn at random, the same in all outputs of a pass."""
        masks = []
        for count, outputs in self._rows:
            mask = torch.zeros(count, dtype=torch.bool)
            mask[torch.randperm(count, generator=self._generator)[: -(-count // 2)]] = True
            masks += [mask] * outputs
        return [mask.to(leaf.device) for mask, leaf in zip(masks, self._leaves, strict=True)]

    def _elsewhere(self, way: str, moved: Sequence[Tensor]) -> list[Tensor]:
        """The outputs, with other values for some rows."""
        return [
            self._moved(leaf.detach().movedim(dim, 0), rows, way).movedim(0, dim)
            for leaf, dim, rows in zip(self._leaves, self._dims, moved, strict=True)
        ]

    def _moved(self, by_row: Tensor, rows: Tensor, way: str) -> Tensor:
        """To the values of other rows, beside these, or far away."""
        if not by_row.numel():
            return by_row
        noise = self._noise_like(by_row)
        far = FAR * by_row.abs().nan_to_num(0.0, 0.0, 0.0).amax().clamp(min=1.0)
        others = by_row
        if way in ("swapped", "beside") and not bool(rows.all()):
            staying = by_row[~rows]
            others = staying[torch.randint(len(staying), (len(by_row),), generator=self._generator)]
        shift = {"up": far, "down": -far, "anywhere": far * noise, "beside": BESIDE * noise}
        others = others + shift.get(way, 0.0)
        if by_row.device.type != "cpu" and bool(((by_row >= 0) & (by_row <= 1)).all()):
            others = others.clamp(0, 1)  # a device does not survive a probability of two
        return torch.where(rows.reshape(-1, *[1] * (by_row.ndim - 1)), others, by_row)

    def _noise_like(self, tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=self._generator).to(tensor)


_COUPLED = (
    "The loss couples records: how it changes with the outputs of one row depends on the outputs of others (negatives "
    "from the same batch, a root or a product of means). A record's influence would pass through the gradients of "
    "others, which are clipped by themselves: the privacy guarantee would not hold. Give every row a loss of its own, "
    "and take their mean"
)
