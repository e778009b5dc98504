"""The wrapped model: trains under the watch of the gradient engine, and is itself in everything else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dpis.coupling.outputs import watched_outputs
from dpis.coupling.writes import unwritten
from dpis.dropin.session import Session
from dpis.errors import MisuseError


class PrivateModule(nn.Module):
    """Calls go to the session while training with gradients, straight to the model otherwise.

    Like Opacus's ``GradSampleModule`` it keeps the model as ``_module`` and passes on its attributes. A copy (by
    ``copy.deepcopy`` or pickle) can be evaluated, averaged or saved, not trained.
    """

    def __init__(self, module: nn.Module, session: Session | None) -> None:
        super().__init__()
        self._module = module
        self.training = module.training
        object.__setattr__(self, "_session", session)
        object.__setattr__(self, "_standard", False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs."""
        if not self.training:
            return self._module(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self._look(args, kwargs)
        session: Session | None = self.__dict__["_session"]
        if self.__dict__["_standard"]:
            return self._module(*args, **kwargs)
        if session is None:
            raise MisuseError(
                "this is a copy of a private model, without its loader and optimizer: training it would not be private."
                " Train the model that make_private returned; call eval() on the copy to evaluate it"
            )
        outputs = _uncompiled(session.run)(args, kwargs)
        return watched_outputs(outputs, session.tape if session.looks_now else None)

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In training mode without gradients: whatever layers keep of records would be released."""
        with unwritten(self._module):
            return self._module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":
                raise
            return getattr(super().__getattr__("_module"), name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}

    def to_standard_module(self) -> nn.Module:
        """The model itself, for whatever comes after private training: no private step follows."""
        session: Session | None = self.__dict__["_session"]
        if session is not None:
            session.close()
        return self._module

    def remove_hooks(self) -> None:
        """As `to_standard_module`, in place: this module is the model itself from now on, in all it does."""
        self.to_standard_module()
        object.__setattr__(self, "_standard", True)


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run as it is written where this module itself was compiled: compiled graphs cannot be watched."""
    if "torch._dynamo" not in sys.modules:
        return function  # nothing was compiled, and the import would take seconds
    as_written: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return as_written
