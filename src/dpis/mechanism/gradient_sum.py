"""The weighted gradients of drawn records, added up part by part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from dpis.gradients.record_gradients import Gradients, Weigh
from dpis.sampling import Draw


class SumsGradients(Protocol):
    """Norms of records and weighted sums of their gradients: `RecordGradients`, or tapes of somebody else's passes."""

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The trainable parameters by name."""
        ...

    def __call__(self, batch: Any, weigh: Weigh, present: Tensor | None = None) -> Gradients:
        """Norms of all records of a batch, and the sum with weights made from them."""
        ...


class GradientSum:
    """The weighted gradients of drawn records, added up part by part in float64. Private until it is released.

    Attributes:
        draw: whose gradients these are.
        records: how many were added, in the order of the draw.
        sums: by parameter; empty before the first part.
    """

    def __init__(self, draw: Draw, weigh: Weigh) -> None:
        self.draw = draw
        self.records = 0
        self.sums: dict[str, Tensor] = {}
        self._weigh = weigh
        self._norms = [torch.zeros(0, dtype=torch.float64)]

    @property
    def norms(self) -> Tensor:
        """Of all records that were added."""
        return torch.cat(self._norms)

    def add(self, gradients: SumsGradients, batch: Any, present: Tensor | None = None) -> None:
        """The next records of the draw.

        Args:
            gradients: the model and its loss.
            batch: their rows.
            present: which rows count, for records of several rows.
        """
        self.start_from(gradients.parameters)
        result = gradients(batch, _from_place(self.records, self._weigh), present)
        self._norms.append(result.norms.cpu())
        self.records += len(result.norms)
        for name, value in result.sums.items():
            self.sums[name] += value

    def start_from(self, parameters: Mapping[str, Tensor]) -> None:
        """Zeros for every parameter: an empty batch is a normal step, pure noise."""
        if not self.sums:
            self.sums = {
                name: torch.zeros_like(parameter, dtype=torch.float64)
                for name, parameter in parameters.items()
            }


def _from_place(first: int, weigh: Weigh) -> Weigh:
    """For a part of a batch whose places are counted from ``first``."""
    return lambda norms, places: weigh(norms, places + first)
