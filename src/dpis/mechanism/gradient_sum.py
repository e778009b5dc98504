"""The weighted per-example gradients of one draw, added up part by part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dpis.sampling import Draw

if TYPE_CHECKING:
    from dpis.gradients.sharded_sums import (
        ShardedSums,  # which imports what shards, for half a second
    )


class Weighable(Protocol):
    """Gradients of some records, as `dpis.gradients.Tape` has them: all that a mechanism asks of them."""

    def norms(self) -> Tensor:
        """Of every record."""
        ...

    def weighted_sums(self, weights: Tensor) -> Iterable[tuple[str, Tensor]]:
        """``Σ_i weights_i grad_i``, parameter by parameter, each in memory of its own."""
        ...


class GradientSum:
    """The weighted per-example gradients of one draw. Private until it is released.

    A single part is kept as it came, in float32 or better; several are added up in float64. Where nothing was added it
    is zero: an empty batch is a normal step, pure noise.

    Args:
        draw: whose gradients these are.
        parameters: the trainable parameters by name.
        acceptance_coins: one uniform number for every drawn record, where contributions are accepted or rejected.
        sharded: where the model is: each part is added up over all ranks at once, and this rank keeps its rows.

    Attributes:
        records: how many were added, in the order of the draw.
        parameters: as given.
    """

    def __init__(
        self,
        draw: Draw,
        parameters: Mapping[str, Tensor],
        acceptance_coins: Tensor | None = None,
        sharded: ShardedSums | None = None,
    ) -> None:
        self.draw, self.acceptance_coins, self.sharded = draw, acceptance_coins, sharded
        self.records = 0
        self.parameters = parameters
        self._sums: dict[str, Tensor] = {}
        self._norms = [torch.zeros(0, dtype=torch.float64)]

    @property
    def norms(self) -> Tensor:
        """Of all records that were added."""
        return torch.cat(self._norms)

    @property
    def entries(self) -> int:
        """How many numbers the sum has."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    def add(self, norms: Tensor, sums: Iterable[tuple[str, Tensor]]) -> None:
        """The next records of the draw.

        Args:
            norms: of their gradients.
            sums: the weighted sum of these, parameter by parameter, each in memory of its own that is given away.
        """
        self._norms.append(norms.cpu())
        self.records += len(norms)
        for name, value in sums if self.sharded is None else self.sharded.local(sums):
            known = self._sums.get(name)
            self._sums[name] = value if known is None else known.double().add_(value)

    def take(self) -> dict[str, Tensor]:
        """The sums by parameter name, in float32 or better. They are given away: nothing stays here."""
        sums, self._sums = self._sums, {}
        return {name: self._sum_for(name, sums.pop(name, None)) for name in self.parameters}

    def _sum_for(self, name: str, found: Tensor | None) -> Tensor:
        parameter = self.parameters[name]
        least = precision_of(parameter)
        if found is not None:
            return found.to(torch.promote_types(found.dtype, least))
        shape = parameter.shape if self.sharded is None else self.sharded.slices[name].shape
        return torch.zeros(shape, dtype=least, device=parameter.device)


def precision_of(parameter: Tensor) -> torch.dtype:
    """What a parameter's gradient is released in: its own type, or float32 where that has fewer digits."""
    return torch.promote_types(parameter.dtype, torch.float32)
