"""Fast gradients against plain autograd, on a few records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpis.gradients.tape import Tape

# Largest difference allowed, relative to the norm of the record's whole gradient.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3}
HALF_TOLERANCE = 0.1
# A gradient this small is none: its squares vanish in float32, and clipping leaves nothing of it to bound.
VANISHING = 1e-18


def disagreements(tape: Tape, plain: Mapping[str, Tensor], half: bool) -> list[str]:
    """The parameters for which a record's gradient differs from plain autograd's.

    Args:
        tape: the fast gradients of a few records.
        plain: the same, explicit, from autograd on one record at a time.
        half: whether the forward pass ran in half precision.
    """
    squares = [
        gradients.double().reshape(tape.records, -1).square().sum(1) for gradients in plain.values()
    ]
    sizes = torch.stack(squares).sum(0).sqrt()
    alone = torch.eye(tape.records, device=sizes.device)
    fast = [tape.weighted_sum(only) for only in alone]
    off = [
        name
        for name, expected in plain.items()
        if _differ(torch.stack([sums[name] for sums in fast]), expected, sizes, half)
    ]
    wrong = not off and _are_others(tape.norms(), sizes, half)
    return sorted(plain) if wrong else sorted(off)


def norms_fit(tape: Tape, half: bool) -> bool:
    """Whether the norms of a few records are those of the gradients that are summed."""
    norms = tape.norms()
    sums = [tape.weighted_sum(only) for only in torch.eye(len(norms)).to(norms)]
    return not _are_others(norms, torch.stack([_size(one) for one in sums]), half)


def _are_others(norms: Tensor, sizes: Tensor, half: bool) -> bool:
    limit = HALF_TOLERANCE if half else max(TOLERANCES.values())
    return bool(((norms - sizes).abs() > limit * sizes + VANISHING).any())


def _size(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt()


def same_gradient(one: Tensor, other: Tensor, half: bool) -> bool:
    """Whether two gradients, flat, differ by rounding at most; what is not finite cannot be compared."""
    tolerance = HALF_TOLERANCE if half else max(TOLERANCES.values())
    size = torch.maximum(one.norm(), other.norm())
    return not bool(size.isfinite() and (one - other).norm() > tolerance * size + VANISHING)


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
