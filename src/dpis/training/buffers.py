"""Buffers of a model: released with it, without noise, so nothing may be written to them in training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpis.gradients import CouplingError


class FixedBuffers:
    """Watches that the buffers of a module stay what they are."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = dict(module.named_buffers())
        self._versions = {name: buffer._version for name, buffer in self._buffers.items()}
        self._values = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}

    def check(self) -> None:
        """Refuse to go on if one has another value than at the start.

        Raises:
            CouplingError: if so.
        """
        now = dict(self._module.named_buffers())
        for name in now.keys() | self._buffers.keys():
            if name not in now or name not in self._buffers or self._changed(name, now[name]):
                raise CouplingError(
                    f"The model wrote to its buffer '{name}' while records passed through it. Buffers get no noise: "
                    "what they learn of records would be released with the model, and pass on to other records. Keep "
                    "no running statistics (dpis.fix replaces those of torch's layers)"
                )

    def _changed(self, name: str, now: Tensor) -> bool:
        if now is self._buffers[name] and now._version == self._versions[name]:
            return False
        return not torch.equal(now.nan_to_num(), self._values[name].nan_to_num())
