"""What loader, module and optimizer of one private loop share: the order of things, and the mechanism."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from dpis import batches
from dpis.coupling.looks import Looks
from dpis.coupling.loss import LossProbe, factor_of
from dpis.coupling.loss_tape import LossTape
from dpis.coupling.outputs import unwatch
from dpis.coupling.padding import PaddedOtherwise
from dpis.coupling.padding_trials import PaddingTrials
from dpis.coupling.writes import ModelState, unwritten
from dpis.dropin.blank import empty_outputs
from dpis.dropin.delivered import Delivered
from dpis.dropin.workers import Places
from dpis.errors import CouplingError, MisuseError
from dpis.generators import chance_of, seeded_generators
from dpis.gradients.deferred import DeferredGradients, Pass
from dpis.mechanism import Mechanism
from dpis.mechanism.gradient_sum import GradientSum
from dpis.sampling import Draw

FULL_PRECISION = (torch.float32, torch.float64)
SUM_INSTEAD = (
    "Sum the loss over the batch (reduction='sum') and say so by make_private(loss_reduction='sum'), or train in "
    "float32"
)


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


class Session:
    """One draw, one forward pass for each of its rows, backward, one release; then the next.

    Args:
        mechanism: releases one noisy gradient for every draw.
        gradients: the module, run now and asked for gradients later.
        mean: losses are means over the rows of a physical batch (else sums).
        as_delivered: refuse inputs of the form, but not the contents, of what the loader delivered.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        gradients: DeferredGradients,
        *,
        mean: bool,
        as_delivered: bool = True,
    ) -> None:
        self.mechanism, self.gradients = mechanism, gradients
        self.stepping = False
        self._mean, self._as_delivered = mean, as_delivered
        self._iteration: object | None = None
        self._ahead: deque[PhysicalBatch] = deque()
        self._current: PhysicalBatch | None = None
        self._delivered = Delivered((), 0, gradients.row_dim)
        self._padded_otherwise: Sequence[PaddedOtherwise] = ()
        self._expected = 0  # rows of the draw that were delivered so far
        self._passes: list[Pass] = []
        self._trials = PaddingTrials(gradients.agree)
        self._probe = LossProbe()
        self._tape: LossTape | None = None
        self._sum: GradientSum | None = None
        self._state: ModelState | None = None  # at the first forward pass of the step
        self._template: Any = None
        self._looks = Looks()  # at forward passes
        self._closed = False
        self._refusal: CouplingError | None = None
        self._guards = [
            parameter.register_post_accumulate_grad_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
            for parameter in gradients.parameters.values()
        ]

    def close(self) -> None:
        """No step follows; the model may be used as any other."""
        self._closed = True
        self._forget()
        while self._guards:
            self._guards.pop().remove()

    # ── the loader's side ────────────────────────────────────────────────────────────────────────────

    def begin_iteration(self) -> object:
        """A new pass over the loader is a new epoch; what was left of the last one is given up.

        Draws that were not released are delivered again, before any other: whoever could have a new one by leaving the
        loop would choose who is sampled. If nothing was released in the last epoch, it begins again.

        Returns:
            What tells this iteration from every other.
        """
        self._require_open()
        self._forget()
        if self.mechanism.steps_left != self.mechanism.plan.workload.steps_per_epoch:
            self.mechanism.abandon_epoch()
            self.mechanism.begin_epoch()
        self._iteration = object()
        return self._iteration

    def draw_batches(self, most: int | None) -> Iterator[list[int]]:
        """The records of every batch of this iteration, drawn when asked for, perhaps well before they are delivered.

        Args:
            most: deliver no more rows than this at once; None: whole draws.
        """
        return self._draw_batches(self._iteration, most)

    def _draw_batches(self, iteration: object | None, most: int | None) -> Iterator[list[int]]:
        if iteration is None:
            raise MisuseError(
                "the draws of a private loader were taken past it, as a loader does that was rebuilt from its batch "
                "sampler: what it delivers would be trained without being accounted for. Iterate the loader that "
                "make_private returned"
            )
        first, waiting = self.mechanism.step, self.mechanism.waiting_draws
        for number in range(self.mechanism.steps_left):
            self._require_current(iteration)
            draw = waiting[number] if number < len(waiting) else self.mechanism.draw_ahead()
            items = chance_of(self.mechanism.chance("items", first + number))
            indices = draw.indices.tolist()
            size = most or max(1, len(indices))
            for start in range(0, max(1, len(indices)), size):
                part = indices[start : start + size]
                self._ahead.append(PhysicalBatch(draw, part, start + size >= len(indices)))
                yield Places(part, items, start)

    def deliver(
        self, iteration: object, batch: Any, padded_otherwise: Sequence[PaddedOtherwise]
    ) -> None:
        """The oldest drawn batch goes to the loop.

        Args:
            iteration: that it belongs to.
            batch: its records.
            padded_otherwise: some of its rows, where they have another shape by themselves.
        """
        self._require_current(iteration)
        self.require_stepped()
        self._current = self._ahead.popleft()
        if self._sum is None:
            self._sum = self.mechanism.start_sum(self._current.draw, self.gradients.parameters)
        rows = len(self._current.indices)
        self._expected += rows
        self._delivered = Delivered.of(batch, rows, self.gradients.row_dim)
        self._padded_otherwise = padded_otherwise

    def require_stepped(self) -> None:
        """Before the next batch is taken."""
        if self._current is not None:
            raise MisuseError(
                "the next batch was taken before optimizer.step() was called for the last one: its noisy gradient was "
                "not released, and which steps are left out would tell about the records. Call optimizer.step() for "
                "every batch, empty ones too. To look at records without training, use the loader you made this from"
            )

    # ── the module's side ────────────────────────────────────────────────────────────────────────────

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's outputs for a batch, or a part of it, open to gradients."""
        self._require_open()
        self._require_unchanged()
        if self._current is None or self._sum is None:
            return self._look(args, kwargs)
        self._require_full_precision()
        inputs = list(batches.tensors((args, dict(kwargs))))
        if any(tensor.requires_grad for tensor in inputs):
            raise MisuseError(
                "an input of the private model requires a gradient: gradients of single records end at this model, so "
                "what comes before it would neither be trained nor be protected. Make one model of all that is "
                "trained, or detach the input"
            )
        if not self._current.indices:
            if inputs and all(tensor.numel() for tensor in inputs):
                self._require_rows(1)
            with self._masks(0):
                return empty_outputs(self.gradients.module, args, kwargs, self._template)
        if self._mean and any(not passed.backward_done for passed in self._passes):
            raise MisuseError(
                "the model was run on a second part of the batch before backward of the first: a mean over both would "
                "be scaled by the number of drawn records, which is private. Call backward for each part, or run the "
                "model on the whole batch"
            )
        before = self._sum.records + sum(p.rows for p in self._passes)
        start = before - (self._expected - len(self._current.indices))
        self._require_delivered(inputs, start)
        if self._state is None:
            self._state = ModelState(self.gradients.module, closely=self.looks_now)
        with self._masks(before):
            passed = self.gradients.run(args, kwargs)
        self._state.check_unwritten()
        self._require_rows(before + passed.rows)
        self._template = passed.blank if self._template is None else self._template
        self._passes.append(passed)
        self._trials.prepare(
            passed,
            range(start, start + passed.rows),
            (args, dict(kwargs)),
            self._delivered.numbers_of,
            self._padded_otherwise,
        )
        self._looks.due()
        return passed.outputs

    def _masks(self, start: int) -> AbstractContextManager[None]:
        """Dropout of the rows from this one on: a function of key, step and place, the same if they are run again."""
        return seeded_generators(self.mechanism.chance(f"model:{start}", self.mechanism.step))

    def _look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The outputs for rows that nobody drew: they can be looked at. Gradients of theirs are refused on arrival."""
        with unwritten(self.gradients.module):
            return self.gradients.module(*args, **kwargs)

    def _require_delivered(self, inputs: list[Tensor], start: int) -> None:
        if self._as_delivered and self._delivered.contradicts(inputs, start):
            raise MisuseError(
                "the model was given other records than the loader delivered, or in another order: whoever was not "
                "drawn by a coin has no amplification, a mixture of records is not bounded by the clip norm, and norms "
                "would be stored for the wrong records. Give the batch as it came. A change of each record by itself "
                "belongs in the data set or the collate function; if it must be in the loop, say so by "
                "make_private(inputs_as_delivered=False), and nobody checks"
            )

    def _require_rows(self, rows: int) -> None:
        if rows > self._expected:
            raise MisuseError(
                f"{self._expected} records were drawn for this step, and the model has now been run on {rows}: a "
                "record would count twice, or was not drawn, and the clip norm would not bound what it adds. "
                "Run the model once on every row of the loader's batch before optimizer.step(); what is only looked at "
                "belongs under torch.no_grad()"
            )

    def _require_unchanged(self) -> None:
        """The recorder looks too; here it is said in the words of the loop."""
        known = self.gradients.parameters
        now = {n: p for n, p in self.gradients.module.named_parameters() if p.requires_grad}
        if now.keys() != known.keys() or any(now[name] is not known[name] for name in known):
            raise MisuseError(
                "the model was changed after make_private: trainable parameters were replaced, added, frozen or "
                "thawed. Their gradients would be neither clipped nor noised. Change the model first, then make it "
                "private"
            )

    def _require_full_precision(self) -> None:
        """Gradients of a mean carry the number of rows: rounded to half precision, all of them move with one record."""
        parameters = self.gradients.parameters.values()
        halved = any(p.dtype not in FULL_PRECISION for p in parameters)
        autocast = any(torch.is_autocast_enabled(p.device.type) for p in parameters)
        if self._mean and (halved or autocast):
            raise MisuseError(
                "float32 or float64 is required for a mean, found autocast or a model in half precision: gradients are "
                "rounded after they were divided by the number of drawn records, so one record more would change those "
                f"of all others, by more than the noise is made for. {SUM_INSTEAD}"
            )

    @property
    def looks_now(self) -> bool:
        """Whether to look at the loss of the last forward pass: at the 1st, 2nd, 4th, 8th, ..."""
        return self._looks.now

    @property
    def tape(self) -> LossTape:
        """Where to write down what is made of the outputs of this step."""
        if self._tape is None:
            self._tape = LossTape(self._look_at_loss)
        return self._tape

    def _look_at_loss(self, tape: LossTape, loss: Tensor, gradient: Tensor | None) -> None:
        self._refuse_scaled_part(loss)
        self._looks.showed(False)  # after a refusal the next loss is looked at, too
        self._probe.refuse_coupled(loss, gradient, [p.leaves for p in self._passes], tape)
        self._looks.showed(True)

    def _refuse_scaled_part(self, loss: Tensor) -> None:
        """The mean over a part counts as it is: a share of the batch on top of it would be taken for a weight."""
        whole = 0 if self._current is None else len(self._current.indices)
        rows = sum(passed.rows for passed in self._passes if not passed.backward_done)
        if not self._mean or not 0 < rows < whole:
            return
        shares = rows / whole, 1 / -(-whole // rows)
        if any(math.isclose(factor_of(loss), share, rel_tol=1e-5) for share in shares):
            raise MisuseError(
                "the loss of a part of the batch was scaled by the part's share of it: the update would be as many "
                "times too small as there are parts, since parts add up to the mean over the batch by themselves, and "
                "how many records were drawn is private. Call backward on the plain mean over each part; or give the "
                "loader to BatchMemoryManager, which makes the parts"
            )

    def _close_tape(self) -> None:
        if self._tape is not None:
            unwatch(self._tape)
        self._tape = None

    # ── the optimizer's side ─────────────────────────────────────────────────────────────────────────

    def clear(self) -> None:
        """`zero_grad`: gradients that have arrived are dropped; a forward pass without any goes on."""
        self._drop([p for p in self._passes if p.backward_done])

    def _drop(self, passes: list[Pass]) -> None:
        self._trials.forget(passes)
        self._passes = [p for p in self._passes if p not in passes]

    def fold(self) -> None:
        """Add up what has arrived: the rows of a physical batch make room for the next."""
        self._require_open()
        if self._current is None or self._sum is None:
            raise MisuseError(
                "optimizer.step() without a batch: one step is accounted for every batch of the private loader, and "
                "that of the last one was taken already. A second one would be released without being accounted for. "
                "Take the next batch first"
            )
        if any(not passed.backward_done for passed in self._passes):
            raise MisuseError(
                "optimizer.step() was called after a forward pass without backward: its records would be missing "
                "from the sum, which changes who is sampled. Call loss.backward() on the loss of these outputs first"
            )
        try:
            self._hold_trials()
            for passed in self._passes:
                scale = float(passed.rows) if self._mean else 1.0
                self.mechanism.add(self._sum, self.gradients.tape(passed, scale))
        except (
            BaseException
        ):  # a part may have been added: the draw is delivered again, and summed up anew
            self._forget()
            raise
        self._passes = []
        self._close_tape()

    def _hold_trials(self) -> None:
        """A model that sees padding will see it again, when nobody looks: it is refused for good."""
        try:
            self._trials.hold()
        except CouplingError as refusal:
            self._refusal = refusal
            raise

    def release(self) -> dict[str, Tensor] | None:
        """The noisy gradient of this step; None, while parts of the draw are to come."""
        self.fold()
        assert self._current is not None
        assert self._sum is not None
        missing = self._expected - self._sum.records
        if missing > 0:
            raise MisuseError(
                f"{missing} of {self._expected} drawn records had no forward and backward pass (or their gradients "
                "were dropped by zero_grad() after backward): leaving some out by hand changes who is sampled. Run the "
                "model, in training mode, on the whole batch of the loader"
            )
        if not self._current.last:
            self._current = None
            return None
        if self._state is not None:
            self._state.check_unwritten()
        update = self.mechanism.release_sum(self._sum)
        self._forget_draw()
        return update if self._mean else self._as_sum(update)

    def _as_sum(self, update: dict[str, Tensor]) -> dict[str, Tensor]:
        """A loop that sums losses expects the gradient of a sum over ``batch_size`` records."""
        rows = self.mechanism.plan.workload.batch_size
        return {name: value.mul_(rows) for name, value in update.items()}

    # ── state ────────────────────────────────────────────────────────────────────────────────────────

    def _forget(self) -> None:
        self._iteration = None
        self._ahead.clear()
        self._forget_draw()

    def _forget_draw(self) -> None:
        self._drop(self._passes)
        self._close_tape()
        self._state = None
        self._expected = 0
        self._current = self._sum = None
        self._delivered = Delivered((), 0, self.gradients.row_dim)

    def _require_open(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        if self._closed:
            raise MisuseError(
                "the model was taken out of private training by to_standard_module(): a step now would not be "
                "accounted for. Make it private again with a new PrivacyEngine; what was spent before adds to it"
            )

    def _require_current(self, iteration: object | None) -> None:
        self._require_open()
        if iteration is None or iteration is not self._iteration:
            raise MisuseError(
                "an iteration over the private loader was continued after another one had begun: its draws were given "
                "up, and their coins may not be used for other steps. Use one iteration at a time"
            )

    def __deepcopy__(self, memo: object) -> NoReturn:
        _refuse_copy()

    def __reduce__(self) -> NoReturn:
        _refuse_copy()


def _refuse_copy() -> NoReturn:
    raise MisuseError(
        "a private optimizer or loader cannot be copied: two runs would use the same noise, which then cancels in the "
        "difference of their models. Use save_checkpoint"
    )


def _refuse_gradient(parameter: Tensor) -> None:
    parameter.grad = None
    raise MisuseError(
        "a gradient arrived at a parameter past the private model, or from a batch that did not come from the private "
        "loader: it is neither clipped nor noised, and nobody was sampled by coins, so a step with it would "
        "not be private. Call the model that make_private returned, in training mode (model.train()), on batches of "
        "the loader that make_private returned, and leave penalties on weights to the optimizer's weight_decay. To "
        "evaluate use torch.no_grad(); for gradients of inputs use torch.autograd.grad"
    )
