"""The wrapped model: trains under the watch of the gradient engine, and is itself in everything else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dpis.coupling.forbidden_layers import fix_frozen_statistics
from dpis.coupling.writes import unwritten
from dpis.dropin.ranks import inner
from dpis.dropin.row_losses import HeadLosses, labels_among, with_loss
from dpis.dropin.session import Session
from dpis.errors import MisuseError


class PrivateModule(nn.Module):
    """Calls go to the session while training with gradients, straight to the model otherwise.

    Like Opacus's ``GradSampleModule`` it keeps the model as ``_module`` and passes on its attributes. A copy (by
    ``copy.deepcopy`` or pickle) can be evaluated, averaged or saved, not trained.

    A model that computes its loss from ``labels`` is run without them; the mean of every row's own loss stands in.

    Attributes:
        head_losses: which loss the model computes from labels.
    """

    head_losses: HeadLosses

    def __init__(self, module: nn.Module, session: Session | None) -> None:
        super().__init__()
        self._module = module
        self.training = module.training
        object.__setattr__(self, "_session", session)
        if session is not None:
            self.head_losses = HeadLosses(inner(module), lambda: session.gradients.undisturbed())
        object.__setattr__(self, "_standard", False)
        if session is not None and session.mechanism.group.size > 1:
            # Accelerator.prepare would wrap it anew: here sums are added up before their noise
            self._is_accelerate_prepared = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs."""
        model = inner(self._module)
        if not self.training:
            return model(*args, **kwargs)
        fix_frozen_statistics(model)
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
        run = _uncompiled(session.run)
        given, labels = labels_among(kwargs)
        with session.mechanism.group.stopping():
            kind = self.head_losses.kind(args, given, labels)
            if kind is None:
                return run(args, kwargs)
            outputs = run(args, given)
            return with_loss(outputs, kind(outputs, labels).mean())

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In training mode without gradients: whatever layers keep of records would be released."""
        model = inner(self._module)
        with unwritten(model):
            return model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":
                raise
            return getattr(super().__getattr__("_module"), name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None, "head_losses": None}

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
