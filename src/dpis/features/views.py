"""Fixed views of images: changed by public rules without chance, so that slow features are computed once for each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from torch import Tensor
from torch.nn import functional

from dpis.errors import InputError
from dpis.features.augment import Augmentation

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
