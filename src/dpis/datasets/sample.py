"""A piece of Fashion-MNIST that comes with the package, to try things without any download."""

from __future__ import annotations

import hashlib
import lzma
from importlib.resources import files

import numpy as np
import torch

from dpis.datasets.catalogue import FASHION
from dpis.datasets.named import ImageDataset
from dpis.errors import InputError

FILE = "fmnist_sample.xz"
TRAIN, TEST, SIDE = 10_000, 2_000, 28
SHA256 = "59f1bb0a2135ef16d5675e3a09f7156750cc5580992405b97764e64eb04d6b2a"
"""Of the unpacked content: train images, test images, train labels, test labels, one byte an entry."""


def load_sample() -> ImageDataset:
    """The first 10,000 training and the first 2,000 test images of Fashion-MNIST, in their order.

    MIT licence, the text of which lies beside the file. ``tools/make_sample.py`` made it.
    """
    try:
        content = lzma.decompress(files("dpis.datasets").joinpath(FILE).read_bytes())
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise InputError(
            f"the sample in the package is damaged ({error}): install dpis again"
        ) from error
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise InputError("the sample in the package is damaged (checksum): install dpis again")
    images, labels = np.split(
        np.frombuffer(bytearray(content), np.uint8), [(TRAIN + TEST) * SIDE * SIDE]
    )
    train_images, test_images = np.split(images.reshape(-1, SIDE, SIDE), [TRAIN])
    train_labels, test_labels = np.split(labels, [TRAIN])
    return ImageDataset(
        name="fmnist-sample",
        train_images=torch.from_numpy(train_images),
        train_labels=torch.from_numpy(train_labels).long(),
        test_images=torch.from_numpy(test_images),
        test_labels=torch.from_numpy(test_labels).long(),
        classes=FASHION.classes,
        licence=FASHION.licence,
    )
