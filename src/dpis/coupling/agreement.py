"""Whether two computations of the same gradients agree: fast or by plain autograd, padded or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3}
"""The largest difference allowed, relative to the norm of a record's whole gradient."""
HALF_TOLERANCE = 0.1
VANISHING = 1e-18
"""A gradient this small is none: its squares vanish in float32, and clipping leaves nothing of it to bound."""


class RecordedGradients(Protocol):
    """Gradients that were computed fast: what a tape answers."""

    @property
    def records(self) -> int:
        """How many."""
        ...

    def norms(self) -> Tensor:
        """Those that records are clipped by."""
        ...

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """What is released, but for the noise."""
        ...


@dataclass(frozen=True, eq=False)
class PlainGradients:
    """The gradients of a few records by plain autograd: their norms, and one sum of all, each with length one.

    Signs in the sum are random: gradients that are wrong do not make each other good. No gradient of a record is held.

    Attributes:
        norms: ``[records]``, float64.
        weights: with which each is in the sums; zero where a gradient is not finite, or vanishes.
        sums: by parameter.
    """

    norms: Tensor
    weights: Tensor
    sums: Mapping[str, Tensor]

    @staticmethod
    def of(each: Iterable[Mapping[str, Tensor]]) -> PlainGradients:
        """From the gradients of one record at a time."""
        norms, weights, sums = [], [], dict[str, Tensor]()
        for one in each:
            norm = _norm_of(one.values())
            sign = 1.0 if bool(torch.rand(()) < 0.5) else -1.0
            usable = bool(norm.isfinite()) and bool(norm > VANISHING)
            weight = sign / norm if usable else torch.zeros_like(norm)
            norms.append(norm)
            weights.append(weight)
            for name, gradient in one.items():
                share = gradient * weight.to(gradient) if usable else torch.zeros_like(gradient)
                sums[name] = sums[name].add_(share) if name in sums else share
        return PlainGradients(torch.stack(norms), torch.stack(weights), sums)

    def disagreements(self, fast: RecordedGradients, half: bool) -> list[str]:
        """The parameters whose gradients differ from these.

        Args:
            fast: the same records.
            half: whether the forward pass ran in half precision.
        """
        sums = fast.weighted_sum(self.weights)
        off = [name for name in self.sums if _differ(sums[name], self.sums[name], half)]
        wrong = not off and _are_others(fast.norms(), self.norms, half)
        return sorted(self.sums) if wrong else sorted(off)

    def equals(self, other: PlainGradients) -> bool:
        """Bit for bit; of records that vanish or are not finite, nothing is known."""
        return torch.equal(self.norms.nan_to_num(), other.norms.nan_to_num())


def norms_fit(fast: RecordedGradients, half: bool) -> bool:
    """Whether the norms of a few records are those of the gradients that are summed."""
    norms = fast.norms()
    alone = torch.diag(norms.isfinite().to(norms))
    sizes = [_norm_of(fast.weighted_sum(only).values()) for only in alone]
    return not _are_others(norms, torch.stack(sizes), half)


def same_gradient(one: Tensor, other: Tensor, half: bool) -> bool:
    """Whether two gradients, flat, differ by rounding at most; what is not finite cannot be compared."""
    size = torch.maximum(one.norm(), other.norm())
    return not bool(size.isfinite() and (one - other).norm() > _loosest(half) * size + VANISHING)


def _are_others(norms: Tensor, sizes: Tensor, half: bool) -> bool:
    off = (norms - sizes).abs() > _loosest(half) * sizes + VANISHING
    return bool((off & sizes.isfinite()).any())


def _loosest(half: bool) -> float:
    return HALF_TOLERANCE if half else max(TOLERANCES.values())


def _differ(fast: Tensor, plain: Tensor, half: bool) -> bool:
    """Whether sums of gradients of length one are off, each by its own precision."""
    tolerance = HALF_TOLERANCE if half else TOLERANCES.get(fast.dtype, HALF_TOLERANCE)
    return not bool(_norm_of([fast - plain]) <= tolerance)


def _norm_of(gradient: Iterable[Tensor]) -> Tensor:
    """Over all parameters, in float64, without a copy."""
    wide = torch.float64
    norms = torch.stack([torch.linalg.vector_norm(part, dtype=wide) for part in gradient])
    return norms.square().sum().sqrt()


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while, so that the same input gives the same output.

    Attention is computed as in training: its fast path writes zeros where keys are masked. Recurrent layers stay as
    they are but for their dropout: on some devices they have no backward pass in evaluation mode.
    """
    modes = {layer: layer.training for layer in module.modules()}
    recurrent = [layer for layer in modes if isinstance(layer, nn.RNNBase)]
    rates = [layer.dropout for layer in recurrent]
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for layer in modes:
            layer.training = isinstance(layer, nn.RNNBase) and modes[layer]
        for layer in recurrent:
            layer.dropout = 0.0
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_attention)
        for layer, training in modes.items():
            layer.training = training
        for layer, rate in zip(recurrent, rates, strict=True):
            layer.dropout = rate
