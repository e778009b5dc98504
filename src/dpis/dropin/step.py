"""Everything that belongs to one draw, from its delivery to its release: dropped whole, one way or the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dpis.coupling.loss_tape import LossTape
from dpis.coupling.loss_watch import LossWatch
from dpis.coupling.padding import PaddedOtherwise
from dpis.coupling.writes import ModelState
from dpis.dropin.delivered import Delivered
from dpis.gradients.deferred import Pass
from dpis.mechanism.gradient_sum import GradientSum
from dpis.sampling import Draw


@dataclass(frozen=True, eq=False)
class PhysicalBatch:
    """A draw, or consecutive records of it.

    Attributes:
        draw: what it belongs to.
        indices: its records.
        last: whether the step follows it.
    """

    draw: Draw
    indices: list[int]
    last: bool


@dataclass(eq=False)
class RunRows:
    """Some rows of a physical batch, and every forward pass over them: two for a pair of views.

    Attributes:
        rows: how many.
        watch: of what the loop makes of the outputs.
        passes: over these rows, oldest first.
    """

    rows: int
    watch: LossWatch
    passes: list[Pass]

    @property
    def backward_done(self) -> bool:
        """Whether gradients have arrived at every pass."""
        return not self.rows or all(passed.backward_done for passed in self.passes)


@dataclass(eq=False)
class Step:
    """One draw, under way.

    Attributes:
        sum: what was added up of it.
        batch: delivered last, and not yet folded into the sum; None between two physical batches.
        delivered: its tensors.
        padded_otherwise: some of its rows, where they have another shape by themselves.
        expected: how many rows of the draw were delivered so far.
        run: the rows that the model was run on, and that are not in the sum.
        blank: watches the outputs for nobody, where nobody was drawn.
        tape: writes down what is made of outputs, where this step is looked at.
        state: of the model at the first forward pass.
    """

    sum: GradientSum
    batch: PhysicalBatch | None
    delivered: Delivered
    padded_otherwise: Sequence[PaddedOtherwise] = ()
    expected: int = 0
    run: list[RunRows] = field(default_factory=list)
    blank: LossWatch | None = None
    tape: LossTape | None = None
    state: ModelState | None = None

    def deliver(
        self,
        batch: PhysicalBatch,
        delivered: Delivered,
        padded_otherwise: Sequence[PaddedOtherwise],
    ) -> None:
        """The next part of the draw goes to the loop."""
        self.batch, self.delivered, self.padded_otherwise = batch, delivered, padded_otherwise
        self.expected += len(batch.indices)

    @property
    def covered(self) -> int:
        """How many rows of the draw the model was run on."""
        return self.sum.records + sum(rows.rows for rows in self.run)

    @property
    def whole_batch_run(self) -> RunRows | None:
        """The rows of the batch, if the model was run on all of them at once: a further pass is another view."""
        assert self.batch is not None
        whole = len(self.batch.indices)
        last = self.run[-1] if self.run else None
        return (
            last
            if last is not None and last.rows == whole and self.covered == self.expected
            else None
        )
