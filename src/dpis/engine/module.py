"""The wrapped model: trains under the watch of the gradient engine, and is itself in everything else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dpis.engine.outputs import watched_outputs
from dpis.engine.session import Session


class PrivateModule(nn.Module):
    """Calls go to the session while training with gradients, straight to the model otherwise.

    Like Opacus's ``GradSampleModule`` it keeps the model as ``_module`` and passes on its attributes.
    """

    def __init__(self, module: nn.Module, session: Session) -> None:
        super().__init__()
        self._module = module
        object.__setattr__(self, "_session", session)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs."""
        if not (self.training and torch.is_grad_enabled()):
            return self._module(*args, **kwargs)
        session: Session = self.__dict__["_session"]
        return watched_outputs(session.run(args, kwargs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_module"), name)

    def to_standard_module(self) -> nn.Module:
        """The model itself."""
        return self._module
