"""From the weighted sums of all ranks to one noisy update: every entry is summed, noised and scaled once.

The trainable entries lie one behind the other in the order of their names (`dpis.noise.layout`), where each has its
noise. This vector goes block by block: a block is cut into one slice for every rank, the slices of a rank are brought
to it from all others, it adds them up in the order of ranks, adds the noise of its own slice, and sends the result to
everyone. So all ranks hold the same bits, whatever their processors would have made of the sum, and each makes its
part of the noise alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpis.group import Group
from dpis.mechanism.gradient_sum import precision_of
from dpis.noise import add_noise, layout
from dpis.randomness import TILE, Normals

if TYPE_CHECKING:
    from dpis.gradients.sharded_sums import ShardedSums

BLOCK = 1 << 22
"""Entries that are under way at once."""

MOST_IN_FLOAT32 = 4096
"""Contributions of norm one that point the same way: float32 then rounds their sum by 2.4e-4 of one of them at most,
within the margin of rule 19. The sums of steps that expect more are sent in float64."""


@dataclass(frozen=True, eq=False)
class Noise:
    """What is added to the entries of an update: standard deviation, and where each entry's normal comes from."""

    std: float
    normals: Normals


def noisy_update(
    sums: dict[str, Tensor],
    parameters: Mapping[str, Tensor],
    noise: Noise | None,
    scale: float,
    group: Group,
    *,
    expected_records: float,
) -> dict[str, Tensor]:
    """``scale · (Σ over ranks of sums + noise)``.

    Args:
        sums: of this rank, by parameter name; they are given away, and emptied.
        parameters: by name, the same on every rank.
        noise: None: nothing is private.
        scale: after noise and rounding.
        group: all ranks call this at the same place.
        expected_records: of a step, over all ranks; public. It decides in which type sums are sent.

    Returns:
        By parameter name, in the parameter's type, or float32 where that has fewer digits.
    """
    if group.size == 1:
        noisy = sums if noise is None else add_noise(sums, noise.std, noise.normals)
        return {
            name: noisy.pop(name).mul_(scale).to(precision_of(parameter))
            for name, parameter in parameters.items()
        }
    begins = layout({name: parameter.numel() for name, parameter in parameters.items()})
    update = {name: _room_for(parameter, sums[name]) for name, parameter in parameters.items()}
    precise = expected_records > MOST_IN_FLOAT32
    parts = _Parts([(begins[n], sums.pop(n).reshape(-1), update[n].view(-1)) for n in sorted(sums)])
    for begin in range(0, parts.entries, BLOCK):
        block = slice(begin, min(begin + BLOCK, parts.entries))
        size = _slice_size(block.stop - begin, group.size)
        kind = torch.float64 if precise else parts.widest_result(block)
        sent = parts.read(block, group.size * size, kind).view(group.size, size)
        own = _added_up(group.exchanged(sent))
        first = begin + group.rank * size
        mine = own[: max(0, min(size, block.stop - first))]
        if noise is not None and len(mine):
            add_noise({"": mine}, noise.std, noise.normals, begins={"": first})
        own = own.mul_(scale).to(parts.widest_result(block))
        parts.write(block, group.collected(own).view(-1))
    return update


def noisy_slices(
    sums: dict[str, Tensor], sharded: ShardedSums, noise: Noise | None, scale: float
) -> dict[str, Tensor]:
    """The same of a sharded model: this rank noises its rows of the sums, which are those of all ranks already.

    Args:
        sums: by parameter name; they are given away, and emptied.
        sharded: how the model lies on the ranks.
        noise: None: nothing is private.
        scale: after noise and rounding.

    Returns:
        Sharded as the parameters are.
    """
    parameters = sharded.parameters
    begins = layout({name: parameter.numel() for name, parameter in parameters.items()})
    if noise is not None:
        sums = add_noise(sums, noise.std, noise.normals, sharded.begins(begins))
    slices = {n: sums.pop(n).mul_(scale).to(precision_of(p)) for n, p in parameters.items()}
    return dict(sharded.as_gradients(slices))


def noisy_statistic(label: str, value: Tensor, noise: Noise, group: Group) -> Tensor:
    """A value that all ranks hold, with noise, in float64: that of rank 0, since processors may round otherwise."""
    own = value.detach().to(torch.float64, copy=True)
    noisy = add_noise({label: own}, noise.std, noise.normals)[label]
    group.share(noisy)
    return noisy


def _room_for(parameter: Tensor, found: Tensor) -> Tensor:
    """The memory of the sum, which is read before it is written, if it has the type of the result."""
    kind = precision_of(parameter)
    if found.dtype == kind and found.is_contiguous():
        return found
    return torch.empty(found.shape, dtype=kind, device=found.device)


def _slice_size(entries: int, ranks: int) -> int:
    """Of every rank; whole tiles of noise where there are many of them, so that none is made twice."""
    even = -(-entries // ranks)
    return even if even < 16 * TILE else -(-even // TILE) * TILE


def _added_up(slices: Tensor) -> Tensor:
    """In float64, in the order of ranks."""
    total = slices[0].double()
    for other in slices[1:]:
        total += other
    return total


class _Parts:
    """Sums and results of all parameters, read and written by their places in one vector."""

    def __init__(self, parts: list[tuple[int, Tensor, Tensor]]) -> None:
        self._parts = parts
        self.entries = sum(len(values) for _, values, _ in parts)

    def read(self, block: slice, room: int, kind: torch.dtype) -> Tensor:
        """The sums of a block, and zeros behind them."""
        device = self._parts[0][1].device
        read = torch.zeros(room, dtype=kind, device=device)
        for there, values, _ in self._within(block):
            read[there].copy_(values)
        return read

    def write(self, block: slice, results: Tensor) -> None:
        """The results of a block."""
        for there, _, result in self._within(block):
            result.copy_(results[there])

    def widest_result(self, block: slice) -> torch.dtype:
        """The type that holds every result of a block."""
        kinds = [result.dtype for _, _, result in self._within(block)]
        return torch.float64 if torch.float64 in kinds else torch.float32

    def _within(self, block: slice) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for begin, values, result in self._parts:
            first, last = max(begin, block.start), min(begin + len(values), block.stop)
            if first < last:
                own = slice(first - begin, last - begin)
                there = slice(first - block.start, last - block.start)
                yield there, values[own], result[own]
