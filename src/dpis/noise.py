"""Gaussian noise for sums of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dpis.errors import InputError
from dpis.randomness import Stream

GRID_BITS = 20


def on_grid(noisy: Tensor, noise_std: float) -> Tensor:
    """Noisy values rounded to a public grid, about a millionth of their noise's standard deviation apart.

    What is released in float64 would otherwise show its last bits, and with them which noises were possible (see
    `dpis.randomness`). Rounding is post-processing: free.
    """
    if noise_std == 0:
        return noisy
    grid = 2.0 ** (math.floor(math.log2(noise_std)) - GRID_BITS)
    return torch.round(noisy / grid) * grid


def add_noise(sums: Mapping[str, Tensor], noise_std: float, stream: Stream) -> dict[str, Tensor]:
    """``sums + noise_std · Normal(0, I)``, in float64.

    One flat draw serves all sums, in the order of their names, so the result does not depend on the
    order of the mapping. It is drawn on the CPU and moved to where each sum is. Scale the result first and
    round it to the parameters' type last (see `dpis.randomness` on floating point): between this
    function and that rounding nothing may be released.

    Args:
        sums: tensors by name, of any floating type.
        noise_std: standard deviation of every entry's noise, in the units of the sums.
        stream: serves this call alone; a stream used for two sums reveals their difference.

    Returns:
        New float64 tensors under the same names, sorted.

    Example:
        >>> import torch
        >>> from dpis.randomness import Key
        >>> noisy = add_noise({"weight": torch.zeros(2, 3)}, 1.5, Key.fresh().stream("noise", step=0))
        >>> noisy["weight"].shape, noisy["weight"].dtype
        (torch.Size([2, 3]), torch.float64)
    """
    if not (math.isfinite(noise_std) and noise_std >= 0):
        raise InputError(f"noise_std must be a finite number >= 0, found {noise_std!r}")
    names = sorted(sums)
    sizes = [sums[name].numel() for name in names]
    pieces = torch.split(stream.normals(sum(sizes)).mul_(noise_std), sizes)
    return {
        name: piece.view(sums[name].shape).to(sums[name].device).add_(sums[name].detach())
        for name, piece in zip(names, pieces, strict=True)
    }
