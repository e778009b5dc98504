"""The gradients of every record of one chunk: norms first, weighted sums later."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dpis.errors import InputError
from dpis.gradients.factors.factor import Factor, squared_norms, weighted_sums
from dpis.gradients.parts import Part, put_together


@dataclass(frozen=True, eq=False)
class Tape:
    """The gradients of every record of one chunk, as factors.

    Norms and sums come from the same stored tensors, so a sum that is clipped by these norms is
    clipped exactly.

    Attributes:
        parameters: the trainable parameters by name.
        parts: for each, the factors of parts of it that do not overlap.
        records: how many records there are.
        filling: how many copies fill the chunk up behind them. They have no norms and no weights.
    """

    parameters: Mapping[str, Tensor]
    parts: Mapping[str, tuple[Part, ...]]
    records: int
    filling: int = 0

    def norms(self) -> Tensor:
        """``||grad_i||`` over all parameters, for every record, in float64; not finite where a gradient is not."""
        with torch.no_grad(), full_precision(self._device):
            return squared_norms(self._factors, self.records).sqrt()

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """``Σ_i weights_i grad_i``, parameter by parameter, in float32 or better.

        Records of weight zero take no part: they cost nothing, and a gradient among them that is
        not finite does no harm.
        """
        if weights.shape != (self.records,):
            raise InputError(
                f"One weight a record is required: {self.records}; found shape "
                f"{tuple(weights.shape)}."
            )
        if self.filling:
            weights = functional.pad(weights, (0, self.filling))
        with torch.no_grad(), full_precision(self._device):
            sums = iter(weighted_sums(self._factors, weights))
            return {
                name: put_together(parts, [next(sums) for _ in parts], self.parameters[name])
                for name, parts in self.parts.items()
            }

    @property
    def _factors(self) -> list[Factor]:
        return [part.factor for parts in self.parts.values() for part in parts]

    @property
    def _device(self) -> torch.device:
        return next(iter(self.parameters.values())).device


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """No autocast: norms and sums are computed in float32 or better whatever the forward pass."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
