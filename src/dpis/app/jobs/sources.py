"""Where records come from: a data set by name, or a file of the user's own. Nothing is released here."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpis.accounting import Release
from dpis.app.jobs.job_options import SAMPLE, JobOptions, is_file
from dpis.app.jobs.pipeline import Content
from dpis.datasets.named import ImageDataset, TextDataset, load
from dpis.datasets.sample import load_sample
from dpis.errors import InputError
from dpis.files.preprocessing import (
    ArrayPreprocessing,
    EncodedRecords,
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

NamedDataset = ImageDataset | TextDataset

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
        public_by_confirmation: what the user said is public although it was read from the data.
    """

    features: Content
    targets: Tensor
    held_out_features: Content
    held_out_targets: Tensor
    preprocessing: Preprocessing
    user_ids: npt.NDArray[np.int64] | None = None
    public_by_confirmation: tuple[str, ...] = ()


class RecordSource(ABC):
    """Records that were read and held against what was declared."""

    name: str
    """For people: what the data is."""

    releases: tuple[Release, ...] = ()
    """What must be released, and paid for, before the records can be encoded."""

    held_out: str
    """For people: what the model is measured on."""

    @property
    @abstractmethod
    def population(self) -> int:
        """How many records (users) there are to train on. Private."""

    @property
    def user_level(self) -> bool:
        """Whether a record is a user with all of their rows."""
        return False

    @property
    @abstractmethod
    def image_shape(self) -> tuple[int, ...] | None:
        """The shape of one image; None for tables."""

    @property
    def of_texts(self) -> bool:
        """Whether records are texts."""
        return False

    @property
    def pixels_of_bytes(self) -> bool:
        """Whether records are images of whole numbers from 0 to 255."""
        return False

    @abstractmethod
    def encode(self, mechanism: Mechanism | None) -> Encoded:
        """Tensors. Without a mechanism a rehearsal: with made-up bounds, to find errors before anything is spent."""

    @property
    def public_by_confirmation(self) -> tuple[str, ...]:
        """What the user said is public although it was read from the data."""
        return ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Private signs that a declaration does not fit: for the operator's terminal only."""
        return ()


class NamedSource(RecordSource):
    """A public data set by name. Measured on its test set, or on training records held out by coins."""

    def __init__(self, data: NamedDataset, share: float | None, key: Key) -> None:
        self._data = data
        self.name = data.name
        labels = data.train_labels
        self._train, self._held_out = np.arange(len(labels)), None
        self.held_out = f"the {len(data.test_labels):,} test records of {data.name}"
        if share is not None:
            coins = key.stream("split", 0).uniforms(len(labels))
            self._train, self._held_out = split_by_coins(len(labels), share, coins)
            self.held_out = f"about {share:.0%} of the training records of {data.name}"

    @property
    def population(self) -> int:
        """The records it trains on."""
        return len(self._train)

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """Height and width, with channels before them if there are any."""
        data = self._data
        return None if isinstance(data, TextDataset) else tuple(data.train_images.shape[1:])

    @property
    def of_texts(self) -> bool:
        """By the data set."""
        return isinstance(self._data, TextDataset)

    @property
    def pixels_of_bytes(self) -> bool:
        """All images by name are."""
        return not self.of_texts

    def encode(self, mechanism: Mechanism | None) -> Encoded:
        """Pixels from 0 to 1, or texts."""
        data = self._data
        target = ClassTarget("label", data.classes)
        if isinstance(data, TextDataset):
            preprocessing: Preprocessing = TextPreprocessing(target)
            train: Content = data.train_texts
            test: Content = data.test_texts
        else:
            shape = tuple(data.train_images.shape[1:])
            preprocessing = ArrayPreprocessing(shape, divide_by_255=True, target=target)
            train, test = data.train_images, data.test_images
        measured, measured_targets = test, data.test_labels
        if self._held_out is not None:
            measured = _rows(train, self._held_out)
            measured_targets = data.train_labels[torch.from_numpy(self._held_out)]
        return Encoded(
            features=_unit_pixels(_rows(train, self._train)),
            targets=data.train_labels[torch.from_numpy(self._train)],
            held_out_features=_unit_pixels(measured),
            held_out_targets=measured_targets,
            preprocessing=preprocessing,
        )


def _rows(records: Content, rows: npt.NDArray[np.int64]) -> Content:
    if isinstance(records, Tensor):
        return records[torch.from_numpy(rows)]
    return tuple(records[row] for row in rows)


def _unit_pixels(records: Content) -> Content:
    return records.float() / 255 if isinstance(records, Tensor) else records


class FileSource(RecordSource):
    """A file of the user's own; held-out records come from another file, or are chosen by coins."""

    name = "your file"

    def __init__(self, options: JobOptions, key: Key) -> None:
        self._options = options
        self._eval_share = 0.1 if options.eval_share is None else options.eval_share
        self._raw: RawRecords = open_records(
            options.dataset,
            schema=_schema(options),
            release_scale=options.release_scale,
            delimiter=options.delimiter,
        )
        if options.eval_data is not None and _same_file(options.dataset, options.eval_data):
            raise InputError(
                "--eval-data is the training file: its accuracy would be a private value, published without noise. "
                "Name another file, or leave it out to hold records out by coins"
            )
        self._train, self._held_out = self._split(key)
        if not len(self._train):
            raise InputError(f"{options.dataset} leaves no record to train on")
        columns = len(self._raw.columns_to_release)
        if columns:
            self.releases = (Release(SCALE, SCALE_NOISE_MULTIPLIER),)
        self.held_out = (
            f"about {self._eval_share:.0%} of your records, held out by coins"
            if options.eval_data is None
            else "your evaluation file"
        )

    def _split(self, key: Key) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        rows, users = len(self._raw), self._raw.user_ids
        if self._options.eval_data is not None:
            return np.arange(rows), np.arange(0)
        units = rows if users is None else (int(users.max()) + 1 if rows else 0)
        coins = key.stream("split", 0).uniforms(units)
        return split_by_coins(rows, self._eval_share, coins, users)

    @property
    def population(self) -> int:
        """Rows, or distinct users, that are trained on."""
        users = self._raw.user_ids
        return len(self._train) if users is None else len(np.unique(users[self._train]))

    @property
    def user_level(self) -> bool:
        """By the user column that was named."""
        return self._raw.user_ids is not None

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """The shape of a record of arrays, if it can be an image."""
        return self._raw.image_shape

    @property
    def pixels_of_bytes(self) -> bool:
        """As the array's type says."""
        preprocessing = self._rehearsed.preprocessing
        return isinstance(preprocessing, ArrayPreprocessing) and preprocessing.divide_by_255

    @property
    def public_by_confirmation(self) -> tuple[str, ...]:
        """Categories and classes read by `from-data`."""
        return self._rehearsed.public_by_confirmation

    @functools.cached_property
    def _rehearsed(self) -> EncodedRecords:
        """Encoded with made-up bounds."""
        return self._raw.encode([(-1.0, 1.0)] * len(self._raw.columns_to_release))

    @property
    def notes(self) -> tuple[str, ...]:
        """Signs that a declaration does not fit the data."""
        return self._raw.private_notes

    def encode(self, mechanism: Mechanism | None) -> Encoded:
        """Tensors, with bounds released where none were declared."""
        made = self._raw.encode(self._bounds(mechanism))
        train, held_out = torch.from_numpy(self._train), torch.from_numpy(self._held_out)
        if self._options.eval_data is not None:
            other = encode_evaluation(
                self._options.eval_data, made.preprocessing, delimiter=self._options.delimiter
            )
            evaluated = other.features, other.targets
        else:
            evaluated = made.features[held_out], made.targets[held_out]
        return Encoded(
            features=made.features[train],
            targets=made.targets[train],
            held_out_features=evaluated[0],
            held_out_targets=evaluated[1],
            preprocessing=made.preprocessing,
            user_ids=None if made.user_ids is None else made.user_ids[self._train],
            public_by_confirmation=made.public_by_confirmation,
        )

    def _bounds(self, mechanism: Mechanism | None) -> list[tuple[float, float]]:
        columns = len(self._raw.columns_to_release)
        if mechanism is None or not columns:
            return [(-1.0, 1.0)] * columns
        reach = sensitivity(columns)
        if mechanism.plan.claim is None:  # sgd promises nothing, so it needs no noise
            return bounds_from_counts(self._raw.bucket_counts(self._train), 0.0)
        noisy = mechanism.release(SCALE, self._raw.bucket_counts(self._train), reach)
        return bounds_from_counts(noisy, APPLIED_NOISE * SCALE_NOISE_MULTIPLIER * reach)


def _same_file(a: str, b: str) -> bool:
    return Path(a).exists() and Path(b).exists() and Path(a).samefile(b)


def open_source(options: JobOptions, key: Key) -> RecordSource:
    """The records that the options name."""
    if is_file(options.dataset):
        return FileSource(options, key)
    refused = {
        "--target": options.target,
        "--schema": options.schema,
        "--bounds": options.bounds,
        "--categories": options.categories,
        "--classes": options.classes,
        "--drop": options.drop,
        "--release-scale": options.release_scale,
        "--eval-data": options.eval_data,
        "--user-column": options.user_column,
        "--delimiter": options.delimiter,
    }
    for flag, value in refused.items():
        if value:
            raise InputError(
                f"{flag} is for a file of your own; {options.dataset} is a data set by name and needs none"
            )
    data = load_sample() if options.dataset == SAMPLE else load(options.dataset)
    return NamedSource(data, options.eval_share, key)


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
