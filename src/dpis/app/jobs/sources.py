"""Where records come from: a data set by name, or a file of the user's own. Nothing is released here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpis.accounting import Release
from dpis.app.jobs.job_options import OF_FILES, SAMPLE, JobOptions, is_file, shell_knobs
from dpis.app.jobs.pipeline import Content
from dpis.datasets.named import ImageDataset, TextDataset, load
from dpis.datasets.sample import load_sample
from dpis.errors import InputError
from dpis.files.preprocessing import (
    ArrayPreprocessing,
    Preprocessing,
    TextPreprocessing,
)
from dpis.files.reading import RawRecords, encode_evaluation, open_records
from dpis.files.scaling import bounds_from_counts, sensitivity
from dpis.files.schema import Schema
from dpis.files.split import split_by_coins
from dpis.files.targets import ClassTarget
from dpis.mechanism import Mechanism
from dpis.mechanism.mechanism import APPLIED_NOISE
from dpis.randomness import Key
from dpis.stored_rows import taken

SCALE = "scale"
"""The ledger's label of released column bounds."""

SCALE_NOISE_MULTIPLIER = 10.0


@dataclass(frozen=True)
class Encoded:
    """Features and targets before the model's own pipeline.

    Attributes:
        features: float32, one row a record; or texts.
        targets: labels or scaled numbers.
        held_out_features: as ``features``, of records that take no part in training.
        held_out_targets: as ``targets``.
        preprocessing: what made them.
        user_ids: one a row of ``features``; None: every row is a record.
    """

    features: Content
    targets: Tensor
    held_out_features: Content
    held_out_targets: Tensor
    preprocessing: Preprocessing
    user_ids: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, kw_only=True)
class RecordSource:
    """Records that were read and held against what was declared.

    Attributes:
        name: for people: what the data is.
        held_out: for people: what the model is measured on.
        population: how many records (users) there are to train on. Private.
        encode: makes tensors. Without a mechanism a rehearsal: with made-up bounds, to find errors before anything is
            spent.
        preprocessing: what makes them, in a rehearsal.
        image_shape: of one image; None for tables and texts.
        user_level: whether a record is a user with all of their rows.
        releases: what must be released, and paid for, before the records can be encoded.
        look_through: refuses what cannot be used among records that were not read yet, and returns private signs that
            a declaration does not fit, for the operator's terminal only. Once is enough: not needed to go on.
    """

    name: str
    held_out: str
    population: int
    encode: Callable[[Mechanism | None], Encoded]
    preprocessing: Preprocessing
    image_shape: tuple[int, ...] | None
    user_level: bool = False
    releases: tuple[Release, ...] = ()
    look_through: Callable[[], tuple[str, ...]] = tuple

    @property
    def of_texts(self) -> bool:
        """Whether records are texts."""
        return isinstance(self.preprocessing, TextPreprocessing)

    @property
    def pixels_of_bytes(self) -> bool:
        """Whether records are images of whole numbers from 0 to 255."""
        made = self.preprocessing
        return isinstance(made, ArrayPreprocessing) and made.divide_by_255


def open_source(options: JobOptions, key: Key, *, anew: bool = False) -> RecordSource:
    """The records that the options name; ``anew``: read without what a cache keeps of them."""
    if is_file(options.dataset):
        return _file_source(options, key, anew=anew)
    for name, one in shell_knobs().items():
        if name in options.said and (one.group == OF_FILES or name == "eval_data"):
            raise InputError(
                f"{options.called(name)} is for a file of your own; {options.dataset} is a data set by name and needs "
                "none"
            )
    data = load_sample() if options.dataset == SAMPLE else load(options.dataset)
    return _named_source(data, options.eval_share, key)


# ── a public data set by name ────────────────────────────────────────────────────────────────────────


def _named_source(data: ImageDataset | TextDataset, share: float | None, key: Key) -> RecordSource:
    """Measured on its test set, or on a share of the training records, held out by coins."""
    target, labels = ClassTarget("label", data.classes), data.train_labels
    train: Content
    measured: Content
    preprocessing: Preprocessing
    if isinstance(data, TextDataset):
        shape, preprocessing = None, TextPreprocessing(target)
        train, measured = data.train_texts, data.test_texts
    else:
        shape = tuple(data.train_images.shape[1:])
        preprocessing = ArrayPreprocessing(shape, divide_by_255=True, target=target)
        train, measured = data.train_images, data.test_images
    rows, measured_labels = np.arange(len(labels)), data.test_labels
    held_out = f"the {len(measured_labels):,} test records of {data.name}"
    if share is not None:
        coins = key.stream("split", 0).uniforms(len(labels))
        rows, others = split_by_coins(len(labels), share, coins)
        measured, measured_labels = _rows(train, others), labels[torch.from_numpy(others)]
        held_out = f"about {share:.0%} of the training records of {data.name}"

    def encode(_: Mechanism | None) -> Encoded:
        """Pixels from 0 to 1, or texts."""
        return Encoded(
            features=_unit_pixels(_rows(train, rows)),
            targets=labels[torch.from_numpy(rows)],
            held_out_features=_unit_pixels(measured),
            held_out_targets=measured_labels,
            preprocessing=preprocessing,
        )

    return RecordSource(
        name=data.name,
        held_out=held_out,
        population=len(rows),
        encode=encode,
        preprocessing=preprocessing,
        image_shape=shape,
    )


def _rows(records: Content, rows: npt.NDArray[np.int64]) -> Content:
    if isinstance(records, tuple):
        return tuple(records[row] for row in rows)
    return taken(records, rows)


def _unit_pixels(records: Content) -> Content:
    return records.float() / 255 if isinstance(records, Tensor) else records


# ── a file of the user's own ─────────────────────────────────────────────────────────────────────────


def _file_source(options: JobOptions, key: Key, *, anew: bool) -> RecordSource:
    """Held-out records come from another file, or are chosen by coins."""
    raw = open_records(
        options.dataset,
        schema=_schema(options),
        release_scale=options.release_scale,
        delimiter=options.delimiter,
        anew=anew,
    )
    other_file = options.eval_data
    if other_file is not None and _same_file(options.dataset, other_file):
        raise InputError(
            "--eval-data is the training file: its accuracy would be a private value, published without noise. "
            "Name another file, or leave it out to hold records out by coins"
        )
    users, rows = raw.user_ids, np.arange(len(raw))
    others, held_out = np.arange(0), "your evaluation file"
    if other_file is None:
        share = 0.1 if options.eval_share is None else options.eval_share
        units = len(raw) if users is None else (int(users.max()) + 1 if len(raw) else 0)
        coins = key.stream("split", 0).uniforms(units)
        rows, others = split_by_coins(len(raw), share, coins, users)
        held_out = f"about {share:.0%} of your records, held out by coins"
    if not len(rows):
        raise InputError(f"{options.dataset} leaves no record to train on")

    def encode(mechanism: Mechanism | None) -> Encoded:
        """With bounds released where none were declared."""
        made = raw.encode(_bounds(raw, rows, mechanism))
        train, rest = torch.from_numpy(rows), torch.from_numpy(others)
        evaluated = taken(made.features, others), made.targets[rest]
        if other_file is not None:
            evaluated = encode_evaluation(
                other_file, made.preprocessing, delimiter=options.delimiter
            )
        return Encoded(
            taken(made.features, rows),
            made.targets[train],
            *evaluated,
            preprocessing=made.preprocessing,
            user_ids=None if users is None else users[rows],
        )

    return RecordSource(
        name="your file",
        held_out=held_out,
        population=len(rows) if users is None else len(np.unique(users[rows])),
        encode=encode,
        preprocessing=raw.preprocessing(_bounds(raw, rows, None)),
        image_shape=raw.image_shape,
        user_level=users is not None,
        releases=(Release(SCALE, SCALE_NOISE_MULTIPLIER),) if raw.columns_to_release else (),
        look_through=lambda: raw.private_notes,
    )


def _bounds(
    raw: RawRecords, rows: npt.NDArray[np.int64], mechanism: Mechanism | None
) -> list[tuple[float, float]]:
    columns = len(raw.columns_to_release)
    if mechanism is None or not columns:
        return [(-1.0, 1.0)] * columns
    counts, reach = raw.bucket_counts(rows), sensitivity(columns)
    if mechanism.plan.claim is None:  # sgd promises nothing, so it needs no noise
        return bounds_from_counts(counts, 0.0)
    noisy = mechanism.release(SCALE, counts, reach)
    return bounds_from_counts(noisy, APPLIED_NOISE * SCALE_NOISE_MULTIPLIER * reach)


def _same_file(a: str, b: str) -> bool:
    return Path(a).exists() and Path(b).exists() and Path(a).samefile(b)


def _schema(options: JobOptions) -> Schema:
    flags = Schema.from_flags(
        target=options.target,
        bounds=options.bounds,
        categories=options.categories,
        classes=options.classes,
        drop=options.drop,
        user_column=options.user_column,
    )
    return flags if options.schema is None else Schema.from_file(options.schema).updated(flags)
