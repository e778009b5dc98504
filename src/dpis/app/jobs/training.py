"""A training job: data, model and mechanism from options, begun anew or taken up from its folder."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpis.app.jobs.job_options import JobOptions
from dpis.app.jobs.pipeline import Content, Pipeline
from dpis.app.jobs.settings import (
    average_decay,
    learning_rate,
    make_config,
    model_name,
    releases,
    require_fit,
)
from dpis.app.jobs.sources import Encoded, RecordSource, open_source
from dpis.app.jobs.systems import system
from dpis.errors import InputError
from dpis.features.augment import Augmentation, View, other_views
from dpis.features.channels import (
    LONGEST_MEAN,
    LONGEST_SQUARE,
    MEAN,
    SQUARE,
    ChannelScale,
    channel_sums,
)
from dpis.features.colours import Colours
from dpis.generators import seeded_torch
from dpis.group import Alone, Group
from dpis.mechanism import Config, Mechanism
from dpis.mechanism.secret_state import load_secret_state, shared_key
from dpis.models.kinds import Inputs, ModelKind, model_kind
from dpis.randomness import Key
from dpis.runs.folder import RunFolder, next_run_folder
from dpis.stored_rows import Column, RowsDataset, StackedRows, StoredRows, changed
from dpis.training import HeldOut, Records, Result, Run, RunOptions, Task, Trainer, WeightAverage
from dpis.training.api import OPTIMIZERS, Audit, to_device
from dpis.training.evaluation import metrics_of
from dpis.training.model_file import card_of
from dpis.training.progress import Reporter


@dataclass(frozen=True)
class JobResult:
    """A finished job."""

    result: Result
    options: JobOptions
    measured_on: str
    """What the held-out metrics were measured on, in words."""
    wall_seconds: float


def start_job(
    options: JobOptions,
    reporter: Reporter,
    *,
    keep_checkpoint: bool = False,
    group: Group | None = None,
    audit: Audit | None = None,
) -> JobResult:
    """Train as the options say, in a new folder.

    Args:
        options: what was asked for.
        reporter: of rank 0.
        keep_checkpoint: leave the secret checkpoint in the folder after completion.
        group: the processes that train together; all of them call this.
        audit: makes the mechanism, and plants records.
    """
    group = group or Alone()
    group.require_same(options.as_json(), "options")
    key = shared_key(options.seed, group)
    return _Job(options, key, reporter, keep_checkpoint, group, audit=audit).run(resume=None)


def resume_job(
    path: Path,
    reporter: Reporter,
    *,
    keep_checkpoint: bool = False,
    check_data: bool = False,
    group: Group | None = None,
) -> JobResult:
    """Go on with the interrupted job in that folder: everything is as it was asked for then."""
    group = group or Alone()
    with group.together():
        saved = load_secret_state(RunFolder(path).checkpoint, "options")
        recipe = saved["options"]["recipe"]
        if "job" not in recipe:
            raise InputError(
                f"{path} was started from Python, not by `dpis train`: resume it there with resume=True"
            )
        options = JobOptions.from_json(recipe["job"])
    key = Key(saved["key"], saved["seed"])
    return _Job(options, key, reporter, keep_checkpoint, group, check_data).run(path)


class _Job:
    """One job; what is fixed before any record is looked at comes first."""

    def __init__(
        self,
        options: JobOptions,
        key: Key,
        reporter: Reporter,
        keep_checkpoint: bool,
        group: Group,
        check_data: bool = False,
        audit: Audit | None = None,
    ) -> None:
        self._options, self._key, self._group = options, key, group
        self._audit = audit
        self._reporter, self._keep_checkpoint = reporter, keep_checkpoint
        self._check_data = check_data
        self._device = to_device(options.device)
        self._system = system(options.method)

    def run(self, resume: Path | None) -> JobResult:
        """Everything from reading the data to the released model."""
        with self._group.stopping():
            return self._run(resume)

    def _run(self, resume: Path | None) -> JobResult:
        began = time.monotonic()
        options = self._options
        anew = self._check_data and self._group.leads
        source = self._group.after_first(lambda: open_source(options, self._key, anew=anew))
        kind = model_kind(model_name(options, self._system, source))
        require_fit(options, kind, source)
        if "max_rows_per_user" in options.said and not source.user_level:
            raise InputError("--max-rows-per-user has no effect without users: give --user-column")
        config = make_config(options, kind, source)
        task = self._task(source, kind, config, None)  # errors come before anything is written
        if resume is None and self._group.leads:
            for note in (*source.look_through(), *_note_on_count(options.n_public, source)):
                self._reporter.note(f"note (private, shown here only): {note}")
        if self._audit is not None:
            self._audit.prepare(task)
        run = self._open(resume, config, source, len(task.records))
        if releases(options, source):  # the task above was a rehearsal, with made-up statistics
            del task  # its inputs are large
            try:
                task = self._task(source, kind, config, run.mechanism)
            except BaseException:
                run.discard() if resume is None else run.close()
                raise
            if self._audit is not None:
                self._audit.prepare(task)
        trainer = Trainer(
            run,
            task,
            reporter=self._reporter,
            keep_checkpoint=self._keep_checkpoint,
            check_data=self._check_data,
        )
        result = trainer.train()
        return JobResult(result, options, source.held_out, time.monotonic() - began)

    def _open(
        self, resume: Path | None, config: Config, source: RecordSource, population: int
    ) -> Run:
        if resume is not None:
            return Run.resume(resume, population, self._group)
        options = self._options
        recipe = {
            "job": options.as_json(),
            "public": _public_recipe(options, config, source),
            "public_by_confirmation": list(source.preprocessing.public_by_confirmation),
        }
        out = options.out
        path = self._group.from_first(
            lambda: next_run_folder(Path("runs")) if out is None else Path(out)
        )
        run_options = RunOptions(
            diagnostics=options.diagnostics,
            user_level=source.user_level,
            audited=self._audit is not None,
            recipe=recipe,
        )
        make = self._audit or Mechanism
        return Run.start(path, config, population, self._key, run_options, self._group, make)

    def _task(
        self, source: RecordSource, kind: ModelKind, config: Config, mechanism: Mechanism | None
    ) -> Task:
        options = self._options
        encoded, changes = source.encode(mechanism), _changes(options, kind)
        pipeline, inputs = self._pipeline(encoded, kind, changes.views, mechanism)
        target = encoded.preprocessing.target
        classes = getattr(target, "classes", None)
        shape = inputs.shape[2:] if changes.views else inputs.shape[1:]
        model = self._model(kind, tuple(shape), len(classes) if classes else 1)
        trained = [p for p in model.parameters() if p.requires_grad]
        lr = learning_rate(options, kind, config, source)
        ema = average_decay(options)
        return Task(
            model=model,
            records=self._records(inputs, encoded, changes),
            loss=nn.CrossEntropyLoss() if classes else _column_squared_error,
            optimizer=OPTIMIZERS[options.optimizer](trained, lr),
            held_out=self._held_out(pipeline, encoded),
            average=WeightAverage(model, ema) if ema else None,
            physical_batch=options.physical_batch,
            card=card_of(
                model,
                preprocessing=pipeline.to_json(),
                preprocessing_source=pipeline.source(),
                classes=classes,
                task=target.task,
            ),
        )

    def _model(self, kind: ModelKind, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """As the run's key starts it."""
        with seeded_torch(self._key.stream("weights", 0)):
            return kind.build(shape, outputs).to(self._device)

    def _records(self, inputs: Column, encoded: Encoded, changes: _Changes) -> Records:
        by_user = encoded.user_ids is not None
        return Records(
            _dataset(inputs, encoded.targets),
            user_ids=encoded.user_ids,
            max_rows_per_user=self._options.max_rows_per_user if by_user else 1,
            views=1 + len(changes.views),
            augment=changes.augment,
            augmentations=changes.augmentations,
            device=self._device,
            rank=self._group.rank,
        )

    def _pipeline(
        self,
        encoded: Encoded,
        kind: ModelKind,
        views: tuple[View, ...],
        mechanism: Mechanism | None,
    ) -> tuple[Pipeline, Column]:
        """How inputs are made, and those of the training records: of every view, ``[records, views, ...]``."""
        colours = Colours(self._options.colours or Colours.RGB)
        unscaled = Pipeline(encoded.preprocessing, kind.inputs, colours=colours)
        features = self._described(unscaled, encoded.features)
        by_channel = self._options.normalise == "channel"
        pipeline = replace(unscaled, scale=_scale(features, mechanism)) if by_channel else unscaled
        inputs = pipeline.normalised(features)
        if not views:
            return pipeline, inputs
        if isinstance(inputs, StoredRows):
            assert isinstance(encoded.features, StoredRows)
            others = [
                pipeline.inputs(changed(encoded.features, view, f"view {place}"))
                for place, view in enumerate(views, start=1)
            ]
            return pipeline, StackedRows([inputs, *others])  # type: ignore[list-item]
        assert isinstance(encoded.features, Tensor)
        every = inputs.new_empty(len(inputs), 1 + len(views), *inputs.shape[1:])
        every[:, 0] = inputs
        del features, inputs  # one view is large enough
        for place, view in enumerate(views, start=1):
            of_view = pipeline.normalised(self._described(pipeline, view(encoded.features)))
            assert isinstance(of_view, Tensor)
            every[:, place] = of_view
        return pipeline, every

    def _described(self, pipeline: Pipeline, records: Content) -> Column:
        """Features are computed once: rank 0 leaves them in the cache for the others."""
        return self._group.after_first(lambda: pipeline.described(records))

    def _held_out(self, pipeline: Pipeline, encoded: Encoded) -> HeldOut | None:
        described = self._described(pipeline, encoded.held_out_features)
        inputs = pipeline.normalised(described)
        if not len(inputs):
            return None
        task = encoded.preprocessing.target.task
        return HeldOut(_dataset(inputs, encoded.held_out_targets), metrics_of(task))


def _dataset(inputs: Column, targets: Tensor) -> Dataset[Any]:
    if isinstance(inputs, StoredRows):
        return RowsDataset(inputs, targets)
    return TensorDataset(inputs, targets)


@dataclass(frozen=True)
class _Changes:
    """How images are changed: the fixed views beside the image as it is, or what changes it at random."""

    views: tuple[View, ...] = ()
    augment: Augmentation | None = None
    augmentations: int = 1


def _changes(options: JobOptions, kind: ModelKind) -> _Changes:
    """Pixels anew in every step; scatter features are too slow for that, so their images have fixed views."""
    if options.augment is None:
        return _Changes()
    augmentation = Augmentation(options.augment)
    if kind.inputs is Inputs.SCATTERED:
        return _Changes(views=other_views(augmentation, options.augmentations))
    return _Changes(augment=augmentation, augmentations=options.augmentations)


def _scale(features: Column, mechanism: Mechanism | None) -> ChannelScale:
    """Of the channels, from two noisy releases. Without a mechanism made up: a rehearsal spends nothing."""
    channels = features.shape[1]
    if mechanism is None:
        return ChannelScale((0.0,) * channels, (1.0,) * channels)
    (means, squares), plan = channel_sums(features), mechanism.plan
    noise_multiplier = 0.0
    if plan.claim is not None:  # sgd promises nothing, so it needs no noise
        means = mechanism.release(MEAN, means, LONGEST_MEAN)
        squares = mechanism.release(SQUARE, squares, LONGEST_SQUARE)
        noise_multiplier = plan.privacy.release(SQUARE).noise_multiplier
    return ChannelScale.from_sums(means, squares, plan.workload.n_public, noise_multiplier)


def _column_squared_error(output: Any, target: Any) -> Any:
    return (output.reshape(len(target), -1).mean(1) - target).square()


def _note_on_count(declared: int | None, source: RecordSource) -> tuple[str, ...]:
    """A sign that the declared number of records is a slip; whether it fits is told by the data."""
    count = source.population
    if declared is None or declared <= 2 * count <= 4 * declared:
        return ()
    who = "users" if source.user_level else "records"
    return (
        f"there are {count:,} {who} to train on, --n-public says {declared:,}: steps, sampling and noise follow "
        "--n-public, so the model learns too little or is noisier than need be. The claim holds all the same",
    )


def _public_recipe(options: JobOptions, config: Config, source: RecordSource) -> dict[str, Any]:
    """What the summary may say of the options, as they were used: no path, no name of a user's file."""
    model = model_name(options, system(options.method), source)
    return {
        "data": source.name,
        "system": options.method,
        "model": model,
        "normalise": options.normalise,
        "colours": options.colours,
        "augment": options.augment,
        "augmentations": options.augmentations,
        "optimizer": options.optimizer,
        "lr": learning_rate(options, model_kind(model), config, source),
        "ema": average_decay(options),
        "measured_on": source.held_out,
    }
