"""The training loop, from top to bottom."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dpis.accounting import Terms
from dpis.coupling.looks import Looks
from dpis.coupling.padding import SEES_PADDING
from dpis.coupling.writes import unwritten
from dpis.errors import CouplingError, InputError
from dpis.generators import seeded_generators, seeded_torch
from dpis.gradients import RecordGradients
from dpis.mechanism.fingerprint import Fingerprint, require_same_data
from dpis.mechanism.gradient_sum import GradientSum
from dpis.mechanism.sharded_state import put_together
from dpis.runs.folder import Replacement, write_whole
from dpis.sampling import Draw
from dpis.training.data_fingerprint import DataFingerprint
from dpis.training.evaluation import Evaluation, evaluate
from dpis.training.interrupt import InterruptedRunError, interruptible
from dpis.training.model_file import (
    card_of,
    loader_source,
    model_bytes,
    weights_digest,
    whole_weights,
)
from dpis.training.progress import Reporter, Silent, Standing
from dpis.training.records import Rows
from dpis.training.result import Diagnostics, Result, summary_of
from dpis.training.resume_identity import evaluation_layers, identity_of
from dpis.training.run import Run
from dpis.training.task import Task

CHECKPOINT_SECONDS = 60.0
"""A crash costs at most so much work, beside what an epoch's end saves anyway."""


@dataclass
class _Progress:
    """What the loop remembers beside model, optimizer and mechanism; all of it goes into checkpoints."""

    metrics: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    best: float = math.nan
    epochs_since_best: int = 0
    gradient_evaluations: int = 0
    stopped_early: bool = False
    by_place: bool = False
    """Whether gradients depend on chance that goes by place in a rank's batch, such as dropout."""


class Trainer:
    """Trains a task under a run's mechanism, and releases the model.

    Args:
        run: opened anew or resumed.
        task: what is trained.
        reporter: who is told how it goes.
        keep_checkpoint: leave the secret checkpoint in the folder after completion.
        check_data: read all data again on resume, not only what changed by size or time.
    """

    def __init__(
        self,
        run: Run,
        task: Task,
        *,
        reporter: Reporter | None = None,
        keep_checkpoint: bool = False,
        check_data: bool = False,
    ) -> None:
        self.run, self.task = run, task
        self._check_data = check_data
        self._mechanism, self._group = run.mechanism, run.group
        self._reporter: Reporter = Silent() if reporter is None or not run.group.leads else reporter
        self._keep_checkpoint = keep_checkpoint
        self._progress = _Progress()
        self._device = task.records.device
        self._evaluation_layers = evaluation_layers(task.model)
        self._trial = Evaluation({}, 0)  # of the held-out metrics, before training
        self._shapes_checked = run.batch_shaped
        self._stepped = False
        self._looks = Looks()  # at frozen parameters
        self._between_steps = False
        try:
            self._gradients = self._new_gradients()
        except Exception:
            self._give_up()
            raise

    def _new_gradients(self) -> RecordGradients:
        task = self.task
        if self.run.options.batch_shaped != task.records.batch_shaped:
            raise InputError(
                "batch_shaped of the run and of its records differ: the ledger says which"
            )
        if self.run.options.user_level != (task.records.user_ids is not None):
            raise InputError(
                "the run claims to protect users and its records are rows, or the other way round"
            )
        return RecordGradients(
            task.model,
            task.loss,
            objective=task.objective,
            rows_per_record=task.records.rows_per_record,
            chunk=task.physical_batch,
            fixed_shape=not self.run.batch_shaped,
            expected_records=math.ceil(
                self._mechanism.plan.most_expected_candidates / self._group.size
            ),
        )

    def train(self) -> Result:
        """All epochs, then the release.

        Raises:
            InterruptedRunError: by Ctrl-C; everything is saved.
        """
        try:
            with self._reporter, interruptible() as interrupted:
                self._take_up()
                while not self._finished:
                    self._epoch(interrupted)
                result = self._release()
        except Exception:
            self._give_up()
            raise
        finally:
            self.run.close()
        if self._group.leads and not self._keep_checkpoint:
            self.run.folder.remove_checkpoint()
        return result

    def _give_up(self) -> None:
        """Before the first step nothing has been released: nothing half-written stays. Later, keep what was done."""
        if self.run.fresh and not self._stepped:
            self.run.discard()
        elif self._between_steps and self._mechanism.steps_left and self._group.size == 1:
            with suppress(InputError):  # a full disk: the last checkpoint serves
                self._save()
        self.run.close()

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def _finished(self) -> bool:
        mechanism = self._mechanism
        done = mechanism.epoch == mechanism.plan.workload.epochs and not mechanism.steps_left
        return done or self._progress.stopped_early

    def _epoch(self, interrupted: Callable[[], bool]) -> None:
        mechanism = self._mechanism
        if not mechanism.steps_left:
            mechanism.begin_epoch(self._all_norms() if mechanism.wants_all_norms else None)
        saved = time.monotonic()
        while mechanism.steps_left:
            self._step()
            self._reporter.step_done(self._standing)
            late = time.monotonic() - saved > CHECKPOINT_SECONDS
            stop, save = self._agreed(interrupted(), late)
            if mechanism.steps_left and (stop or save):
                self._save()
                saved = time.monotonic()
            if stop and mechanism.steps_left:
                raise InterruptedRunError(self._how_to_resume())
        mechanism.end_epoch()
        self._require_same_weights()
        self._measure()
        if self.task.scheduler is not None and self.task.scheduler_interval == "epoch":
            self._step_scheduler()
        self._save()
        self._reporter.epoch_done(self._standing)
        stop, _ = self._agreed(interrupted(), False)
        if stop and not self._finished:
            raise InterruptedRunError(self._how_to_resume())

    def _agreed(self, *wishes: bool) -> list[bool]:
        """What any rank wishes for, all of them do."""
        of_ranks = self._group.answers(sum(wish << place for place, wish in enumerate(wishes)))
        return [any(one >> place & 1 for one in of_ranks) for place in range(len(wishes))]

    def _step(self) -> None:
        """Draw, per-example gradients, noise, update: one event, one step of the optimizer."""
        self._between_steps = False
        mechanism, task = self._mechanism, self.task
        self._to_training_mode()
        with seeded_torch(self.run.key.stream(f"model:{self._group.rank}", mechanism.step)):
            alike = self._group.together(mechanism.place)
            closely, sharded = self._looks.due(), self._sharded
            with alike, unwritten(task.model, closely=closely, sharded=sharded):
                before = torch.get_rng_state()
                total = self._sum_over(mechanism.draw())
                self._progress.by_place |= not torch.equal(before, torch.get_rng_state())
            update = mechanism.release_sum(total)
            for name, parameter in self._gradients.parameters.items():
                parameter.grad = update.pop(name).to(parameter.dtype)
            self._stepped = True
            task.optimizer.step()
        task.optimizer.zero_grad(set_to_none=True)
        if task.average is not None:
            task.average.update(task.model)
        if task.scheduler is not None and task.scheduler_interval == "step":
            self._step_scheduler()
        self._progress.gradient_evaluations += len(total.draw) * task.records.rows_per_record
        self._between_steps = True

    def _sum_over(self, draw: Draw) -> GradientSum:
        """The weighted per-example gradients of the drawn records. Tapes end with this call."""
        mechanism, key, step = self._mechanism, self.run.key, self._mechanism.step
        gradients = self._gradients
        total = mechanism.start_sum(draw, gradients.parameters, gradients.sharded_sums)
        for rows in self._in_step(self.task.records.drawn(draw.indices.numpy(), key, step)):
            self._refuse_batch_shapes(rows)
            self._refuse_seen_padding(rows)
            for tape in gradients.tapes(rows.batch, rows.present):
                mechanism.add(total, tape)
        return total

    def _in_step(self, parts: Iterator[Rows]) -> Iterator[Rows]:
        """The rows of a rank's records, part by part; nobody's, while other ranks of a sharded model have some."""
        ranks = self._gradients.ranks
        rows = next(parts, None)
        while ranks.any(rows is not None):
            yield self.task.records.nobody(self.run.key) if rows is None else rows
            rows = next(parts, None)

    def _all_norms(self) -> Tensor:
        """The norms of all own records at the current parameters, for a released norm sum."""
        key, epoch, rank = self.run.key, self._mechanism.epoch + 1, self._group.rank
        records, norms = self.task.records, [torch.zeros(0, dtype=torch.float64)]
        own = self._mechanism.own_records
        self._to_training_mode()
        chance = seeded_torch(key.stream(f"model-all:{rank}", epoch))
        with self._group.together(), chance, unwritten(self.task.model, sharded=self._sharded):
            for rows in self._in_step(records.all(key, epoch, own)):
                self._refuse_seen_padding(rows)
                tapes = self._gradients.tapes(rows.batch, rows.present)
                norms += [tape.norms().cpu() for tape in tapes]
        self._progress.gradient_evaluations += len(own) * records.rows_per_record
        return torch.cat(norms)

    def _to_training_mode(self) -> None:
        self.task.model.train()
        for layer in self._evaluation_layers:
            layer.training = False

    def _refuse_batch_shapes(self, rows: Rows) -> None:
        """The ledger's header says that norms have one shape: tried out on the first batch (rule 19)."""
        if not self._shapes_checked and self._gradients.batch_shaped(rows.batch):
            raise InputError(
                "the rounding of a record's norm depends on who shares its batch: sizes inside the model follow the "
                "batch (packed sequences), or a kernel rounds records by their place. Declare it with "
                "batch_shaped=True; the ledger will say so"
            )
        self._shapes_checked = True

    def _refuse_seen_padding(self, rows: Rows) -> None:
        """How far a row is padded depends on who shares its batch: the model must not see it."""
        if not self._gradients.gradients_agree(rows.padded_otherwise, like=rows.batch):
            raise CouplingError(SEES_PADDING)

    def _step_scheduler(self) -> None:
        scheduler = self.task.scheduler
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(next(iter(self._progress.metrics.values())))
        elif scheduler is not None:
            scheduler.step()

    def _try_metrics(self) -> str | None:
        """A metric that does not fit shows before anything is spent. It looks at the model, and leaves it as it is.

        Returns:
            A fingerprint of the held-out data, as they were read here.
        """
        held_out = self.task.held_out
        if held_out is None:
            return None
        seen = Fingerprint(self.run.key, "held-out-fingerprint-key")
        chance = self.run.key.stream("held-out", 0)
        unwritten_to = unwritten(self.task.model, sharded=self._sharded)
        with self._group.together(), seeded_generators(chance), unwritten_to:
            self._trial = evaluate(self.task.model, held_out, self._device, seen.add)
            held_out.require_more()
        if not self._trial.rows:
            raise InputError(
                "held-out data has no rows: leave held_out out, or give some to measure on"
            )
        return seen.text

    def _measure(self) -> None:
        """Held-out metrics after an epoch, and whether to stop on them."""
        task, progress, terms = self.task, self._progress, self._terms
        if task.held_out is not None:
            chance = self.run.key.stream("held-out", terms.epoch)
            with self._group.together():
                with self._released_weights(), seeded_generators(chance):
                    measured = evaluate(task.model, task.held_out, self._device)
                measured.require_rows_of(self._trial)
            progress.metrics = self._group.gathered(measured.metrics)[0]
        progress.history.append(
            {
                "epoch": terms.epoch,
                "kappa": terms.kappa,
                "clip_norm": None if math.isinf(terms.clip_norm) else terms.clip_norm,
                "grad_noise_multiplier": terms.grad_noise_multiplier,
                "noise_multiplier": terms.noise_multiplier,
                "sampling_rate": terms.sampling_rate,
                **{f"held_out_{name}": value for name, value in progress.metrics.items()},
            }
        )
        if task.early_stop is not None:
            value = progress.metrics[task.early_stop.metric]
            value = value if task.early_stop.larger_is_better else -value
            better = math.isnan(progress.best) or value > progress.best
            progress.best = value if better else progress.best
            progress.epochs_since_best = 0 if better else progress.epochs_since_best + 1
            progress.stopped_early = progress.epochs_since_best >= task.early_stop.patience

    def _require_same_weights(self) -> None:
        """Every rank took the same updates: a processor that computes otherwise would show here."""
        if self._group.size > 1 and not self._sharded:
            self._group.require_same(weights_digest(self.task.model), "weights")

    @property
    def _sharded(self) -> bool:
        return self._gradients.sharded_sums is not None

    @contextmanager
    def _released_weights(self) -> Iterator[None]:
        if self.task.average is None:
            yield
            return
        with self.task.average.in_place_of(self.task.model):
            yield

    @property
    def _terms(self) -> Terms:
        terms = self._mechanism.terms
        assert terms is not None
        return terms

    @property
    def _standing(self) -> Standing:
        workload = self._mechanism.plan.workload
        return Standing(
            terms=self._terms,
            epochs=workload.epochs,
            step=self._mechanism.step,
            steps=workload.steps,
            fraction_spent=self._mechanism.fraction_spent,
            metrics=self._progress.metrics,
        )

    def _how_to_resume(self) -> str:
        return (
            f"interrupted and saved in epoch {self._mechanism.epoch}; nothing is lost. Go on with "
            f"`dpis train --resume {self.run.folder.path}` (in Python: resume=True)"
        )

    # ── checkpoint and resume ────────────────────────────────────────────────────────────────────────

    def _take_up(self) -> None:
        """Stand where the last checkpoint stood, over the same data; or take the first."""
        state = self.run.training
        with self._group.together():
            identity = identity_of(self.task, self._evaluation_layers)
        data, held_out = self._data_now(state), self._try_metrics()
        for name, value in (*identity.items(), ("held-out data", held_out)):
            self._group.require_same(value, name)
        self._identity_saved, self._data, self._held_out = identity, data, held_out
        if state is None:
            self._require_same_weights()
            self._save()
            return
        changed = [name for name, value in identity.items() if state["identity"].get(name) != value]
        if state["data"]["fingerprint"] != data["fingerprint"]:
            changed.append("the data or its order")
        if state["held_out"] != held_out:
            changed.append("the held-out data or its order")
        if changed:
            raise InputError(
                f"cannot resume {self.run.folder.path}: {' and '.join(changed)} changed since it was interrupted "
                "(functions and layers are compared by their code, so that an edit or another version of Python is a "
                "change). The same noise on something else would cancel in the difference and reveal it. Bring back "
                "what was, or start anew in another folder"
            )
        task, own = self.task, self.run.own
        state = put_together(state, own, task.model)
        task.model.load_state_dict(state["model"])
        task.optimizer.load_state_dict(state["optimizer"])
        if task.scheduler is not None:
            task.scheduler.load_state_dict(state["scheduler"])
        if task.average is not None:
            task.average.load_state_dict(state["average"])
        self._progress = _Progress(**state["progress"])
        if not self._group.leads:
            self._progress.gradient_evaluations = 0  # rank 0 goes on counting for all
        unknown = state["mechanism"]["step"] == 0 or self._device.type != "cpu"
        by_place = unknown or self._progress.by_place or task.records.by_place
        self._mechanism.load_state_dict(state["mechanism"], own, by_place=by_place)

    def _data_now(self, state: dict[str, Any] | None) -> dict[str, Any]:
        """A fingerprint of the data; what lies in files that are as they were is not read again."""
        known = {} if state is None or self._check_data else state["data"]["known"]
        records = self.task.records
        shards = replace(self._mechanism.sampler.shards, population=len(records))
        looks = DataFingerprint(records, self.run.key, shards)
        require_same_data(lambda i: looks.chunk_digest(range(i, i + 1)), len(records), self._group)
        seen = DataFingerprint(records, self.run.key, shards, known)
        with self._group.together():
            own = seen.own_digests()
        of_ranks = self._group.gathered((own, seen.known))
        digests = [digest for theirs, _ in of_ranks for digest in theirs]
        known = {name: one for _, theirs in of_ranks for name, one in theirs.items()}
        return {"fingerprint": seen.combined(digests), "known": known}

    def _save(self) -> None:
        task = self.task
        evaluations = sum(self._group.gathered(self._progress.gradient_evaluations))
        by_place = self._group.any(self._progress.by_place)
        self.run.save(
            {
                "identity": self._identity_saved,
                "data": self._data,
                "held_out": self._held_out,
                "model": task.model.state_dict(),
                "optimizer": task.optimizer.state_dict(),
                "scheduler": None if task.scheduler is None else task.scheduler.state_dict(),
                "average": None if task.average is None else task.average.state_dict(),
                "progress": {
                    **vars(self._progress),
                    "gradient_evaluations": evaluations,
                    "by_place": by_place,
                },
                "mechanism": self._mechanism.state_dict(),
            }
        )

    # ── release ──────────────────────────────────────────────────────────────────────────────────────

    def _release(self) -> Result:
        """Rank 0 writes the files of the run; every rank has the released model and says the same of it."""
        evaluations = sum(self._group.gathered(self._progress.gradient_evaluations))
        with self._released_weights():
            weights = whole_weights(self.task.model)
        result = self._group.from_first(lambda: self._write_files(weights, evaluations))
        if self.task.average is not None:
            self.task.average.put_into(self.task.model)  # the module is what was released
        return result

    def _write_files(self, weights: dict[str, Tensor], gradient_evaluations: int) -> Result:
        """The model beside its place, the ledger's end, then the model into its place and the summary.

        A ledger that was closed over another model refuses before a file is touched. A crash in between is made good
        by resuming: the same weights give the same bytes.
        """
        self.run.key.require_home()
        folder, task, progress = self.run.folder, self.task, self._progress
        card = card_of(task.model) if task.card is None else task.card
        contents = model_bytes(weights, card)
        sha256 = hashlib.sha256(contents).hexdigest()
        with Replacement(folder.model, contents) as model:
            self.run.finish(sha256)
            model.put_in_place()
        loader = loader_source(card)
        if loader is not None:
            write_whole(folder.loader, loader.encode())
        diagnostics = None
        if self.run.options.diagnostics:
            diagnostics = Diagnostics(gradient_evaluations=gradient_evaluations)
        summary = summary_of(
            self.run,
            metrics=progress.metrics,
            history=progress.history,
            stopped_early=progress.stopped_early,
            model_sha256=sha256,
            diagnostics=diagnostics,
        )
        summary.write(folder)
        return Result(
            folder=folder.path,
            claim=self._mechanism.plan.claim,
            metrics=progress.metrics,
            epochs=self._mechanism.epoch,
            summary=summary,
            diagnostics=diagnostics,
        )
