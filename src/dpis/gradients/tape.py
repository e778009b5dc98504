"""The gradients of every record of one chunk: norms first, weighted sums later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dpis.errors import InputError
from dpis.gradients.factors.factor import Kept, chosen, kept_by
from dpis.gradients.parts import Part, squared_norms, weighted_sum


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
            squares = [squared_norms(parts) for parts in self.parts.values() if parts]
            return torch.stack(squares).sum(0).sqrt()[: self.records]

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
        kept = kept_by(weights)
        own = weights if kept is None else chosen(weights, kept)
        for (name, parameter), parts in zip(
            self.parameters.items(), self.parts.values(), strict=True
        ):
            with torch.no_grad(), full_precision(self._device):
                total = weighted_sum(_select(parts, kept), parameter, own)
            yield name, total

    @property
    def _device(self) -> torch.device:
        return next(iter(self.parameters.values())).device


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """No autocast: norms and sums are computed in float32 or better whatever the forward pass."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _select(parts: tuple[Part, ...], kept: Kept | None) -> tuple[Part, ...]:
    if kept is None:
        return parts
    return tuple(Part(part.place, part.factor.select(kept)) for part in parts)
