"""The wrapped optimizer: its step is the one noisy release of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dpis.engine.session import MisuseError, Session
from dpis.errors import InputError


class PrivateOptimizer(Optimizer):
    """Sets every ``p.grad`` to the noisy gradient of the batch, then lets the optimizer it wraps step.

    Groups, state and defaults are those of the wrapped optimizer, so learning rate schedulers work on either.
    """

    def __init__(self, original: Optimizer, module: nn.Module, session: Session) -> None:
        _require_same_parameters(original, module)
        self.original_optimizer = original
        self._session = session
        self._skip = False
        self._optimizer_step_pre_hooks = original._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = original._optimizer_step_post_hooks
        original.register_step_pre_hook(self._refuse_unguarded)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the wrapped optimizer."""
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """Of the wrapped optimizer."""
        return self.original_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """Of the wrapped optimizer."""
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original_optimizer.defaults = defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that have arrived since the last step."""
        self._session.clear()
        self.original_optimizer.zero_grad(set_to_none)

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """The next `step` belongs to a part of a batch: it adds up, and neither releases nor steps."""
        self._skip = do_skip

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Release the noisy gradient of the batch, and step."""
        if closure is not None:
            raise MisuseError(
                "a closure computes the loss again, and every gradient of it would have to be paid for: call backward "
                "yourself, then step()"
            )
        if self._skip:
            self._session.fold()
            return None
        update = self._session.release()
        for name, parameter in self._session.gradients.parameters.items():
            parameter.grad = update[name].to(parameter.dtype)
        self._session.stepping = True
        try:
            return self.original_optimizer.step()
        finally:
            self._session.stepping = False

    def state_dict(self) -> dict[str, Any]:
        """Of the wrapped optimizer."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimizer."""
        self.original_optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the plan was made for the parameters there were."""
        raise MisuseError(
            "parameters cannot be added to a private optimizer: make it private again with all of them"
        )

    def _refuse_unguarded(self, *_: object) -> None:
        if not self._session.stepping:
            raise MisuseError(
                "the original optimizer was stepped: its gradients are neither clipped nor noised, so nothing would be "
                "private. Step the optimizer that make_private returned"
            )

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.original_optimizer!r})"


def _require_same_parameters(optimizer: Optimizer, module: nn.Module) -> None:
    stepped = {
        id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    }
    trained = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    missing = [name for key, name in trained.items() if key not in stepped]
    if missing or stepped - trained.keys():
        what = (
            f"does not step {', '.join(missing[:3])}"
            if missing
            else "steps parameters of another model"
        )
        raise InputError(
            f"the optimizer {what}: what is trained must be what is protected. Make the optimizer from this module's "
            "parameters, after ModuleValidator.fix"
        )
