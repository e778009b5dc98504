"""What a model keeps is released with it: nothing but a noisy step may write to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from dpis.gradients import CouplingError


class ModelState:
    """Buffers and parameters of a module, trained or not, as they are now.

    Values are compared, not versions: writing to ``tensor.data`` leaves no other trace.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {name: tensor.detach().clone() for name, tensor in _kept(module)}

    def check_unwritten(self) -> None:
        """Refuse to go on if one has another value now.

        Raises:
            CouplingError: if so.
        """
        now = dict(_kept(self._module))
        for name in now.keys() | self._before.keys():
            if name not in now or name not in self._before or self._changed(name, now[name]):
                raise CouplingError(
                    f"The model wrote to '{name}' while records passed through it. That gets no noise: what it learns "
                    "of records would be released with the model, and pass on to other records. Keep no running "
                    "statistics (dpis.fix replaces those of torch's layers), start nothing from the first batch, and "
                    "leave parameters to the optimizer"
                )

    def _changed(self, name: str, now: Tensor) -> bool:
        before = self._before[name]
        return not (torch.equal(now, before) or torch.equal(now.nan_to_num(), before.nan_to_num()))


@contextmanager
def unwritten(module: nn.Module) -> Iterator[None]:
    """While records pass through a module: refuse whatever it wrote to itself.

    Raises:
        CouplingError: at the end, if it did.
    """
    state = ModelState(module)
    yield
    state.check_unwritten()


def _kept(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())
