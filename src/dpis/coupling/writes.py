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
        self._values = {name: tensor.detach().clone() for name, tensor in _changing(module)}
        self._frozen = dict(self._frozen_now())

    def check_unwritten(self) -> None:
        """Refuse to go on if one has another value now.

        Raises:
            CouplingError: if so.
        """
        now, frozen = dict(_changing(self._module)), dict(self._frozen_now())
        kept = {*self._values, *self._frozen}
        for name in kept | now.keys() | frozen.keys():
            known = name in kept and (name in now or name in frozen)
            if not known or self._frozen.get(name) != frozen.get(name) or self._differs(name, now):
                raise CouplingError(
                    f"The model wrote to '{name}' while records passed through it. That gets no noise: what it learns "
                    "of records would be released with the model, and pass on to other records. Keep no running "
                    "statistics (dpis.fix replaces those of torch's layers), start nothing from the first batch, and "
                    "leave parameters to the optimizer. A cache that knows nothing of records (of positions, say) can "
                    "be filled beforehand: run the model once on a made-up record of the greatest length"
                )

    def _differs(self, name: str, now: dict[str, Tensor]) -> bool:
        return name in now and not _same(now[name], self._values[name])

    def _frozen_now(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        for name, parameter in self._module.named_parameters():
            if not parameter.requires_grad:
                total = _sum_of_bits(parameter) if self._closely else 0
                yield name, (parameter.data_ptr(), parameter._version, total)


@contextmanager
def unwritten(module: nn.Module, *, closely: bool = True) -> Iterator[None]:
    """While records pass through a module: refuse whatever it wrote to itself.

    Raises:
        CouplingError: at the end, if it did.
    """
    state = ModelState(module, closely=closely)
    yield
    state.check_unwritten()


def _changing(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    yield from module.named_buffers()


def _same(a: Tensor, b: Tensor) -> bool:
    if a.layout is not torch.strided or b.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())


def _sum_of_bits(tensor: Tensor) -> int:
    numbers = flattened(tensor)
    whole = numbers.view(BITS.get(numbers.element_size(), torch.int64))
    return int(whole.sum(dtype=torch.int64))
