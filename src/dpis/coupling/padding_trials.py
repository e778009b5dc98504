"""Rows that their batch padded, run once more as they are by themselves: whether a loop sees the padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpis import batches
from dpis.coupling.differences import overlap
from dpis.coupling.padding import SEES_PADDING, PaddedOtherwise
from dpis.errors import CouplingError
from dpis.group import warn

COPIES = 2
"""Of a row: models that squeeze their outputs are at a loss with one."""

Inputs = tuple[Any, Any]
"""What a module is called with: ``(args, kwargs)``."""
Agree = Callable[[Any, int, Inputs, Inputs], bool]
"""``agree(pass, row, padded, alone)``: whether a row of a forward pass has one gradient in both forms."""


class UntriedPaddingWarning(UserWarning):
    """Whether a model sees padding could not be tried out; nothing says that it does."""


class PaddingTrials:
    """Prepared at a forward pass, held when the gradients of its outputs have arrived.

    Args:
        agree: runs the model on a row in two forms.
    """

    def __init__(self, agree: Agree) -> None:
        self._agree, self._said = agree, False
        self._trials: list[tuple[object, Callable[[], bool]]] = []

    def prepare(
        self,
        passed: object,
        rows: range,
        inputs: Inputs,
        numbers_of: Callable[[Inputs, int], Mapping[int, int] | None],
        pairs: Sequence[PaddedOtherwise],
    ) -> None:
        """If every input is a tensor of the batch, what it would be for a row by itself is known.

        Args:
            passed: the forward pass.
            rows: of the batch, that went in.
            inputs: what the model was given.
            numbers_of: which tensor of the batch each input is, by its id, from which row on; None: not all are.
            pairs: rows of the batch that have another shape by themselves.
        """
        if not pairs:
            return
        numbers = numbers_of(inputs, rows.start)
        if numbers is None:
            self._say("its inputs are not tensors of the batch as they were delivered")
            return

        def made_of(row: Sequence[Tensor]) -> Inputs:
            def other(given: Tensor) -> Tensor:
                return row[numbers[id(given)]].to(given.device).repeat_interleave(COPIES, dim=0)

            args, kwargs = batches.apply(other, inputs)
            return args, kwargs

        for place, padded, alone in pairs:
            of_one_row = all(
                t[n].shape[:1] == (1,) for t in (padded, alone) for n in numbers.values()
            )
            if of_one_row and place in rows:
                forms = made_of(padded), made_of(alone)
                trial = partial(self._agree, passed, place - rows.start, *forms)
                self._trials.append((passed, trial))

    def hold(self) -> None:
        """Run the model on what was prepared.

        Raises:
            CouplingError: if it sees how far a row is padded, or the loss does.
        """
        for _, agrees in self._trials:
            try:
                unseen = agrees()
            except Exception as error:  # its words may tell the length of a record, its kind not
                self._say(f"a row by itself cannot be run ({type(error).__name__})")
                continue
            if not unseen:
                raise CouplingError(SEES_PADDING)
        self._trials = []

    def forget(self, passes: Sequence[object]) -> None:
        """What was prepared for these is not held."""
        self._trials = [(passed, trial) for passed, trial in self._trials if passed not in passes]

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            warn(
                "records are padded to the longest of their batch, and whether the model sees it could not be tried "
                f"out: {why}. If it does, records couple and no claim holds: make sure that what is padded is masked, "
                "or pad to one public length",
                UntriedPaddingWarning,
                stacklevel=2,
            )


def directions_of_both(
    forms: Sequence[tuple[Tensor, Tensor]], number: int, looked: Tensor
) -> Iterator[list[list[Tensor]]]:
    """Output gradients for both forms of a row: their gradients agree for one of these, or the padding is seen.

    Positions are counted from the first on, or from the last back. A loss that looks at one that the row does not have
    by itself depends on the padding: then there is no such direction.

    Args:
        forms: every output of the row, padded and by itself, rows first.
        number: which output the loss looked at.
        looked: where in it: the entries of the row with a gradient.

    Yields:
        For each form a direction for every output, zero but for the one that was looked at. There it follows the
        output itself, so that a shift of it shows.
    """
    padded, alone = forms[number]
    common = [min(sizes) for sizes in zip(padded.shape[1:], alone.shape[1:], strict=True)]
    for at_end in (False, True):
        beyond = looked.clone()
        overlap(beyond[None], common, at_end).fill_(False)
        if not beyond.any():
            seen = overlap(looked[None], common, at_end)
            yield [
                _directions([form[side] for form in forms], number, seen, common, at_end)
                for side in (0, 1)
            ]


def _directions(
    outputs: Sequence[Tensor], number: int, seen: Tensor, common: list[int], at_end: bool
) -> list[Tensor]:
    directions = [torch.zeros_like(output) for output in outputs]
    values = overlap(outputs[number], common, at_end) * seen
    size = values.abs().amax().clamp(min=1e-12) if values.numel() else 1.0
    weights = torch.linspace(0.5, 1.5, seen.numel()).reshape(seen.shape).to(values) * seen
    overlap(directions[number], common, at_end).copy_(weights + values / size)
    return directions
