"""Public datasets by name, as tensors and texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpis.datasets.catalogue import PublicSource
from dpis.datasets.formats import parse_batch, parse_idx, parse_reviews
from dpis.datasets.locate import find_source, read_files
from dpis.errors import InputError


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Labelled images, split into those to train on and those to test with.

    Attributes:
        name: What it is called here.
        train_images: uint8, ``[N, H, W]`` or ``[N, C, H, W]``, 0 to 255.
        train_labels: int64, ``[N]``: indices into ``classes``.
        test_images: As ``train_images``.
        test_labels: As ``train_labels``.
        classes: What the labels mean. Public knowledge, not counted from the data.
        licence: Of the data.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    licence: str

    def __post_init__(self) -> None:
        parts = (
            ("train", self.train_images, self.train_labels),
            ("test", self.test_images, self.test_labels),
        )
        for part, images, labels in parts:
            if images.dtype != torch.uint8 or images.ndim not in (3, 4):
                raise InputError(
                    f"{part} images must be uint8, [N, H, W] or [N, C, H, W];"
                    f" found {images.dtype} of shape {list(images.shape)}"
                )
            _check_labels(part, labels, len(images), "images", self.classes)
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise InputError("train and test images must have the same shape")


@dataclass(frozen=True, eq=False)
class TextDataset:
    """Labelled texts, split into those to train on and those to test with.

    Records stand in the order of their file, which may be sorted by label. Training draws records by
    independent coins, so their order has no part in it; whoever slices batches must shuffle first.

    Attributes:
        name: What it is called here.
        train_texts: As they were written.
        train_labels: int64, ``[N]``: indices into ``classes``.
        test_texts: As ``train_texts``.
        test_labels: As ``train_labels``.
        classes: What the labels mean. Public knowledge, not counted from the data.
        licence: Of the data.
    """

    name: str
    train_texts: tuple[str, ...]
    train_labels: Tensor
    test_texts: tuple[str, ...]
    test_labels: Tensor
    classes: tuple[str, ...]
    licence: str

    def __post_init__(self) -> None:
        _check_labels("train", self.train_labels, len(self.train_texts), "texts", self.classes)
        _check_labels("test", self.test_labels, len(self.test_texts), "texts", self.classes)


def _check_labels(
    part: str, labels: Tensor, count: int, of_what: str, classes: tuple[str, ...]
) -> None:
    if labels.dtype != torch.int64 or labels.shape != (count,):
        raise InputError(
            f"{part} labels must be int64, one for each of {count} {of_what};"
            f" found {labels.dtype} of shape {list(labels.shape)}"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise InputError(f"{part} labels must be from 0 to {len(classes) - 1}")


def load(name: str) -> ImageDataset | TextDataset:
    """The dataset called ``name``: ``mnist``, ``fmnist`` (also ``fashion-mnist``), ``cifar10``, ``imdb``.

    Looked for in ``$DPIS_DATA/<folder>``, ``/usr/share/datasets/<folder>`` and ``data/<folder>`` of the user's cache;
    the first folder that has all its files is taken, and every file is checked.

    Raises:
        InputError: The name is unknown, the files are nowhere, or one of them is not the published one.
    """
    source = find_source(name)
    build = BUILDERS.get(source.name)
    if build is None:
        raise InputError(f"{source.name} holds no labelled records to train on")
    return build(source, read_files(source))


def build_idx(source: PublicSource, contents: Mapping[str, bytes]) -> ImageDataset:
    """Images and labels of the MNIST family."""
    arrays = {
        role: torch.from_numpy(parse_idx(content, source.files[role].name).copy())
        for role, content in contents.items()
    }
    return ImageDataset(
        name=source.name,
        train_images=arrays["train_images"],
        train_labels=arrays["train_labels"].long(),
        test_images=arrays["test_images"],
        test_labels=arrays["test_labels"].long(),
        classes=source.classes,
        licence=source.licence,
    )


def build_cifar(source: PublicSource, contents: Mapping[str, bytes]) -> ImageDataset:
    """Five files to train on, in their order, and one to test with."""
    batches = {
        role: parse_batch(content, source.files[role].name) for role, content in contents.items()
    }
    test_images, test_labels = batches.pop("test_batch")
    images, labels = zip(*batches.values(), strict=True)
    return ImageDataset(
        name=source.name,
        train_images=torch.from_numpy(np.concatenate(images)),
        train_labels=torch.from_numpy(np.concatenate(labels)).long(),
        test_images=torch.from_numpy(test_images.copy()),
        test_labels=torch.from_numpy(test_labels.copy()).long(),
        classes=source.classes,
        licence=source.licence,
    )


def build_reviews(source: PublicSource, contents: Mapping[str, bytes]) -> TextDataset:
    """Reviews in the order of their file: sorted by split, then label."""
    reviews = parse_reviews(contents["reviews"], source.files["reviews"].name)
    train, test = ([r for r in reviews if r.split == split] for split in ("train", "test"))
    return TextDataset(
        name=source.name,
        train_texts=tuple(r.text for r in train),
        train_labels=torch.tensor([r.label for r in train]),
        test_texts=tuple(r.text for r in test),
        test_labels=torch.tensor([r.label for r in test]),
        classes=source.classes,
        licence=source.licence,
    )


BUILDERS: Mapping[
    str, Callable[[PublicSource, Mapping[str, bytes]], ImageDataset | TextDataset]
] = {"mnist": build_idx, "fmnist": build_idx, "cifar10": build_cifar, "imdb": build_reviews}
