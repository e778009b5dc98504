"""The weighted per-example gradients of one draw, added up part by part."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dpis.sampling import Draw


class GradientSum:
    """The weighted per-example gradients of one draw, added up in float64. Private until it is released.

    It begins at zero for every parameter: an empty batch is a normal step, pure noise.

    Args:
        draw: whose gradients these are.
        parameters: the trainable parameters by name.
        acceptance_coins: one uniform number for every drawn record, where contributions are accepted or rejected.

    Attributes:
        records: how many were added, in the order of the draw.
        sums: by parameter name.
    """

    def __init__(
        self,
        draw: Draw,
        parameters: Mapping[str, Tensor],
        acceptance_coins: Tensor | None = None,
    ) -> None:
        self.draw, self.acceptance_coins = draw, acceptance_coins
        self.records = 0
        self.sums = {
            name: torch.zeros_like(parameter, dtype=torch.float64)
            for name, parameter in parameters.items()
        }
        self._norms = [torch.zeros(0, dtype=torch.float64)]

    @property
    def norms(self) -> Tensor:
        """Of all records that were added."""
        return torch.cat(self._norms)

    def add(self, norms: Tensor, sums: Mapping[str, Tensor]) -> None:
        """The next records of the draw: their norms, and the weighted sum of their gradients."""
        self._norms.append(norms.cpu())
        self.records += len(norms)
        for name, value in sums.items():
            self.sums[name] += value
