"""Public datasets by name, as tensors and texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch

from dpis.datasets.catalogue import FASHION_CLASSES, FASHION_LICENCE, PublicSource
from dpis.datasets.cifar import parse_batch
from dpis.datasets.dataset import ImageDataset, TextDataset
from dpis.datasets.idx import parse_idx
from dpis.datasets.lookup import Location, available, find_source, read_files
from dpis.datasets.reviews import parse_reviews
from dpis.errors import InputError

__all__ = [
    "FASHION_CLASSES",
    "FASHION_LICENCE",
    "ImageDataset",
    "Location",
    "TextDataset",
    "available",
    "load",
]


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
] = MappingProxyType(
    {"mnist": build_idx, "fmnist": build_idx, "cifar10": build_cifar, "imdb": build_reviews}
)
