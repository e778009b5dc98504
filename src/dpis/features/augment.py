"""Images changed, each by itself: at random in every step, or in fixed views that slow features are computed of once.

Several views of a record count as one record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

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


# ── fixed views: changed by public rules without chance ──────────────────────────────────────────────

MOVES = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
"""Pixels down and to the right: none, then the nearest first."""


@dataclass(frozen=True)
class View:
    """An image moved by some pixels, what comes in being black, then perhaps mirrored.

    Attributes:
        down: pixels; negative: up.
        right: pixels; negative: to the left.
        mirrored: left for right.
    """

    down: int = 0
    right: int = 0
    mirrored: bool = False

    def __call__(self, images: Tensor) -> Tensor:
        """This view of every image ``[..., H, W]``, of each by itself."""
        moved = functional.pad(images, [self.right, -self.right, self.down, -self.down])
        return moved.flip(-1) if self.mirrored else moved


def other_views(augmentation: Augmentation, count: int) -> tuple[View, ...]:
    """With the image as it is ``count`` views, by these changes, the nearest first.

    >>> other_views(Augmentation("flip"), 2)
    (View(down=0, right=0, mirrored=True),)
    """
    names = augmentation.names.split(",")
    moves = MOVES if "shift" in names else MOVES[:1]
    mirrored = (False, True) if "flip" in names else (False,)
    views = [View(down, right, mirror) for (down, right), mirror in product(moves, mirrored)]
    if not 2 <= count <= len(views):
        raise InputError(
            f"--augment {augmentation.names} on scatter features needs --augmentations, from 2 to {len(views)}: "
            f"the image as it is and fixed views of it; found {count}"
        )
    return tuple(views[1:count])
