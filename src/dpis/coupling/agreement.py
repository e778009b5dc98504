"""Whether two computations of the same gradients agree: fast or by plain autograd, padded or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3}
"""The largest difference allowed, relative to the norm of a record's whole gradient."""
HALF_TOLERANCE = 0.1
VANISHING = 1e-18
"""A gradient this small is none: its squares vanish in float32, and clipping leaves nothing of it to bound."""

Explicit = Mapping[str, Tensor]
"""The gradients of a few records for each parameter, ``[records, *shape]``."""


def disagreements(fast: Explicit, norms: Tensor, plain: Explicit, half: bool) -> list[str]:
    """The parameters for which a record's gradient differs from plain autograd's.

    Args:
        fast: the gradients that are summed.
        norms: and the norms that they are clipped by.
        plain: the gradients by autograd on one record at a time.
        half: whether the forward pass ran in half precision.
    """
    sizes = _sizes(plain)
    off = [name for name in plain if _differ(fast[name], plain[name], sizes, half)]
    wrong = not off and _are_others(norms, sizes, half)
    return sorted(plain) if wrong else sorted(off)


def norms_fit(fast: Explicit, norms: Tensor, half: bool) -> bool:
    """Whether the norms of a few records are those of the gradients that are summed."""
    return not _are_others(norms, _sizes(fast), half)


def same_gradient(one: Tensor, other: Tensor, half: bool) -> bool:
    """Whether two gradients, flat, differ by rounding at most; what is not finite cannot be compared."""
    size = torch.maximum(one.norm(), other.norm())
    return not bool(size.isfinite() and (one - other).norm() > _loosest(half) * size + VANISHING)


def _are_others(norms: Tensor, sizes: Tensor, half: bool) -> bool:
    return bool(((norms - sizes).abs() > _loosest(half) * sizes + VANISHING).any())


def _loosest(half: bool) -> float:
    return HALF_TOLERANCE if half else max(TOLERANCES.values())


def _sizes(gradients: Explicit) -> Tensor:
    """The norm of every record's whole gradient."""
    squares = [g.double().reshape(len(g), -1).square().sum(1) for g in gradients.values()]
    return torch.stack(squares).sum(0).sqrt()


def _differ(fast: Tensor, plain: Tensor, sizes: Tensor, half: bool) -> bool:
    """Whether the gradient of any record is off, by the size of that record's whole gradient."""
    tolerance = HALF_TOLERANCE if half else TOLERANCES.get(fast.dtype, HALF_TOLERANCE)
    differences = (fast.double() - plain.double()).reshape(len(sizes), -1)
    close = differences.norm(dim=1) <= tolerance * sizes + VANISHING
    return bool((~close & sizes.isfinite()).any())


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
