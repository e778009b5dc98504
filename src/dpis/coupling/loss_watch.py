"""What is known of the outputs of one batch while a loop makes a loss of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from dpis.coupling.divisors import SCALINGS, Divisors
from dpis.coupling.loss_tape import LossTape
from dpis.coupling.own_means import OF_CLASSES, OF_NUMBERS, OwnMeans
from dpis.coupling.owners import UNKNOWN, owners_of
from dpis.coupling.picked_rows import MOVES, PickedRows
from dpis.errors import CouplingError, MisuseError

FULL_PRECISION = (torch.float32, torch.float64)

Look = Callable[["LossWatch", Tensor, Tensor | None], None]
"""``look(watch, loss, gradient)``: before ``loss.backward(gradient)``."""


@dataclass(frozen=True, eq=False)
class LossRules:
    """What all losses of one loop have in common.

    Attributes:
        mean: they are means over the records of a batch (else sums).
        means: replaces those that divide by something of the whole batch.
        divisors: what losses were divided by so far.
        look: looks at a loss before it is differentiated, where there is a tape.
    """

    mean: bool
    means: OwnMeans
    divisors: Divisors
    look: Look


_UNDER_WAY: dict[int, LossWatch] = {}
"""By thread, whose backward pass it runs."""


class LossWatch:
    """The outputs of one or several forward passes over the same records.

    A mean is differentiated as the sum that it stands for: backward begins with the number of records instead of one,
    so that nothing is rounded after a division by it, which would move the gradients of all others with every record.

    Args:
        records: how many there are.
        rules: of the loop.
        half: the model runs in half precision.
        tape: writes down what is made of the outputs; None: nobody does.
    """

    def __init__(
        self, records: int, rules: LossRules, *, half: bool = False, tape: LossTape | None = None
    ) -> None:
        self.records, self.rules, self.half, self.tape = records, rules, half, tape
        self.leaves: list[tuple[Tensor, int]] = []
        self._rows_first: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self._picked = PickedRows(records, self._owners_of)
        self._losses = self._divisors = 0
        self._parts: set[tuple[int, ...]] = set()
        self._arrivals: set[bool] = set()

    def close(self) -> Sequence[Tensor]:
        """The step is taken: nothing is written down from now on. Returns all tensors that were."""
        self.leaves = []
        return () if self.tape is None else self.tape.close()

    # ── outputs ──────────────────────────────────────────────────────────────────────────────────────

    def open(self, leaves: Sequence[tuple[Tensor, int]]) -> None:
        """The outputs of one more forward pass: where gradients arrive, and which dimension counts records."""
        self.leaves += leaves
        for leaf, _ in leaves:
            leaf.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def begin(self, output: Tensor, leaf: Tensor) -> None:
        """An output, as the loop gets it, is a copy of this leaf."""
        if any(leaf is known and dim == 0 for known, dim in self.leaves):
            self._rows_first[output] = output._version
        if self.tape is not None:
            self.tape.begin(output, leaf)

    # ── losses ───────────────────────────────────────────────────────────────────────────────────────

    def own_mean(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """What stands for a loss of torch that divides by something of the whole batch; None: the loss itself."""
        if function is functional.binary_cross_entropy_with_logits and self.records:
            self._losses += 1
            self.rules.means.require_public(kwargs.get("pos_weight"), self._losses)
            return None
        if (function not in OF_CLASSES and function not in OF_NUMBERS) or not self.records:
            return None
        self._losses += 1
        return self.rules.means.take(
            function,
            args,
            kwargs,
            records=self.records,
            number=self._losses,
            owners=self._owners,
            picked=self._picked,
        )

    def _owners(self, rows: Tensor) -> Tensor:
        owners = self._owners_of(rows)
        self._refuse_parts(owners)
        return owners

    def _owners_of(self, rows: Tensor) -> Tensor:
        if self._rows_first.get(rows) == rows._version:
            return torch.arange(self.records, device=rows.device)
        with torch._C.DisableTorchFunctionSubclass():
            return owners_of(rows.as_subclass(Tensor), self.leaves)

    def scaled(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        """Something made of the outputs is about to be divided or multiplied."""
        if function in SCALINGS and self.rules.divisors.take(
            function, args, self._divisors, self.records
        ):
            self._divisors += 1

    def follow(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Rows may have been picked or turned about; a mean may have been taken over picked ones."""
        if function in MOVES or self._picked.any:
            self._picked.follow(function, args, kwargs, result)

    def _refuse_parts(self, owners: Tensor) -> None:
        """Means of some records alone, added up by the loop, would each be divided by the number of all."""
        found = sorted(set(owners[owners != UNKNOWN].tolist()))
        if len(found) < self.records:
            self._parts.add(tuple(found))
        if len(self._parts) > 1:
            raise CouplingError(_IN_PARTS)

    def refuse_rounded(self, result: object) -> None:
        """A mean in half precision is rounded after it was divided by the number of drawn records."""
        if not self.rules.mean or not isinstance(result, Tensor):
            return
        if result.requires_grad and result.dtype not in FULL_PRECISION:
            raise MisuseError(
                f"a mean must be computed in float32, found {result.dtype}: it may be rounded after it was divided by "
                "the number of drawn records, so one record more would change the gradients of all others, by more "
                "than the noise is made for. Compute the loss of outputs.float(), or sum it (reduction='sum') and say "
                "so by make_private(loss_reduction='sum')"
            )

    # ── backward ─────────────────────────────────────────────────────────────────────────────────────

    def before_backward(self, loss: Tensor, gradient: Tensor | None) -> Tensor | None:
        """Look at a loss that is about to be differentiated.

        Returns:
            The gradient to begin with.
        """
        if self.tape is not None and self.tape.open:
            self.rules.look(self, loss, gradient)
        if self._begins_with == 1:
            return gradient
        if gradient is None:
            return torch.full_like(loss, self.records).as_subclass(Tensor)
        if self.half:
            raise MisuseError(
                "in half precision loss.backward() takes no gradient for a mean: what it is multiplied by would be "
                "rounded by the number of drawn records. Call backward on the mean itself, or sum the loss "
                "(reduction='sum') and say so by make_private(loss_reduction='sum')"
            )
        return gradient * self.records

    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """While backward runs, which began with the gradient of `before_backward`."""
        thread = threading.get_ident()
        before = _UNDER_WAY.get(thread)
        _UNDER_WAY[thread] = self
        try:
            yield
        finally:
            if before is None:
                del _UNDER_WAY[thread]
            else:
                _UNDER_WAY[thread] = before

    @property
    def _begins_with(self) -> int:
        return self.records if self.rules.mean and self.records else 1

    def _arrived(self, _: Tensor) -> None:
        begun = self._under_way()
        if self.rules.mean and begun not in (None, self):
            raise MisuseError(
                "a loss was made of the outputs of two parts of a batch: a mean over both would be scaled by the "
                "number of drawn records, which is private. Call backward for each part by itself"
            )
        self._arrivals.add(begun is self)
        if self.half and self.rules.mean and False in self._arrivals:
            raise MisuseError(
                "in half precision backward must be called on the loss itself, loss.backward(): past it, gradients of "
                "a mean are rounded after they were divided by the number of drawn records, so one record more would "
                "change those of all others"
            )

    def _under_way(self) -> LossWatch | None:
        """Whose backward pass brought a gradient here. Those of an accelerator come in a thread of its own."""
        known = _UNDER_WAY.get(threading.get_ident())
        if known is not None:
            return known
        every = list(_UNDER_WAY.values())
        return self if self in every else next(iter(every), None)

    @property
    def scale(self) -> float:
        """What makes the gradients that arrived those of a sum."""
        if len(self._arrivals) == 2:
            raise MisuseError(
                "two backward passes of one batch were begun in different ways: which of their gradients are those of "
                "a mean cannot be told. Call loss.backward() for both"
            )
        return float(self._begins_with) if self._arrivals == {False} else 1.0


_IN_PARTS = (
    "Means over the terms of some records alone were computed one after another: each divides by the records of the "
    "whole batch, and a mean over them does so again, so that every gradient would carry the number of drawn records. "
    "Use reduction='none' or 'sum' for each, divide by the record's own number of terms, and take one mean over records"
)
