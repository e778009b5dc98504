"""Public datasets by name, as tensors and texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from dpis.data.catalogue import FASHION_CLASSES, FASHION_LICENCE, Source
from dpis.data.datasets import ImageDataset, TextDataset
from dpis.data.idx import parse_idx
from dpis.data.lookup import Location, available, find_source, read_files
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
    """The dataset called ``name``: ``mnist``, ``fmnist`` (also ``fashion-mnist``), ``imdb``.

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


def build_idx(source: Source, contents: Mapping[str, bytes]) -> ImageDataset:
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


def build_reviews(source: Source, contents: Mapping[str, bytes]) -> TextDataset:
    """Reviews, one JSON object a line, in the order of the file: sorted by split, then label."""
    records = [json.loads(line) for line in contents["reviews"].splitlines()]
    parts = {
        split: [record for record in records if record["split"] == split]
        for split in ("train", "test")
    }
    return TextDataset(
        name=source.name,
        train_texts=tuple(record["text"] for record in parts["train"]),
        train_labels=torch.tensor([record["label"] for record in parts["train"]]),
        test_texts=tuple(record["text"] for record in parts["test"]),
        test_labels=torch.tensor([record["label"] for record in parts["test"]]),
        classes=source.classes,
        licence=source.licence,
    )


BUILDERS: Mapping[str, Callable[[Source, Mapping[str, bytes]], ImageDataset | TextDataset]] = (
    MappingProxyType({"mnist": build_idx, "fmnist": build_idx, "imdb": build_reviews})
)
