"""What a model keeps is released with it: nothing but a noisy step may write to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpis.batches import flattened
from dpis.errors import CouplingError

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers, by their size in bytes."""

Place = tuple[int, int, int]
"""Of a frozen parameter: its address, its version, and the sum of its bits where it is time to look closely."""


class ModelState:
    """Buffers and parameters of a module, trained or not, as they are now.

    Values are compared, not versions: writing to ``tensor.data`` leaves no other trace. Frozen parameters may be many
    times the others, so of them place and version are kept, and where it is time to look closely a checksum.

    Args:
        module: the model.
        closely: add up frozen parameters too.
    """

    def __init__(self, module: nn.Module, *, closely: bool) -> None:
        self._module, self._closely = module, closely
        self._before = {
            name: self._place_of(tensor) if frozen else tensor.detach().clone()
            for name, tensor, frozen in _kept_by(module)
        }

    def check_unwritten(self) -> None:
        """Refuse to go on if one has another value now.

        Raises:
            CouplingError: if so.
        """
        missing = set(self._before)
        for name, tensor, frozen in _kept_by(self._module):
            missing.discard(name)
            if name not in self._before or self._differs(tensor, frozen, self._before[name]):
                raise CouplingError(_WROTE.format(name))
        if missing:
            raise CouplingError(_WROTE.format(min(missing)))

    def _differs(self, tensor: Tensor, frozen: bool, before: Tensor | Place) -> bool:
        if isinstance(before, Tensor):
            return frozen or not _same(tensor, before)
        return not frozen or self._place_of(tensor) != before

    def _place_of(self, frozen: Tensor) -> Place:
        total = _sum_of_bits(frozen) if self._closely else 0
        return frozen.data_ptr(), frozen._version, total


@contextmanager
def unwritten(module: nn.Module, *, closely: bool = True) -> Iterator[None]:
    """While records pass through a module: refuse whatever it wrote to itself.

    Raises:
        CouplingError: at the end, if it did.
    """
    state = ModelState(module, closely=closely)
    yield
    state.check_unwritten()


def _kept_by(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Every parameter and buffer, and whether it is a frozen parameter."""
    yield from ((name, p, not p.requires_grad) for name, p in module.named_parameters())
    yield from ((name, buffer, False) for name, buffer in module.named_buffers())


def _same(a: Tensor, b: Tensor) -> bool:
    if a.layout is not torch.strided or b.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())


def _sum_of_bits(tensor: Tensor) -> int:
    numbers = flattened(tensor)
    whole = numbers.view(BITS.get(numbers.element_size(), torch.int64))
    return int(whole.sum(dtype=torch.int64))


_WROTE = (
    "The model wrote to '{}' while records passed through it. That gets no noise: what it learns of records would be "
    "released with the model, and pass on to other records. Keep no running statistics (dpis.fix replaces those of "
    "torch's layers), start nothing from the first batch, and leave parameters to the optimizer. A cache that knows "
    "nothing of records (of positions, say) can be filled beforehand: run the model once on a made-up record of the "
    "greatest length"
)
