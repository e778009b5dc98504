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

    What is released would otherwise show its last bits, all of them in float64, those of small numbers in any type,
    and with them which noises were possible (see `dpis.randomness`). Rounding is post-processing: free.

    Args:
        noisy: in float64; changed in place.
        noise_std: of the noise in it; 0: nothing is hidden, and nothing is rounded.
    """
    if noise_std == 0:
        return noisy
    spacing = 2.0 ** (
        math.floor(math.log2(noise_std)) - GRID_BITS
    )  # so that dividing by it is exact
    return noisy.div_(spacing).round_().mul_(spacing)


def add_noise(sums: Mapping[str, Tensor], noise_std: float, stream: Stream) -> dict[str, Tensor]:
    """``sums + noise_std · Normal(0, I)``, in float64, on a public grid (`on_grid`).

    One flat draw serves all sums, in the order of their names, so the result does not depend on the
    order of the mapping. It is drawn on the CPU and moved to where each sum is. What is done with the result is
    post-processing.

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
        name: on_grid(_added(piece, sums[name].detach()), noise_std)
        for name, piece in zip(names, pieces, strict=True)
    }


def _added(noise: Tensor, value: Tensor) -> Tensor:
    return noise.view(value.shape).to(value.device).add_(value)
