"""The gradients of every record of one chunk: norms first, weighted sums later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dpis.errors import InputError
from dpis.gradients.factors.factor import (
    Factor,
    Kept,
    chosen,
    finite_sum,
    kept_by,
    squared_norms_and_doubts,
)
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
        return self._squares[0].sqrt()

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """``Σ_i weights_i grad_i`` by parameter name, as `weighted_sums` gives them."""
        return dict(self.weighted_sums(weights))

    def weighted_sums(self, weights: Tensor) -> Iterator[tuple[str, Tensor]]:
        """``Σ_i weights_i grad_i``, parameter by parameter, in float32 or better, each in memory of its own.

        Records of weight zero take no part: they cost nothing, and a gradient among them that is
        not finite does no harm. Where the terms of a gradient all but cancel, they are added up in float64.
        """
        if weights.shape != (self.records,):
            raise InputError(
                f"One weight a record is required: {self.records}; found shape "
                f"{tuple(weights.shape)}."
            )
        shares = self._shares(weights)
        for name in self.parts:
            yield name, self._sum_of(name, shares)

    def weighted_sum_of(self, name: str, weights: Tensor) -> Tensor:
        """``Σ_i weights_i grad_i`` of one parameter; as in `weighted_sums`."""
        return self._sum_of(name, self._shares(weights))

    def _shares(self, weights: Tensor) -> _Shares:
        if self.filling:
            weights = functional.pad(weights, (0, self.filling))
        apart = self._squares[1]
        with_care = None if apart is None else weights[apart]
        if apart is not None:
            weights = weights.index_fill(0, apart, 0.0)
        kept, exactly = kept_by(weights)
        own = weights if kept is None else chosen(weights, kept)
        return _Shares(kept, own, exactly, apart, with_care)

    def _sum_of(self, name: str, shares: _Shares) -> Tensor:
        parts, kept = self.parts[name], shares.kept
        with torch.no_grad(), full_precision(self._device):
            some = parts if kept is None else [part.select(kept) for part in parts]
            sums = [finite_sum(part.factor, shares.own, shares.exactly) for part in some]
            if shares.apart is not None and shares.with_care is not None:
                for total, part in zip(sums, parts, strict=True):
                    total.add_(_weighted_sum_of(part.factor, shares.apart, shares.with_care))
            return put_together(parts, sums, self.parameters[name])

    @cached_property
    def _squares(self) -> tuple[Tensor, Tensor | None]:
        if not self.records:
            return torch.zeros(0, dtype=torch.float64, device=self._device), None
        with torch.no_grad(), full_precision(self._device):
            return squared_norms_and_doubts(self._factors, self.records)

    @property
    def _factors(self) -> list[Factor]:
        return [part.factor for parts in self.parts.values() for part in parts]

    @property
    def _device(self) -> torch.device:
        return next(iter(self.parameters.values())).device


class _Shares(NamedTuple):
    """How records take part in a sum.

    Attributes:
        kept: which have a weight; None: all.
        own: the weights of these.
        exactly: as `kept_by` says.
        apart: records that are summed in float64, by themselves; None: there are none.
        with_care: the weights of those.
    """

    kept: Kept | None
    own: Tensor
    exactly: bool
    apart: Tensor | None
    with_care: Tensor | None


def _weighted_sum_of(factor: Factor, records: Tensor, weights: Tensor) -> Tensor:
    """Of these records, in float64; who has no weight takes no part."""
    some = weights.nonzero().squeeze(1)
    return factor.select(records[some]).double().quick_sum(weights[some].double())


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """No autocast: norms and sums are computed in float32 or better whatever the forward pass."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
