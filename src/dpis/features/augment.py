"""Images changed at random, each by itself: several views of a record count as one record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dpis.batches import Batch
from dpis.errors import InputError

FARTHEST = 2
"""Pixels by which an image is moved at most, in either direction."""

Change = Callable[[Tensor, torch.Generator], Tensor]


def shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Every image ``[N, C, H, W]`` moved by up to `FARTHEST` pixels either way; what comes in is black."""
    height, width = images.shape[-2:]
    padded = functional.pad(images, [FARTHEST] * 4)
    device = images.device
    places = torch.randint(2 * FARTHEST + 1, (2, len(images)), generator=generator, device=device)
    rows = places[0, :, None] + torch.arange(height, device=device)
    columns = places[1, :, None] + torch.arange(width, device=device)
    record = torch.arange(len(images), device=device)[:, None, None]
    moved = padded.movedim(1, -1)[record, rows[:, :, None], columns[:, None, :]]
    return moved.movedim(-1, 1).contiguous()


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Every image mirrored, left for right, or not: by its own coin."""
    mirrored = torch.rand(len(images), generator=generator, device=images.device) < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


CHANGES: dict[str, Change] = {"shift": shift, "flip": flip}


@dataclass(frozen=True)
class Augmentation:
    """Changes by name, one after the other, of a batch's images; what else is in the batch stays.

    Attributes:
        names: such as ``shift,flip``.
    """

    names: str

    def __post_init__(self) -> None:
        if not all(name in CHANGES for name in self.names.split(",")):
            raise InputError(
                f"--augment must name some of {', '.join(CHANGES)}, with commas between; found {self.names!r}"
            )

    def __call__(self, batch: Batch, generator: torch.Generator) -> Batch:
        """A batch ``(images, ...)`` with its images changed."""
        images, *rest = batch
        for name in self.names.split(","):
            images = CHANGES[name](images, generator)
        return (images, *rest)
