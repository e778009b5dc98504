"""A training job: data, model and mechanism from options, begun anew or taken up from its folder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.utils.data import TensorDataset

from dpis.accounting import Accountant, AdaptivePlan, CountSource
from dpis.errors import InputError
from dpis.jobs.options import JobOptions
from dpis.jobs.pipeline import Pipeline, to_device
from dpis.jobs.sources import Encoded, Source, open_source
from dpis.mechanism import AdaptiveClipping, Config, Contribution, Method, NormSum, make_plan
from dpis.models import ModelKind, model_kind
from dpis.randomness import Key
from dpis.training import HeldOut, Records, Result, Run, RunOptions, Task, Trainer, WeightAverage
from dpis.training.api import OPTIMIZERS
from dpis.training.chance import seeded_torch
from dpis.training.checkpoint import load_checkpoint
from dpis.training.evaluation import METRICS
from dpis.training.files import RunFolder, next_run_folder
from dpis.training.model_file import describe
from dpis.training.progress import Reporter

T = TypeVar("T")

MAX_ROWS_PER_USER = 8
CLIP_STEPS = 100.0


@dataclass(frozen=True)
class JobResult:
    """A finished job."""

    result: Result
    options: JobOptions
    measured_on: str
    """What the held-out metrics were measured on, in words."""
    wall_seconds: float


def start_job(
    options: JobOptions, reporter: Reporter, *, keep_checkpoint: bool = False
) -> JobResult:
    """Train as the options say, in a new folder."""
    key = Key.fresh() if options.seed is None else Key.from_seed(options.seed)
    return _Job(options, key, reporter, keep_checkpoint).run(resume=None)


def resume_job(path: Path, reporter: Reporter, *, keep_checkpoint: bool = False) -> JobResult:
    """Go on with the interrupted job in that folder: everything is as it was asked for then."""
    saved = load_checkpoint(RunFolder(path).checkpoint)
    recipe = saved["options"]["recipe"]
    if "job" not in recipe:
        raise InputError(
            f"{path} was started from Python, not by `dpis train`: resume it there with resume=True"
        )
    key = Key(saved["key"], saved["seed"])
    return _Job(JobOptions.from_json(recipe["job"]), key, reporter, keep_checkpoint).run(path)


class _Job:
    """One job; what is fixed before any record is looked at comes first."""

    def __init__(
        self, options: JobOptions, key: Key, reporter: Reporter, keep_checkpoint: bool
    ) -> None:
        self._options, self._key = options, key
        self._reporter, self._keep_checkpoint = reporter, keep_checkpoint
        self._device = to_device(options.device)
        self._method = Method.parse(options.method)
        if options.optimizer not in OPTIMIZERS:
            raise InputError(
                f"--optimizer must be one of {', '.join(OPTIMIZERS)}, found {options.optimizer!r}"
            )

    def run(self, resume: Path | None) -> JobResult:
        """Everything from reading the data to the released model."""
        began = time.monotonic()
        options = self._options
        source = open_source(options, self._key)
        kind = model_kind(options.model or _default_model(source))
        if kind.scattered and source.image_shape is None:
            raise InputError(f"--model {kind.name} needs images; for tables use linear or mlp")
        if options.max_rows_per_user is not None and not source.user_level:
            raise InputError("--max-rows-per-user has no effect without users: give --user-column")
        config = _config(options, self._method, kind, source)
        task = self._task(
            source.encode(None), kind, config
        )  # errors come before anything is written
        if resume is None:
            for note in source.notes:
                self._reporter.note(f"note (private, shown here only): {note}")
        run = self._open(resume, config, source)
        if source.releases:  # the task above was a rehearsal, with made-up bounds
            try:
                task = self._task(source.encode(run.mechanism), kind, config)
            except BaseException:
                run.discard() if resume is None else run.close()
                raise
        trainer = Trainer(run, task, reporter=self._reporter, keep_checkpoint=self._keep_checkpoint)
        result = trainer.train()
        return JobResult(result, options, source.held_out, time.monotonic() - began)

    def _open(self, resume: Path | None, config: Config, source: Source) -> Run:
        if resume is not None:
            return Run.resume(resume, source.population)
        options = self._options
        recipe = {
            "job": options.as_json(),
            "public": _public_recipe(options, source),
            "public_by_confirmation": list(source.public_by_confirmation),
        }
        path = Path(options.out) if options.out is not None else next_run_folder(Path("runs"))
        run_options = RunOptions(
            diagnostics=options.diagnostics, user_level=source.user_level, recipe=recipe
        )
        return Run.start(path, config, source.population, self._key, run_options)

    def _task(self, encoded: Encoded, kind: ModelKind, config: Config) -> Task:
        options = self._options
        pipeline = Pipeline(encoded.preprocessing, kind.scattered)
        inputs = pipeline.inputs(encoded.features)
        held_out_inputs = pipeline.inputs(encoded.held_out_features)
        classification = encoded.preprocessing.target.task == "classification"
        classes = getattr(encoded.preprocessing.target, "classes", None)
        with seeded_torch(self._key.stream("weights", 0)):
            model = kind.build(tuple(inputs.shape[1:]), len(classes) if classes else 1)
        model.to(self._device)
        records = Records(
            TensorDataset(inputs, encoded.targets),
            user_ids=encoded.user_ids,
            max_rows_per_user=_or(options.max_rows_per_user, MAX_ROWS_PER_USER)
            if encoded.user_ids is not None
            else 1,
            device=self._device,
        )
        metric = "accuracy" if classification else "squared_error"
        trained = [p for p in model.parameters() if p.requires_grad]
        lr = _default_learning_rate(kind, config) if options.lr is None else options.lr
        ema = DEFAULT_EMA if options.ema is None else options.ema
        return Task(
            model=model,
            records=records,
            loss=nn.CrossEntropyLoss() if classification else _column_squared_error,
            optimizer=OPTIMIZERS[options.optimizer](trained, lr),
            held_out=HeldOut(
                TensorDataset(held_out_inputs, encoded.held_out_targets), {metric: METRICS[metric]}
            )
            if len(held_out_inputs)
            else None,
            average=WeightAverage(model, ema) if ema else None,
            physical_batch=options.physical_batch,
            card=describe(
                model,
                preprocessing=pipeline.to_json(),
                preprocessing_source=pipeline.source(),
                classes=classes,
                task=encoded.preprocessing.target.task,
            ),
        )


def _column_squared_error(output: Any, target: Any) -> Any:
    return (output.reshape(len(target), -1).mean(1) - target).square()


def _or(said: T | None, default: T) -> T:
    return default if said is None else said


def _default_model(source: Source) -> str:
    shape = source.image_shape
    return "mlp" if shape is None or min(shape[-2:]) < 8 else "scatter-linear"


def _config(options: JobOptions, method: Method, kind: ModelKind, source: Source) -> Config:
    n_public = source.population if options.n_public is None else options.n_public
    clip_norm, clipping = _clipping(options, kind)
    batch_size = options.batch_size
    if batch_size is None:
        batch_size = default_batch_size(n_public)
    return Config(
        method=method,
        epsilon=_or(options.epsilon, 3.0),
        delta=_or(options.delta, 1e-5),
        n_public=n_public,
        n_public_source=CountSource.DATASET_LENGTH
        if options.n_public is None
        else CountSource.GIVEN,
        batch_size=batch_size,
        epochs=DEFAULT_EPOCHS if options.epochs is None else options.epochs,
        kappa=options.kappa,
        equivalent_batch=options.equivalent_batch,
        headroom=_or(options.k, 5.0),
        floor=_or(options.g_l, 0.05),
        contribution=Contribution.parse(_or(options.contribution, "weight")),
        clip_norm=clip_norm,
        clipping=clipping,
        a_e=_or(options.a_e, 0.8),
        norm_sum=NormSum.parse(_or(options.norm_sum, "full-pass")),
        decay_rate=_or(options.decay_rate, 0.005),
        accountant=Accountant.parse(_or(options.accountant, "pld")),
        releases=source.releases if method.private else (),
        release_n=options.release_n,
    )


def _default_learning_rate(kind: ModelKind, config: Config) -> float:
    """By the model and the noise of the first epoch, both public."""
    plan = make_plan(config)
    noise = (
        plan.accounting.noise_multiplier
        if isinstance(plan.accounting, AdaptivePlan)
        else plan.noise_multiplier(1)
    )
    return kind.learning_rate(plan.workload.equivalent_batch[0], noise)


DEFAULT_EPOCHS = 40
DEFAULT_EMA = 0.95


def default_batch_size(n_public: int) -> int:
    """A fifth of the records, at most 8,192: large batches suffer least from noise."""
    return max(1, min(8192, n_public // 5))


def _clipping(options: JobOptions, kind: ModelKind) -> tuple[float, AdaptiveClipping | None]:
    """``--clip-norm auto``, or any of its bounds, adapts the clip norm from the model's usual one."""
    auto = options.clip_norm == "auto"
    first = kind.clip_norm
    if options.clip_norm is not None and not auto:
        try:
            first = float(options.clip_norm)
        except ValueError:
            raise InputError(
                f"--clip-norm must be a number or auto, found {options.clip_norm!r}"
            ) from None
    bounds = (options.c_star, options.c_min, options.lambda_)
    if not auto and all(value is None for value in bounds):
        return first, None
    return first, AdaptiveClipping(
        ceiling=4 * first if options.c_star is None else options.c_star,
        lowest=first / CLIP_STEPS if options.c_min is None else options.c_min,
        quantile=1.0 if options.lambda_ is None else options.lambda_,
    )


def _public_recipe(options: JobOptions, source: Source) -> dict[str, Any]:
    """What the summary may say of the options: no path, no name of a user's file."""
    return {
        "data": source.name,
        "model": options.model or _default_model(source),
        "optimizer": options.optimizer,
        "lr": options.lr,
        "ema": options.ema,
        "measured_on": source.held_out,
    }
