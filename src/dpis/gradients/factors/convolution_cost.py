"""What a convolution's norms cost, as a function of its sizes; and how many records fit a cache.

The unit is one multiply-add inside a large matrix product. The constants are fitted to measured
times of the two ways over the convolutions of benchmarks/per_example.py (see its README).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch

from dpis.gradients.factors.convolution_geometry import Geometry

GRAM_ENTRY = 25
"""Multiply-adds that take as long as adding one shifted entry of a Gram matrix to another."""

KERNEL_ENTRY = 50
"""Multiply-adds that take as long as writing and squaring one entry of an explicit gradient."""

CACHE_FLOATS = 2**22
"""Numbers that a block of records may occupy while its norms are computed (16 MiB in float32)."""


@lru_cache(maxsize=1024)
def cheaper_by_gram(
    inputs: torch.Size, output_grads: torch.Size, rows: int, geometry: Geometry
) -> bool:
    """Whether Gram matrices cost less than the gradients themselves, by the shapes alone."""
    channels_in = inputs[1] // geometry.groups
    channels_out = output_grads[1] // geometry.groups
    outputs = rows * prod(output_grads[2:])
    gram = outputs**2 * (channels_out + GRAM_ENTRY)
    for phase in geometry.phases():
        sizes = zip(inputs[2:], phase.starts, geometry.stride, strict=True)
        seen = rows * prod(len(range(start, size, step)) for size, start, step in sizes)
        gram += seen**2 * channels_in
        gram += GRAM_ENTRY * outputs**2 * sum(len(taps) for taps in phase.taps)
    entries = channels_in * channels_out * prod(geometry.kernel)
    return gram < (outputs + KERNEL_ENTRY) * entries


def records_in_cache(
    inputs: Sequence[int], output_grads: Sequence[int], rows: int, by_gram: bool
) -> int:
    """How many records to treat at once."""
    seen, sent = (rows * prod(shape[2:]) for shape in (inputs, output_grads))
    floats = seen * inputs[1] + sent * output_grads[1]
    if by_gram:
        floats += 2 * (seen**2 + sent**2)
    return max(1, CACHE_FLOATS // max(1, floats))
