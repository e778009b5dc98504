"""Parts of a parameter that gradients arrived at: joined where they overlap, so that cross terms count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from torch import Tensor

from dpis.gradients.factors import Dense, Factor, Outer
from dpis.gradients.factors.factor import Kept, widest
from dpis.gradients.factors.outer import smallest
from dpis.gradients.factors.sum import join


@dataclass(frozen=True)
class Place:
    """Which elements of a parameter a view of it shows, in the terms of its memory."""

    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(view: Tensor, parameter: Tensor) -> Place:
        """The place of a view (or of the parameter itself)."""
        offset = int(view.storage_offset() - parameter.storage_offset())
        return Place(offset, view.size(), view.stride())

    def look(self, tensor: Tensor) -> Tensor:
        """This part of a tensor that is laid out as the parameter is."""
        return tensor.as_strided(self.size, self.stride, self.offset)

    def transpose(self) -> Place:
        """The same elements, the two dimensions exchanged."""
        return Place(self.offset, torch.Size(self.size[::-1]), self.stride[::-1])

    @property
    def repeats(self) -> bool:
        """Whether an element shows more than once, as after ``expand``."""
        return any(s == 0 and n > 1 for s, n in zip(self.stride, self.size, strict=True))


@dataclass(frozen=True)
class Part:
    """The gradients of all records with respect to one part of a parameter."""

    place: Place
    factor: Factor

    def select(self, kept: Kept) -> Part:
        """The records with these indices alone."""
        return Part(self.place, self.factor.select(kept))


def without_overlap(parts: Iterable[Part], parameter: Tensor) -> tuple[Part, ...]:
    """Parts that do not overlap, so that their squared norms add up.

    Uses of the same elements are joined. Views that overlap in part are spread out over the whole
    parameter first.
    """
    joined: dict[Place, Factor] = {}
    for part in map(_upright, parts):
        known = joined.get(part.place)
        joined[part.place] = part.factor if known is None else join(known, part.factor)
    separate = tuple(
        Part(place, smallest(factor) if isinstance(factor, Outer) else factor)
        for place, factor in joined.items()
    )
    places = tuple(joined)
    alone = len(places) == 1 and not places[0].repeats
    if not places or alone or _disjoint(places, parameter.numel()):
        return separate
    whole = reduce(torch.add, (_spread(part, parameter) for part in separate))
    return (Part(Place.of(parameter, parameter), Dense(whole)),)


def put_together(parts: Sequence[Part], sums: Sequence[Tensor], parameter: Tensor) -> Tensor:
    """The sum over a parameter, from those over parts of it that do not overlap."""
    if not parts:
        return torch.zeros_like(parameter)
    if len(parts) == 1 and parts[0].place == Place.of(parameter, parameter):
        return sums[0].view(parameter.shape)
    total = torch.zeros_like(parameter, dtype=widest(sums))
    for part, part_sum in zip(parts, sums, strict=True):
        part.place.look(total).copy_(part_sum)
    return total


def _upright(part: Part) -> Part:
    """A weight used as its transpose is the weight, the outer products turned round."""
    if isinstance(part.factor, Outer) and part.place.stride[0] < part.place.stride[1]:
        return Part(part.place.transpose(), part.factor.transpose())
    return part


@lru_cache(maxsize=1024)
def _disjoint(places: tuple[Place, ...], numel: int) -> bool:
    """Whether no element shows twice."""
    shown = torch.zeros(numel, dtype=torch.int32)
    for place in places:
        if place.repeats:
            return False
        place.look(shown).add_(1)
    return int(shown.max()) <= 1


def _spread(part: Part, parameter: Tensor) -> Tensor:
    """Explicit gradients of the whole parameter, zero outside the part."""
    gradients = part.factor.explicit()
    flat = parameter.new_zeros(len(gradients), parameter.numel(), dtype=gradients.dtype)
    index = part.place.look(torch.arange(parameter.numel(), device=parameter.device)).reshape(-1)
    flat.index_add_(1, index, gradients.reshape(len(flat), -1))
    sizes, strides = (len(flat), *parameter.shape), (parameter.numel(), *parameter.stride())
    return flat.as_strided(sizes, strides)  # from the order of memory, record by record
