"""What a named dataset is once it is read: records and labels, to train on and to test with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
