"""From what was asked for to public settings: the model, the mechanism's config, defaults that suit model and data."""

from __future__ import annotations

from dpis.accounting import Release
from dpis.app.jobs.job_options import JobOptions
from dpis.app.jobs.sources import RecordSource
from dpis.app.jobs.systems import System
from dpis.errors import InputError
from dpis.features.channels import channel_releases
from dpis.mechanism import Config, make_plan
from dpis.models.kinds import KINDS, Inputs, ModelKind
from dpis.options import Method

DEFAULT_EMA = 0.95
ADAM_LEARNING_RATE = 0.002


def model_name(options: JobOptions, asked: System, source: RecordSource) -> str:
    """As asked for, or the first of the system's that fits the data, or one that suits the data."""
    if options.model is not None:
        asked.require_model(options.model)
        return options.model
    fitting = [name for name in asked.models if KINDS[name].inputs.of_text == source.of_texts]
    if asked.models and not fitting:
        raise InputError(f"{asked.name} has no model for {source.name}")
    return fitting[0] if fitting else _default_model(source)


def require_fit(options: JobOptions, kind: ModelKind, source: RecordSource) -> None:
    """Data, model and options that go together; what would have no effect is refused."""
    if kind.inputs.of_text != source.of_texts and (kind.inputs.of_text or kind.name in KINDS):
        what = "texts" if kind.inputs.of_text else "numbers"
        raise InputError(f"--model {kind.name} takes {what}, which {source.name} has not")
    scattered = kind.inputs is Inputs.SCATTERED
    if scattered and source.image_shape is None:
        raise InputError(f"--model {kind.name} needs images; for tables use linear or mlp")
    if options.normalise is not None and not scattered:
        raise InputError(f"--normalise is for scatter features: it has no effect on {kind.name}")
    if options.normalise == "channel" and source.user_level:
        raise InputError("--normalise channel is accounted per row: it does not protect users")
    if options.normalise == "channel" and not source.pixels_of_bytes:
        raise InputError(
            "--normalise channel is made for pixels from 0 to 255 (uint8): its public bounds would cut others off"
        )
    shape = source.image_shape
    images = scattered or kind.name.startswith("cnn") or options.augment is not None
    if images and shape is not None and len(shape) == 3 and shape[-1] <= 4 < shape[0]:
        raise InputError(
            f"images must be [channels, height, width], found {list(shape)}: move the last axis to the front"
        )
    if options.colours is not None and not scattered:
        raise InputError(f"--colours is for scatter features: it has no effect on {kind.name}")
    if options.colours is not None and (shape is None or len(shape) != 3 or shape[0] != 3):
        raise InputError(
            f"--colours needs images of red, green and blue, [3, height, width], found {list(shape or ())}"
        )
    if options.augment is not None and source.image_shape is None:
        raise InputError("--augment changes pixels: it has no effect on records without them")


def _default_model(source: RecordSource) -> str:
    if source.of_texts:
        return "bag-linear"
    shape = source.image_shape
    return "mlp" if shape is None or min(shape[-2:]) < 8 else "scatter-linear"


def make_config(options: JobOptions, kind: ModelKind, source: RecordSource) -> Config:
    """The mechanism's config, with defaults where nothing was said."""
    privacy = options.privacy
    return Config.settle(
        privacy,
        records=source.population,
        batch_size=options.batch_size,
        epochs=options.epochs,
        clip_norm=kind.clip_norm,
        releases=releases(options, source) if Method(privacy.method).private else (),
    )


def average_decay(options: JobOptions) -> float:
    """Of the moving average of the weights; 0: none."""
    return DEFAULT_EMA if options.ema is None else options.ema


def learning_rate(
    options: JobOptions, kind: ModelKind, config: Config, source: RecordSource
) -> float:
    """As asked for, or by the model, the shape of images and the noise of the first epoch, all public."""
    if options.lr is not None:
        return options.lr
    if options.optimizer == "adam":
        return ADAM_LEARNING_RATE
    plan = make_plan(config)
    return kind.learning_rate(
        plan.workload.equivalent_batch[0], plan.privacy.planned_noise[0], source.image_shape
    )


def releases(options: JobOptions, source: RecordSource) -> tuple[Release, ...]:
    """What is released, and paid for, before training."""
    by_channel = options.normalise == "channel"
    return (*source.releases, *(channel_releases(options.epsilon) if by_channel else ()))
