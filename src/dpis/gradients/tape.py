"""The gradients of every record of one chunk: norms first, weighted sums later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dpis.errors import InputError
from dpis.gradients.factors.factor import Factor, Kept, chosen, finite_sum, kept_by, squared_norms
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
        if not self.records:
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        with torch.no_grad(), full_precision(self._device):
            return squared_norms(self._factors, self.records).sqrt()

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """``Σ_i weights_i grad_i`` by parameter name, as `weighted_sums` gives them."""
        return dict(self.weighted_sums(weights))

    def weighted_sums(self, weights: Tensor) -> Iterator[tuple[str, Tensor]]:
        """``Σ_i weights_i grad_i``, parameter by parameter, in float32 or better, each in memory of its own.

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
        kept, exactly = kept_by(weights)
        own = weights if kept is None else chosen(weights, kept)
        for name in self.parts:
            yield name, self._sum_of(name, kept, own, exactly)

    def weighted_sum_of(self, name: str, weights: Tensor) -> Tensor:
        """``Σ_i weights_i grad_i`` of one parameter; as in `weighted_sums`."""
        kept, exactly = kept_by(weights)
        own = weights if kept is None else chosen(weights, kept)
        return self._sum_of(name, kept, own, exactly)

    def _sum_of(self, name: str, kept: Kept | None, own: Tensor, exactly: bool) -> Tensor:
        parts = self.parts[name]
        with torch.no_grad(), full_precision(self._device):
            some = parts if kept is None else [part.select(kept) for part in parts]
            sums = [finite_sum(part.factor, own, exactly) for part in some]
            return put_together(parts, sums, self.parameters[name])

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
