"""The training loop, from top to bottom."""

from __future__ import annotations

import hashlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dpis.accounting import Budget
from dpis.errors import DpisError, InputError
from dpis.gradients import RecordGradients, guards
from dpis.gradients.batches import Batch
from dpis.gradients.losses import Loss, Objective
from dpis.mechanism import Terms
from dpis.sampling import Draw
from dpis.training.averaging import WeightAverage
from dpis.training.buffers import FixedBuffers
from dpis.training.chance import seeded_generators, seeded_torch
from dpis.training.evaluation import HeldOut, Metric, evaluate
from dpis.training.files import write_whole
from dpis.training.fingerprint import fingerprint
from dpis.training.identity import described, described_model, described_optimizer
from dpis.training.model_file import ModelCard, describe, loader_source, save_model
from dpis.training.progress import Reporter, Silent, Standing
from dpis.training.records import Records, Rows
from dpis.training.run import Run
from dpis.training.summary import Summary

CHECKPOINT_SECONDS = 60.0
"""A crash costs at most so much work, beside what an epoch's end saves anyway."""


class InterruptedRunError(DpisError, KeyboardInterrupt):
    """The operator stopped the run; it is saved and can be resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """Stop once a held-out metric has not improved for some epochs. The claim stays that of the whole plan.

    Attributes:
        metric: its name among the held-out metrics. Held-out data is not protected; training values may not decide.
        patience: how many epochs without improvement.
        larger_is_better: of the metric.
    """

    metric: str = "accuracy"
    patience: int = 5
    larger_is_better: bool = True


@dataclass(kw_only=True)
class Task:
    """What is trained, on what, and how: everything that is not privacy.

    Attributes:
        model: the module. Layers of it that were put in evaluation mode one by one stay so.
        records: what is protected.
        loss: ``loss(output, target)``.
        objective: instead of ``loss``, see `RecordGradients`.
        optimizer: any of ``torch.optim`` that steps without a closure.
        scheduler: of its learning rate.
        scheduler_interval: "epoch" or "step": how often the scheduler steps.
        held_out: what the model is measured on.
        average: a moving average of the weights, released in place of them.
        early_stop: when to stop before the plan's end.
        physical_batch: how many records run at once; None: as many as fit the caches.
        card: what is stored beside the weights.
    """

    model: nn.Module
    records: Records
    optimizer: Optimizer
    loss: Loss | None = None
    objective: Objective | None = None
    scheduler: LRScheduler | ReduceLROnPlateau | None = None
    scheduler_interval: str = "epoch"
    held_out: HeldOut | None = None
    average: WeightAverage | None = None
    early_stop: EarlyStop | None = None
    physical_batch: int | None = None
    card: ModelCard | None = None

    def __post_init__(self) -> None:
        self.model = guards.checked(self.model)
        if (self.loss is None) == (self.objective is None):
            raise InputError("exactly one of loss and objective is required")
        if self.physical_batch is not None and self.physical_batch < 1:
            raise InputError(f"physical batch must be at least 1, found {self.physical_batch}")
        self._check_optimizer()
        self._check_scheduler()
        stop = self.early_stop
        if stop is not None and (self._nothing_held_out or stop.metric not in self._metrics):
            raise InputError(f"early stop needs held-out data with the metric {stop.metric!r}")

    def _check_optimizer(self) -> None:
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise InputError(
                "LBFGS asks for several gradients a step, and each would have to be paid for: use another optimizer"
            )
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        trained = {id(p): name for name, p in self.model.named_parameters() if p.requires_grad}
        for missing in trained.keys() - stepped:
            raise InputError(
                f"the optimizer does not step {trained[missing]}: give it all trainable parameters of this model, "
                "or set requires_grad=False on those that shall not train"
            )
        if stepped - trained.keys():
            raise InputError(
                "the optimizer steps parameters that are not trainable parameters of this model: "
                "they would get no noise and no gradient. Make the optimizer from this model's parameters"
            )

    def _check_scheduler(self) -> None:
        if self.scheduler_interval not in ("epoch", "step"):
            raise InputError(
                f"scheduler_interval is epoch or step, found {self.scheduler_interval!r}"
            )
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            return
        if self._nothing_held_out or not self._metrics:
            raise InputError(
                "ReduceLROnPlateau needs a metric on held-out data: the training loss is private, a learning rate "
                "that follows it would leak. Give held_out="
            )
        if self.scheduler_interval == "step":
            raise InputError(
                "ReduceLROnPlateau steps once an epoch, when held-out data was measured: leave scheduler_interval out"
            )

    @property
    def _metrics(self) -> Mapping[str, Metric]:
        return {} if self.held_out is None else self.held_out.metrics

    @property
    def _nothing_held_out(self) -> bool:
        dataset = None if self.held_out is None else self.held_out.dataset
        return dataset is None or (isinstance(dataset, Sized) and len(dataset) == 0)


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """Private values, for the operator alone."""

    gradient_evaluations: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out of a run.

    Attributes:
        folder: where its files are.
        claim: what is guaranteed; None: nothing.
        metrics: on held-out data, of the released weights after the last epoch.
        epochs: how many were trained.
        summary: as it stands in the folder.
        diagnostics: private values; None unless they were asked for.
    """

    folder: Path
    claim: Budget | None
    metrics: dict[str, float]
    epochs: int
    summary: Summary
    diagnostics: Diagnostics | None


@dataclass
class _Progress:
    """What the loop remembers beside model, optimizer and mechanism; all of it goes into checkpoints."""

    metrics: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    best: float = math.nan
    epochs_since_best: int = 0
    gradient_evaluations: int = 0
    stopped_early: bool = False


class Trainer:
    """Trains a task under a run's mechanism, and releases the model.

    Args:
        run: opened anew or resumed.
        task: what is trained.
        reporter: who is told how it goes.
        keep_checkpoint: leave the secret checkpoint in the folder after completion.
    """

    def __init__(
        self,
        run: Run,
        task: Task,
        *,
        reporter: Reporter | None = None,
        keep_checkpoint: bool = False,
    ) -> None:
        self.run, self.task = run, task
        self._mechanism = run.mechanism
        self._reporter: Reporter = Silent() if reporter is None else reporter
        self._keep_checkpoint = keep_checkpoint
        self._progress = _Progress()
        self._device = task.records.device
        self._asleep = _asleep(task.model)
        self._buffers = FixedBuffers(task.model)
        self._shapes_checked = run.options.batch_shaped
        self._stepped = False
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
        return RecordGradients(
            task.model,
            task.loss,
            objective=task.objective,
            rows_per_record=task.records.rows_per_record,
            chunk=task.physical_batch,
            expected_records=math.ceil(self._mechanism.plan.most_expected_candidates),
        )

    def train(self) -> Result:
        """All epochs, then the release.

        Raises:
            InterruptedRunError: by Ctrl-C; everything is saved.
        """
        try:
            with self._reporter, _interruptible() as interrupted:
                self._take_up()
                while not self._finished:
                    self._epoch(interrupted)
                result = self._release()
        except Exception:
            self._give_up()
            raise
        finally:
            self.run.close()
        if not self._keep_checkpoint:
            self.run.folder.remove_checkpoint()
        return result

    def _give_up(self) -> None:
        """Before the first step nothing has been released: nothing half-written stays."""
        if self.run.fresh and not self._stepped:
            self.run.discard()
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
            mechanism.begin_epoch(self._norms_of_all)
        saved = time.monotonic()
        while mechanism.steps_left:
            self._step()
            self._reporter.step_done(self._standing)
            stop = interrupted()
            if mechanism.steps_left and (stop or time.monotonic() - saved > CHECKPOINT_SECONDS):
                self._save()
                saved = time.monotonic()
            if stop and mechanism.steps_left:
                raise InterruptedRunError(self._how_to_resume())
        mechanism.end_epoch()
        self._measure()
        if self.task.scheduler is not None and self.task.scheduler_interval == "epoch":
            self._step_scheduler()
        self._save()
        self._reporter.epoch_done(self._standing)
        if interrupted() and not self._finished:
            raise InterruptedRunError(self._how_to_resume())

    def _step(self) -> None:
        """Draw, gradients, noise, update: one event, one step of the optimizer."""
        mechanism, task, key = self._mechanism, self.task, self.run.key
        step = mechanism.step
        draw = mechanism.draw()
        self._to_training_mode()
        with seeded_torch(key.stream("model", step)):
            update = mechanism.release_gradient_of_parts(self._gradients, self._rows(draw), draw)
            self._buffers.check()
            for name, parameter in self._gradients.parameters.items():
                parameter.grad = update[name].to(parameter.dtype)
            self._stepped = True
            task.optimizer.step()
        task.optimizer.zero_grad(set_to_none=True)
        if task.average is not None:
            task.average.update(task.model)
        if task.scheduler is not None and task.scheduler_interval == "step":
            self._step_scheduler()
        self._progress.gradient_evaluations += len(draw)

    def _rows(self, draw: Draw) -> Iterator[tuple[Batch, Tensor | None]]:
        step = self._mechanism.step
        for rows in self.task.records.drawn(draw.indices.numpy(), self.run.key, step):
            self._refuse_batch_shapes(rows)
            yield rows.batch, rows.present

    def _norms_of_all(self) -> Tensor:
        """The norms of all records at the current parameters, for a released norm sum."""
        key, epoch = self.run.key, self._mechanism.epoch + 1
        norms = [torch.zeros(0, dtype=torch.float64)]
        self._to_training_mode()
        with seeded_torch(key.stream("model-all", epoch)):
            for rows in self.task.records.all(key, epoch):
                result = self._gradients(
                    rows.batch, lambda norms, _: torch.zeros_like(norms), rows.present
                )
                norms.append(result.norms.cpu())
        self._progress.gradient_evaluations += len(self.task.records)
        return torch.cat(norms)

    def _to_training_mode(self) -> None:
        self.task.model.train()
        for layer in self._asleep:
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

    def _step_scheduler(self) -> None:
        scheduler = self.task.scheduler
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(next(iter(self._progress.metrics.values())))
        elif scheduler is not None:
            scheduler.step()

    def _measure(self) -> None:
        """Held-out metrics after an epoch, and whether to stop on them."""
        task, progress, terms = self.task, self._progress, self._terms
        if task.held_out is not None:
            chance = self.run.key.stream("held-out", terms.epoch)
            with self._released_weights(), seeded_generators(chance):
                progress.metrics = evaluate(task.model, task.held_out, self._device)
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
        identity, data = self._identity(), fingerprint(self.task.records, self.run.key)
        state = self.run.training
        if state is None:
            self._identity_saved, self._data = identity, data
            self._save()
            return
        changed = [name for name, value in identity.items() if state["identity"].get(name) != value]
        if state["data"] != data:
            changed.append("the data or its order")
        if changed:
            raise InputError(
                f"cannot resume {self.run.folder.path}: {' and '.join(changed)} changed since it was interrupted. "
                "The same noise on something else would cancel in the difference and reveal it. Bring back what was, "
                "or start anew in another folder"
            )
        self._identity_saved, self._data = identity, data
        task = self.task
        task.model.load_state_dict(state["model"])
        task.optimizer.load_state_dict(state["optimizer"])
        if task.scheduler is not None:
            task.scheduler.load_state_dict(state["scheduler"])
        if task.average is not None:
            task.average.load_state_dict(state["average"])
        self._buffers = FixedBuffers(task.model)
        self._progress = _Progress(**state["progress"])
        self._mechanism.load_state_dict(state["mechanism"])

    def _save(self) -> None:
        task = self.task
        self.run.save(
            {
                "identity": self._identity_saved,
                "data": self._data,
                "model": task.model.state_dict(),
                "optimizer": task.optimizer.state_dict(),
                "scheduler": None if task.scheduler is None else task.scheduler.state_dict(),
                "average": None if task.average is None else task.average.state_dict(),
                "progress": vars(self._progress),
                "mechanism": self._mechanism.state_dict(),
            }
        )

    def _identity(self) -> dict[str, str]:
        """What must not change between a run and its continuation, beside the data."""
        task, records = self.task, self.task.records
        asleep = [name for name, layer in task.model.named_modules() if layer in self._asleep]
        scheduler = None if task.scheduler is None else task.scheduler.state_dict()
        return {
            "the model": described_model(task.model),
            "its layers in evaluation mode": described(asleep),
            "the loss": described(task.loss if task.objective is None else task.objective),
            "the optimizer": described_optimizer(task.optimizer),
            "the scheduler": described([type(task.scheduler), task.scheduler_interval, scheduler]),
            "the moving average": described(task.average and task.average.decay),
            "the rows of a record": described([records.max_rows_per_user, records.augmentations]),
            "the augmentation": described(records.augment),
            "the collate function": described(records.collate_fn),
            "the physical batch": described(task.physical_batch),
            "the early stop": repr(task.early_stop),
        }

    # ── release ──────────────────────────────────────────────────────────────────────────────────────

    def _release(self) -> Result:
        """Model, then the ledger's end, then the summary: a crash in between is made good by resuming."""
        folder, task, progress = self.run.folder, self.task, self._progress
        card = describe(task.model) if task.card is None else task.card
        with self._released_weights():
            save_model(folder.model, task.model, card)
        loader = loader_source(card)
        if loader is not None:
            write_whole(folder.loader, loader.encode())
        sha256 = hashlib.sha256(folder.model.read_bytes()).hexdigest()
        self.run.finish(sha256)
        diagnostics = None
        if self.run.options.diagnostics:
            diagnostics = Diagnostics(gradient_evaluations=progress.gradient_evaluations)
        summary = Summary.of(
            self.run,
            metrics=progress.metrics,
            history=progress.history,
            stopped_early=progress.stopped_early,
            model_sha256=sha256,
            gradient_evaluations=None if diagnostics is None else diagnostics.gradient_evaluations,
        )
        text = json.dumps(summary.as_json(), indent=2, allow_nan=False) + "\n"
        write_whole(folder.summary, text.encode())
        return Result(
            folder=folder.path,
            claim=self._mechanism.plan.claim,
            metrics=progress.metrics,
            epochs=self._mechanism.epoch,
            summary=summary,
            diagnostics=diagnostics,
        )


def _asleep(model: nn.Module) -> set[nn.Module]:
    """Layers that stay in evaluation mode: put there one by one, or normalising by fixed statistics."""
    return {
        layer
        for layer in model.modules()
        if not layer.training and (model.training or isinstance(layer, _BatchNorm))
    }


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks the loop to save and stop after the step under way; a second one stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
