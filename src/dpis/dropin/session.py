"""What loader, module and optimizer of one private loop share: the order of things, and the mechanism."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from typing import Any, NoReturn

import torch
from torch import Tensor

from dpis import batches
from dpis.coupling.divisors import Divisors
from dpis.coupling.looks import Looks
from dpis.coupling.loss import LossProbe, factor_of
from dpis.coupling.loss_tape import LossTape
from dpis.coupling.loss_watch import FULL_PRECISION, LossRules, LossWatch
from dpis.coupling.model_parts import parts_of
from dpis.coupling.outputs import unwatch, watched_outputs
from dpis.coupling.own_means import OwnMeans
from dpis.coupling.padding import PaddedOtherwise
from dpis.coupling.padding_trials import PaddingTrials
from dpis.coupling.writes import ModelState, unwritten
from dpis.dropin.blank import empty_outputs
from dpis.dropin.delivered import Delivered
from dpis.dropin.step import PhysicalBatch, RunRows, Step
from dpis.dropin.workers import Places
from dpis.errors import CouplingError, MisuseError
from dpis.generators import chance_of, seeded_generators
from dpis.gradients.deferred import DeferredGradients, Pass, joined
from dpis.group import current_group
from dpis.mechanism import Mechanism
from dpis.mechanism.gradient_sum import GradientSum
from dpis.sampling import Draw


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
        self._as_delivered = as_delivered
        self._iteration: object | None = None
        self._ahead: deque[PhysicalBatch] = deque()
        self._step: Step | None = None
        self._trials = PaddingTrials(lambda *given: self.gradients.agree(*given))
        self._probe = LossProbe()
        self._rules = LossRules(mean, OwnMeans(), Divisors(mean), self._look_at_loss)
        self._template: Any = None
        self._looks = Looks()  # at forward passes
        self._closed = False
        self._refusal: CouplingError | None = None
        self._all_parameters = dict(gradients.module.named_parameters())
        self._guards: list[Any] = []
        self._sharded = gradients.sharded_sums
        self._train(gradients)

    def _train(self, gradients: DeferredGradients) -> None:
        """From now on these parameters are trained, and no gradient may arrive at them by itself."""
        self.gradients = gradients
        while self._guards:
            self._guards.pop().remove()
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
        self._require_group()
        if self.mechanism.steps_left != self.mechanism.plan.workload.steps_per_epoch:
            self._require_same_weights()
            self.mechanism.abandon_epoch()
            self.mechanism.begin_epoch()
        self._iteration = object()
        return self._iteration

    def _require_group(self) -> None:
        """Who connects to others afterwards has a key of its own: each release would be charged as the only one."""
        now, then = current_group().size, self.mechanism.group.size
        if now != then:
            raise MisuseError(
                f"{now} processes are connected, and there were {then} when make_private was called: each drew records "
                "and added noise by itself, and what they release together would cost more than any of them reports. "
                "Call torch.distributed.init_process_group() before make_private. Nothing was released"
            )

    def _require_same_weights(self) -> None:
        """Updates are the same on every rank; optimizers and checkpoints may not be."""
        if self._sharded is None and self.mechanism.group.size > 1:
            trained = sorted(self.gradients.parameters.items())
            digests = [
                blake2b(batches.flattened(p.detach().cpu()).view(torch.uint8).numpy().data).digest()
                for _, p in trained
            ]
            self.mechanism.group.require_same(
                digests,
                "weights (compare learning rates, optimizers and schedulers, and load weights on all processes)",
            )

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
        first = self.mechanism.step
        for step in range(first, first + self.mechanism.steps_left):
            self._require_current(iteration)
            draw = self.mechanism.draw_of(step)
            items = chance_of(self.mechanism.chance("items", step))
            indices = draw.indices.tolist()
            size = most or max(1, len(indices))
            parts = self._equally_many(max(1, -(-len(indices) // size)))
            for number in range(parts):
                part = indices[number * size : (number + 1) * size]
                self._ahead.append(PhysicalBatch(draw, part, number + 1 == parts))
                yield Places(part, items, number * size)

    def _equally_many(self, parts: int) -> int:
        """All ranks of a sharded model run it equally often: some on nobody."""
        return parts if self._sharded is None else self.gradients.ranks.largest(parts)

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
        part = self._ahead.popleft()
        delivered = Delivered.of(batch, len(part.indices), self.gradients.row_dim)
        if self._step is None:
            total = self._start_sum(part.draw)
            self._step = Step(total, None, delivered)
        self._step.deliver(part, delivered, padded_otherwise)

    def _start_sum(self, draw: Draw) -> GradientSum:
        return self.mechanism.start_sum(draw, self.gradients.parameters, self._sharded)

    @property
    def _current(self) -> PhysicalBatch | None:
        """The batch that was delivered last and is not yet folded into a sum."""
        return None if self._step is None else self._step.batch

    def require_stepped(self) -> None:
        """Before the next batch is taken."""
        if self._current is not None:
            raise MisuseError(
                "the next batch was taken before optimizer.step() was called for the last one: its noisy gradient was "
                "not released, and which steps are left out would tell about the records. Call optimizer.step() for "
                "every batch, empty ones too. To accumulate gradients over several batches, give the loader the batch "
                "size that is wanted, and BatchMemoryManager what fits into memory. To look at records without "
                "training, use the loader you made this from"
            )

    # ── the module's side ────────────────────────────────────────────────────────────────────────────

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's outputs for a batch, or a part of it, open to gradients and watched."""
        self._require_open()
        self._follow_thaws()
        step = self._step
        if step is None or step.batch is None:
            return watched_outputs(self._look(args, kwargs))
        inputs = list(batches.tensors((args, dict(kwargs))))
        if any(tensor.requires_grad for tensor in inputs):
            raise MisuseError(
                "an input of the private model requires a gradient: gradients of single records end at this model, so "
                "what comes before it would neither be trained nor be protected. Make one model of all that is "
                "trained, or detach the input"
            )
        if not step.batch.indices and self._sharded is None:
            if inputs and all(tensor.numel() for tensor in inputs):
                self._require_rows(step, 1)
            with self._masks(0, 0):
                blank = empty_outputs(self.gradients.module, args, kwargs, self._template)
            step.blank = self._new_watch(step, 0, half=False)
            return watched_outputs(blank, step.blank)
        seen = step.whole_batch_run
        self._require_backward(step, but=seen)
        before = step.covered - (0 if seen is None else seen.rows)
        start = before - (step.expected - len(step.batch.indices))
        if step.batch.indices:
            self._require_delivered(step, inputs, start)
        if step.state is None:
            sharded = self._sharded is not None
            step.state = ModelState(self.gradients.module, closely=self.looks_now, sharded=sharded)
        with self._masks(before, 0 if seen is None else len(seen.passes)):
            passed = self.gradients.run(args, kwargs)
        if self.looks_now:
            step.state.check_unwritten()  # where it happened; before the release always
        self._require_rows(step, before + passed.rows, whole=seen is not None)
        self._template = passed.blank if self._template is None else self._template
        if passed.rows:
            self._trials.prepare(
                passed,
                range(start, start + passed.rows),
                (args, dict(kwargs)),
                step.delivered.numbers_of,
                step.padded_otherwise,
            )
        if seen is None:
            self._looks.due()
            watch = self._new_watch(step, passed.rows, half=self._half(passed))
            seen = RunRows(passed.rows, watch, [])
            step.run.append(seen)
        seen.passes.append(passed)
        seen.watch.open(passed.leaves)
        return watched_outputs(passed.outputs, seen.watch)

    def _new_watch(self, step: Step, rows: int, *, half: bool) -> LossWatch:
        if rows and self.looks_now and step.tape is None:
            step.tape = LossTape()
        return LossWatch(rows, self._rules, half=half, tape=step.tape if rows else None)

    def _half(self, passed: Pass) -> bool:
        """Whether the model computes in half precision, wherever that was said."""
        kinds = {p.dtype for p in self.gradients.parameters.values()} | passed.kinds
        autocast = any(
            torch.is_autocast_enabled(p.device.type) for p in self.gradients.parameters.values()
        )
        return autocast or bool(kinds - set(FULL_PRECISION))

    def _masks(self, start: int, view: int) -> AbstractContextManager[None]:
        """Dropout of the rows from this one on: a function of key, step and place, the same if they are run again."""
        purpose = f"model:{start}" if view == 0 else f"model:{start}:{view}"
        return seeded_generators(self.mechanism.chance(purpose, self.mechanism.step))

    def _look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The outputs for rows that nobody drew: they can be looked at. Gradients of theirs are refused on arrival."""
        with unwritten(self.gradients.module, sharded=self._sharded is not None):
            return self.gradients.module(*args, **kwargs)

    def _require_delivered(self, step: Step, inputs: list[Tensor], start: int) -> None:
        if self._as_delivered and step.delivered.contradicts(inputs, start):
            raise MisuseError(
                "the model was given other records than the loader delivered, or in another order: whoever was not "
                "drawn by a coin has no amplification, a mixture of records is not bounded by the clip norm, and norms "
                "would be stored for the wrong records. Give the batch as it came. A change of each record by itself "
                "belongs in the data set or the collate function; if it must be in the loop, say so by "
                "make_private(inputs_as_delivered=False), and nobody checks"
            )

    def _require_backward(self, step: Step, but: RunRows | None) -> None:
        if self._rules.mean and any(r is not but and not r.backward_done for r in step.run):
            raise MisuseError(
                "the model was run on a second part of the batch before backward of the first: a mean over both would "
                "be scaled by the number of drawn records, which is private. Call backward for each part, or run the "
                "model on the whole batch"
            )

    def _require_rows(self, step: Step, rows: int, *, whole: bool = False) -> None:
        """Not more than were drawn; for a second view of the batch, not fewer either."""
        if rows > step.expected or (whole and rows != step.expected):
            raise MisuseError(
                f"{step.expected} records were drawn for this step, and the model has now been run on {rows}: a "
                "record would count twice, or was not drawn, and the clip norm would not bound what it adds. "
                "Run the model on every row of the loader's batch before optimizer.step(), once or, for two views of a "
                "record, on the whole batch each time; what is only looked at belongs under torch.no_grad()"
            )

    def _follow_thaws(self) -> None:
        """Between two steps parameters may be frozen or thawed; the recorder looks at all else, in its own words."""
        if self._sharded is not None:
            return  # other tensors stand in for the parameters while the model runs: the recorder knows which
        known = self.gradients.parameters
        parameters = parts_of(self.gradients.module).parameters.items()
        now = {name: p for name, p in parameters if p.requires_grad}
        if now.keys() == known.keys() and all(now[name] is known[name] for name in known):
            return
        begun = self._step is not None and self._step.covered > 0
        if begun or any(p is not self._all_parameters.get(name) for name, p in now.items()):
            raise MisuseError(
                "the model was changed after make_private: trainable parameters were replaced or added, or some were "
                "frozen or thawed in the middle of a step. Their gradients would be neither clipped nor noised. Change "
                "the model first, then make it private; freeze and thaw between two steps"
            )
        self._train(
            DeferredGradients(self.gradients.module, batch_first=self.gradients.row_dim == 0)
        )
        if self._step is not None:
            self._step.sum = self._start_sum(self._step.sum.draw)

    @property
    def looks_now(self) -> bool:
        """Whether to look at the loss of the last forward pass: at the 1st, 2nd, 4th, 8th, ..."""
        return self._looks.now

    def _look_at_loss(self, watch: LossWatch, loss: Tensor, gradient: Tensor | None) -> None:
        step = self._step
        assert step is not None
        assert watch.tape is not None
        self._refuse_scaled_part(step, loss)
        self._looks.showed(False)  # after a refusal the next loss is looked at, too
        outputs = [[leaf for p in rows.passes for leaf in p.leaves] for rows in step.run]
        self._probe.refuse_coupled(loss, gradient, outputs, watch.tape)
        self._looks.showed(True)

    def _refuse_scaled_part(self, step: Step, loss: Tensor) -> None:
        """The mean over a part counts as it is: a share of the batch on top of it would be taken for a weight."""
        whole = 0 if step.batch is None else len(step.batch.indices)
        rows = sum(rows.rows for rows in step.run if not rows.backward_done)
        if not self._rules.mean or not 0 < rows < whole:
            return
        shares = rows / whole, 1 / -(-whole // rows)
        if any(math.isclose(factor_of(loss), share, rel_tol=1e-5) for share in shares):
            raise MisuseError(
                "the loss of a part of the batch was scaled by the part's share of it: the update would be as many "
                "times too small as there are parts, since parts add up to the mean over the batch by themselves, and "
                "how many records were drawn is private. Call backward on the plain mean over each part; or give the "
                "loader to BatchMemoryManager, which makes the parts"
            )

    # ── the optimizer's side ─────────────────────────────────────────────────────────────────────────

    def clear(self) -> None:
        """`zero_grad`: gradients that have arrived are dropped; a forward pass without any goes on."""
        for rows in [] if self._step is None else self._step.run:
            self._trials.forget([p for p in rows.passes if p.backward_done])
            rows.passes = [p for p in rows.passes if not p.backward_done]
        if self._step is not None:
            self._step.run = [rows for rows in self._step.run if rows.passes]

    def fold(self) -> None:
        """Add up what has arrived: the rows of a physical batch make room for the next."""
        self._require_open()
        step = self._step
        if step is None or step.batch is None:
            raise MisuseError(
                "optimizer.step() without a batch: one step is accounted for every batch of the private loader, and "
                "that of the last one was taken already. A second one would be released without being accounted for. "
                "Take the next batch first"
            )
        if any(not rows.backward_done for rows in step.run):
            raise MisuseError(
                "optimizer.step() was called after a forward pass without backward: its records would be missing "
                "from the sum, which changes who is sampled. Call loss.backward() on the loss of these outputs first"
            )
        try:
            self._hold_trials()
            for rows in step.run:
                tapes = [self.gradients.tape(passed, rows.watch.scale) for passed in rows.passes]
                self.mechanism.add(step.sum, joined(tapes))
        except (
            BaseException
        ):  # a part may have been added: the draw is delivered again, and summed up anew
            self._forget()
            raise
        self._end_rows(step)

    def _end_rows(self, step: Step) -> None:
        for rows in step.run:
            unwatch(rows.watch)
            self._trials.forget(rows.passes)
        step.run, step.tape = [], None

    def _hold_trials(self) -> None:
        """A model that sees padding will see it again, when nobody looks: it is refused for good."""
        try:
            self._trials.hold()
        except CouplingError as refusal:
            self._refusal = refusal
            raise

    def release(self) -> dict[str, Tensor] | None:
        """The noisy gradient of this step; None, while parts of the draw are to come."""
        mechanism = self.mechanism
        with mechanism.group.stopping():
            step = self._whole_step()
        if step is None:
            return None
        mechanism.require_same_terms(step.sum)
        update = mechanism.release_sum(step.sum)
        self._forget_draw()
        return update if self._rules.mean else self._as_sum(update)

    def _whole_step(self) -> Step | None:
        """The step under way with all of its records; None, while parts of the draw are to come."""
        self._follow_thaws()
        self.fold()
        step = self._step
        assert step is not None
        assert step.batch is not None
        missing = step.expected - step.sum.records
        if missing > 0:
            raise MisuseError(
                f"{missing} of {step.expected} drawn records had no forward and backward pass (or their gradients "
                "were dropped by zero_grad() after backward): leaving some out by hand changes who is sampled. Run the "
                "model, in training mode, on the whole batch of the loader"
            )
        if not step.batch.last:
            step.batch = None
            return None
        if step.state is not None:
            step.state.check_unwritten()
        return step

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
        if self._step is not None:
            self._end_rows(self._step)
        self._step = None

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
        "not be private. Call the model that make_private returned (itself, not a layer or a method of it: let forward "
        "choose), in training mode (model.train()), on batches of the loader that make_private returned, and leave "
        "penalties on weights to the optimizer's weight_decay. A LightningModule takes dpis.dropin.lightning's "
        "PrivacyCallback instead of make_private. To evaluate use torch.no_grad(); for gradients of inputs use "
        "torch.autograd.grad"
    )
