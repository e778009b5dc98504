"""Rows that their batch padded, run once more as they are by themselves: whether a loop sees the padding."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dpis import batches
from dpis.coupling.padding import SEES_PADDING, PaddedOtherwise
from dpis.dropin.delivered import Delivered
from dpis.errors import CouplingError
from dpis.gradients.deferred import DeferredGradients, Inputs, Pass

COPIES = 2
"""Of a row: models that squeeze their outputs are at a loss with one."""


class UntriedPaddingWarning(UserWarning):
    """Whether a model sees padding could not be tried out; nothing says that it does."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A row of a forward pass whose loss is not known yet, and its inputs in two forms."""

    passed: Pass
    row: int
    padded: Inputs
    alone: Inputs


class PaddingTrials:
    """Prepared at a forward pass, held when the gradients of its outputs have arrived.

    Args:
        gradients: run the model.
    """

    def __init__(self, gradients: DeferredGradients) -> None:
        self._gradients, self._trials = gradients, list[Trial]()
        self._said = False

    def prepare(
        self,
        passed: Pass,
        inputs: Inputs,
        start: int,
        delivered: Delivered,
        pairs: Sequence[PaddedOtherwise],
    ) -> None:
        """If every input is a tensor of the batch, what it would be for a row by itself is known.

        Args:
            passed: the forward pass.
            inputs: what the model was given.
            start: the first of its rows in the batch.
            delivered: the batch.
            pairs: rows of the batch that have another shape by themselves.
        """
        if not pairs:
            return
        numbers = delivered.numbers_of(inputs, start)
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
            if of_one_row and start <= place < start + passed.rows:
                trial = Trial(passed, place - start, made_of(padded), made_of(alone))
                self._trials.append(trial)

    def hold(self) -> None:
        """Run the model on what was prepared.

        Raises:
            CouplingError: if it sees how far a row is padded, or the loss does.
        """
        trials, self._trials = self._trials, []
        for trial in trials:
            try:
                unseen = self._gradients.agree(trial.passed, trial.row, trial.padded, trial.alone)
            except (
                Exception
            ) as error:  # its words may tell the length of a record, its kind does not
                self._say(f"a row by itself cannot be run ({type(error).__name__})")
                continue
            if not unseen:
                raise CouplingError(SEES_PADDING)

    def forget(self, passes: Sequence[Pass]) -> None:
        """What was prepared for these is not held."""
        self._trials = [trial for trial in self._trials if trial.passed not in passes]

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                "records are padded to the longest of their batch, and whether the model sees it could not be tried "
                f"out: {why}. If it does, records couple and no claim holds: make sure that what is padded is masked, "
                "or pad to one public length",
                UntriedPaddingWarning,
                stacklevel=2,
            )
