"""The weighted per-example gradients of one draw, added up part by part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from dpis.sampling import Draw


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

    Attributes:
        records: how many were added, in the order of the draw.
        parameters: as given.
    """

    def __init__(
        self,
        draw: Draw,
        parameters: Mapping[str, Tensor],
        acceptance_coins: Tensor | None = None,
    ) -> None:
        self.draw, self.acceptance_coins = draw, acceptance_coins
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
        for name, value in sums:
            known = self._sums.get(name)
            self._sums[name] = value if known is None else known.double().add_(value)

    def take(self) -> dict[str, Tensor]:
        """The sums by parameter name, in float32 or better. They are given away: nothing stays here."""
        sums, self._sums = self._sums, {}
        return {name: _sum_for(p, sums.pop(name, None)) for name, p in self.parameters.items()}


def precision_of(parameter: Tensor) -> torch.dtype:
    """What a parameter's gradient is released in: its own type, or float32 where that has fewer digits."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _sum_for(parameter: Tensor, found: Tensor | None) -> Tensor:
    least = precision_of(parameter)
    if found is None:
        return torch.zeros_like(parameter, dtype=least, requires_grad=False)
    return found.to(torch.promote_types(found.dtype, least))
