"""A convolution as one matrix product for each phase of its inputs (see geometry.py).

All kernel elements that look at a phase take it at once, ``x[q,:] W[:,(k,o)]``; each product belongs to the output
position ``q − k``. With the output gradients brought back to the inputs that they belong to, ``s[q,(k,o)] = g[q−k,o]``,
a record's gradient is a sum of outer products over positions,

    G[(k,o),c] = Σ_q s[q,(k,o)] · x[q,c].

Where many channels give few outputs, these products are faster than the kernels for convolutions, and the inputs, once
they are split into phases, serve the forward pass, the norms and the weighted sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from dpis.gradients import aligned
from dpis.gradients.factors.correlation import cheaper_by_gram
from dpis.gradients.factors.factor import Compound, widest
from dpis.gradients.factors.geometry import Geometry, Phase, Sizes
from dpis.gradients.factors.norms import Squares, total_of
from dpis.gradients.factors.outer import Outer, smallest

FLOATS_AT_ONCE = 1 << 18
"""So many numbers turn channels last at once: they stay in cache until they are split, and no large block of memory is
needed, which would often be a fresh one (a page fault may cost as much as copying the page)."""


@dataclass(frozen=True)
class Window:
    """Where one kernel element meets a phase: slices of the outputs, and of the inputs they look at, rows first."""

    element: int
    outputs: tuple[slice, ...]
    inputs: tuple[slice, ...]


@dataclass(frozen=True)
class Split:
    """One phase of images of a certain size, with the windows of all kernel elements that look at any of it."""

    phase: Phase
    sizes: Sizes
    windows: tuple[Window, ...]

    def as_images(self, positions: Tensor) -> Tensor:
        """``[rows, positions, ...]``, perhaps filled up, as ``[rows, *sizes, ...]``: a view."""
        own = positions[:, : prod(self.sizes)]
        return own.view(len(own), *self.sizes, *own.shape[2:])


@dataclass(frozen=True, eq=False)
class Phases:
    """Images, split into phases.

    Attributes:
        inputs: the images as given, ``[rows, channels, *spatial]``.
        values: of every phase, ``[rows, positions, channels]``; both sizes are filled up with zeros (see aligned.py).
        splits: which phases these are.
        geometry: where the kernel looks.
    """

    inputs: Tensor
    values: tuple[Tensor, ...]
    splits: tuple[Split, ...]
    geometry: Geometry

    @staticmethod
    def of(inputs: Tensor, geometry: Geometry) -> Phases:
        """The phases of some images, in copies of their own."""
        channels = inputs.shape[1]
        splits = _splits(geometry, tuple(inputs.shape[2:]))
        values = tuple(_room_for(inputs, split) for split in splits)
        images = [
            split.as_images(room)[..., :channels].movedim(-1, 1)
            for room, split in zip(values, splits, strict=True)
        ]
        at_once = max(1, FLOATS_AT_ONCE // max(1, prod(inputs.shape[1:])))
        for first in range(0, len(inputs), at_once):
            rows = slice(first, first + at_once)
            last = channels_last(inputs[rows])
            for image, split in zip(images, splits, strict=True):
                image[rows] = geometry.every(last, split.phase)
        return Phases(inputs, values, splits, geometry)

    def convolved(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution of the images, as torch gives it."""
        result: Tensor = _Convolved.apply(self.inputs, weight, bias, self)  # type: ignore[no-untyped-call]
        return result

    def in_order(self, rows_first: Callable[[Tensor], Tensor]) -> Phases:
        """The same with the rows in another order."""
        return replace(self, values=tuple(map(rows_first, self.values)))

    def gradients(self, output_grads: Tensor) -> PhaseGradients:
        """Every row's gradient of the kernel."""
        shape = torch.Size((output_grads.shape[1], self.inputs.shape[1], *self.geometry.kernel))
        sent = output_grads.movedim(1, -1).contiguous()
        each = zip(self.values, self.splits, strict=True)
        terms = (smallest(Outer(seen, _brought_back(sent, seen, split))) for seen, split in each)
        return PhaseGradients(tuple(terms), self.splits, shape)


@dataclass(frozen=True, eq=False)
class PhaseGradients(Compound):
    """Gradients of a kernel, phase by phase: no two phases share a kernel element.

    Attributes:
        terms: of every phase, of shape ``[kernel elements · channels_out, channels_in]``, the last filled up.
        splits: which phases these are.
        of_kernel: ``[channels_out, channels_in, *kernel]``.
    """

    splits: tuple[Split, ...]
    of_kernel: torch.Size

    @property
    def shape(self) -> torch.Size:
        """``[channels_out, channels_in, *kernel]``."""
        return self.of_kernel

    def squares(self) -> Squares:
        """Those of the phases, added up."""
        return total_of([term.squares() for term in self.terms])

    def quick_sum(self, weights: Tensor) -> Tensor:
        """One product for each phase."""
        return self._joined([term.quick_sum(weights) for term in self.terms])

    def explicit(self) -> Tensor:
        """Every record's gradient."""
        return self._joined([term.explicit() for term in self.terms])

    def _joined(self, by_phase: Sequence[Tensor]) -> Tensor:
        """``[..., kernel elements · channels_out, channels_in]`` of the phases as ``[..., *shape]``."""
        channels_out, channels_in, *kernel = self.shape
        size = (*by_phase[0].shape[:-2], prod(kernel), channels_out, channels_in)
        joined = by_phase[0].new_zeros(size, dtype=widest(by_phase))
        for split, found in zip(self.splits, by_phase, strict=True):
            by_element = torch.unflatten(found[..., :channels_in], -2, (-1, channels_out))
            for number, window in enumerate(split.windows):
                joined[..., window.element, :, :] = by_element[..., number, :, :]
        return torch.unflatten(joined.movedim(-3, -1), -1, kernel)


class _Convolved(torch.autograd.Function):
    """The forward pass by phases; who asks for the gradient of the summed loss gets torch's own."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, phases: Phases
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.geometry = phases.geometry
        channels_out, sizes = weight.shape[0], phases.geometry.output_sizes(inputs.shape[2:])
        outputs = weight.new_zeros(()) if bias is None else bias
        outputs = outputs.expand(inputs.shape[0], *sizes, channels_out).clone()
        kernels = _by_phase(weight, phases.splits)
        for seen, split, kernel in zip(phases.values, phases.splits, kernels, strict=True):
            products = torch.unflatten(aligned.product(seen, kernel), 2, (-1, channels_out))
            by_place = split.as_images(products)
            for number, window in enumerate(split.windows):
                outputs[window.outputs].add_(by_place[window.inputs][..., number, :])
        return outputs.movedim(-1, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        geometry: Geometry = ctx.geometry
        wanted = ctx.needs_input_grad[1:3]
        return None, *geometry.parameter_gradients(inputs, grads[0], weight, wanted=wanted), None


def worth_splitting(inputs: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """Whether the products by phases take no more room than the images, and Gram matrices give the norms."""
    return geometry.groups == 1 and _worth_splitting(inputs.shape[1:], weight.shape[0], geometry)


@lru_cache(maxsize=1024)
def _worth_splitting(image: torch.Size, channels_out: int, geometry: Geometry) -> bool:
    sizes = tuple(image[1:])
    sent = torch.Size((1, channels_out, *geometry.output_sizes(sizes)))
    products = sum(prod(s.sizes) * len(s.windows) for s in _splits(geometry, sizes))
    in_little_room = 0 < products * channels_out <= prod(image)
    return in_little_room and cheaper_by_gram(torch.Size((1, *image)), sent, 1, geometry)


def channels_last(images: Tensor) -> Tensor:
    """``images.contiguous(memory_format=torch.channels_last)``; for square ones by a kernel that is twice as fast."""
    rows, channels, *sizes = images.shape
    if len(sizes) != 2 or sizes[0] != sizes[1] or not images.is_contiguous() or not images.numel():
        return images.contiguous(memory_format=torch.channels_last) if len(sizes) == 2 else images
    size = channels * sizes[0] ** 2
    one_position = images.as_strided((rows, size, 1, 1), (size, 1, size, size))
    return torch.pixel_shuffle(one_position, sizes[0])  # channels last as it is


@lru_cache(maxsize=1024)
def _splits(geometry: Geometry, sizes: Sizes) -> tuple[Split, ...]:
    """The phases that any kernel element looks at."""
    found = []
    for phase in geometry.phases():
        some = geometry.sizes_of(phase, sizes)
        windows = _windows(geometry, phase, some, geometry.output_sizes(sizes))
        if windows:
            found.append(Split(phase, some, windows))
    return tuple(found)


def _windows(
    geometry: Geometry, phase: Phase, sizes: Sizes, output_sizes: Sizes
) -> tuple[Window, ...]:
    windows = []
    for taps in product(*phase.taps):
        along = list(zip(output_sizes, sizes, (tap.shift for tap in taps), strict=True))
        ranges = [(max(0, -shift), min(o, s - shift), shift) for o, s, shift in along]
        if any(first >= last for first, last, _ in ranges):
            continue  # it looks at nothing but padding
        outputs = [slice(first, last) for first, last, _ in ranges]
        inputs = [slice(first + shift, last + shift) for first, last, shift in ranges]
        every = slice(None)
        windows.append(Window(geometry.element(taps), (every, *outputs), (every, *inputs)))
    return tuple(windows)


def _by_phase(weight: Tensor, splits: Sequence[Split]) -> tuple[Tensor, ...]:
    """Of every phase, those kernel elements that look at it: ``[channels_in, elements · channels_out]``, filled up."""
    elements = torch.tensor([window.element for split in splits for window in split.windows])
    by_element = weight.flatten(2).index_select(2, elements).permute(1, 2, 0).flatten(1)
    kernels = aligned.filled_up(by_element, -2)
    return torch.split(kernels, [len(s.windows) * weight.shape[0] for s in splits], dim=1)


def _room_for(inputs: Tensor, split: Split) -> Tensor:
    """``[rows, positions, channels]`` for one phase: zeros where both sizes are filled up, nothing else yet."""
    channels, count = inputs.shape[1], prod(split.sizes)
    more, more_channels = aligned.missing(count), aligned.missing(channels)
    room = inputs.new_empty(len(inputs), count + more, channels + more_channels)
    if more:
        room[:, count:] = 0
    if more_channels:
        room[:, :count, channels:] = 0
    return room


def _brought_back(output_grads: Tensor, seen: Tensor, split: Split) -> Tensor:
    """``s[q,(k,o)] = g[q−k,o]``, ``[rows, positions, elements · channels_out]``; ``g`` with its channels last."""
    rows, channels_out = output_grads.shape[0], output_grads.shape[-1]
    sent = output_grads.new_zeros(rows, seen.shape[1], len(split.windows), channels_out)
    by_place = split.as_images(sent)
    for number, window in enumerate(split.windows):
        by_place[window.inputs][..., number, :] = output_grads[window.outputs]
    return sent.flatten(2)
