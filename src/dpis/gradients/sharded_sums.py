"""Sums over the ranks of a sharded model: every rank gets its own slice of each parameter, and no more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from dpis.errors import InputError
from dpis.group import Group


@dataclass(frozen=True)
class Slice:
    """The rows of a parameter that one rank holds: one piece of its entries, in the order of rows.

    Attributes:
        begin: how many entries of the whole parameter stand before the first.
        shape: that of the local tensor.
        sizes: how many entries each rank has.
    """

    begin: int
    shape: torch.Size
    sizes: tuple[int, ...]

    @staticmethod
    def of(name: str, parameter: Tensor, rank: int) -> Slice:
        """That of a parameter sharded by rows; uneven and empty slices are as they come.

        Raises:
            InputError: if it is sharded in any other way.
        """
        parameter = require_rows(name, parameter)
        rows, ranks = parameter.shape[0], parameter.device_mesh.size()
        most = -(-rows // ranks)
        ends = [min(rows, most * (r + 1)) for r in range(ranks)]
        in_a_row = parameter.shape[1:].numel()
        sizes = tuple(
            (end - start) * in_a_row for start, end in zip([0, *ends[:-1]], ends, strict=True)
        )
        own = Slice(list(accumulate(sizes, initial=0))[rank], parameter.to_local().shape, sizes)
        if own.shape.numel() != sizes[rank]:
            raise InputError(
                _NOT_SHARDED.format(name, f"of {own.shape.numel()} entries here, not {sizes[rank]}")
            )
        return own

    def summed(self, ranks: Group, full: Tensor, dtype: torch.dtype) -> Tensor:
        """This slice of the sum over all ranks, in float64, added up in their order.

        Args:
            ranks: all of them call this, for the same parameter.
            full: this rank's sum, of the parameter's size.
            dtype: what it is sent in, float32 or better; the same on all ranks.
        """
        flat, largest = full.to(dtype).contiguous().view(-1), self.sizes[0]
        if largest * ranks.size != len(flat):  # the last ranks have fewer rows
            flat = functional.pad(flat, (0, largest * ranks.size - len(flat)))
        received = ranks.exchanged(flat.view(ranks.size, largest))[:, : self.shape.numel()]
        return received.sum(0, dtype=torch.float64).view(self.shape)


@dataclass(frozen=True, eq=False)
class ShardedSums:
    """From one full-size sum at a time to this rank's slices of the sums over all ranks.

    Attributes:
        ranks: those that hold the slices.
        parameters: the sharded parameters by name.
        slices: by name, what this rank holds of each.
    """

    ranks: Group
    parameters: Mapping[str, Tensor]
    slices: Mapping[str, Slice]

    @staticmethod
    def of(ranks: Group, parameters: Mapping[str, Tensor]) -> ShardedSums:
        """For the parameters of one model."""
        slices = {name: Slice.of(name, p, ranks.rank) for name, p in parameters.items()}
        return ShardedSums(ranks, parameters, slices)

    def local(self, sums: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The slices of these sums over all ranks, in float64, parameter by parameter.

        Args:
            sums: as `Tape.weighted_sums` yields them; every rank has the same names in the same order.
        """
        for name, full in sums:
            parameter = self.parameters[name]
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            yield name, self.slices[name].summed(self.ranks, full, dtype).to(parameter.device)

    def begins(self, layout: Mapping[str, int]) -> dict[str, int]:
        """Where in a step's noise the slices begin.

        Args:
            layout: where the whole parameters begin (`dpis.noise.layout`).
        """
        return {name: layout[name] + own.begin for name, own in self.slices.items()}

    def as_gradients(self, local: Mapping[str, Tensor]) -> dict[str, DTensor]:
        """What optimizers want: the slices in place of the whole gradients, sharded as the parameters are."""
        return {name: _like(self.parameters[name], value) for name, value in local.items()}


def require_rows(name: str, parameter: Tensor) -> DTensor:
    """A parameter that is sharded by its rows, and in no other way.

    Raises:
        InputError: if it is not.
    """
    if not isinstance(parameter, DTensor):
        raise InputError(_NOT_SHARDED.format(name, "not sharded at all"))
    if parameter.placements != (Shard(0),):
        found = ", ".join(map(str, parameter.placements))
        raise InputError(_NOT_SHARDED.format(name, f"placed by ({found})"))
    return parameter


def _like(parameter: Tensor, local: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


_NOT_SHARDED = (
    "Every trainable parameter of a sharded model must be sharded by its rows over one group of ranks, as fully_shard "
    "does by default, but {} is {}. The sums of other layouts are not added up yet, so the noise would be wrong. Use "
    "fully_shard with a one-dimensional mesh and neither shard_placement_fn nor tensor parallelism, and freeze what it "
    "ignores."
)
