"""The wrapped optimizer: its step is the one noisy release of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from dpis.dropin.session import Session
from dpis.errors import InputError, MisuseError


class PrivateOptimizer(Optimizer):
    """Sets every ``p.grad`` to the noisy gradient of the batch, and lets the optimizer it wraps step.

    Groups, state and defaults are those of the wrapped optimizer, so learning rate schedulers work on either. Between
    steps parameters have no gradients: ``p.grad`` is None.
    """

    def __init__(self, original: Optimizer, module: nn.Module, session: Session) -> None:
        self.original_optimizer = original
        self._session = session
        self._skip = False
        self._protected = set(map(id, _stepped(original)))
        original.register_step_pre_hook(self._refuse_unguarded)

    # ── what belongs to the wrapped optimizer ────────────────────────────────────────────────────────

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

    def __getattr__(self, name: str) -> Any:
        if name == "original_optimizer":
            raise AttributeError(name)
        return getattr(self.original_optimizer, name)

    def state_dict(self) -> dict[str, Any]:
        """Of the wrapped optimizer."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimizer."""
        self.original_optimizer.load_state_dict(state_dict)

    # ── what is private ──────────────────────────────────────────────────────────────────────────────

    @property
    def noise_multiplier(self) -> float:
        """``z`` of the current epoch; before the first, that of the first."""
        terms, privacy = self._session.mechanism.terms, self._session.mechanism.plan.privacy
        if terms is None and privacy.adapts:
            raise InputError("the noise of an epoch is solved when it begins: ask again then")
        return privacy.planned_noise[0] if terms is None else terms.noise_multiplier

    @property
    def max_grad_norm(self) -> float:
        """The clip norm ``C``."""
        return self._session.mechanism.clip_norm

    @property
    def expected_batch_size(self) -> int:
        """``b``, public. How many records are looked at is private, and another number."""
        return self._session.mechanism.plan.workload.batch_size

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that have arrived since the last step."""
        self._session.clear()
        self.original_optimizer.zero_grad(set_to_none)

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """The next `step` only adds up. `BatchMemoryManager` does not need it; it is here for loops that call it."""
        self._skip = do_skip

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Release the noisy gradient of the batch, and step.

        Args:
            closure: runs the model on the batch, and backward; called once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._skip:
            self._session.fold()
            return loss
        self._refuse_strangers()
        update = self._session.release()
        if update is None:  # more parts of the batch are to come
            return loss
        parameters = self._session.gradients.parameters
        for name, parameter in parameters.items():
            parameter.grad = update[name].to(parameter.dtype)
        self._session.stepping = True
        try:
            self.original_optimizer.step()
        finally:
            self._session.stepping = False
            for parameter in parameters.values():
                parameter.grad = None
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: gradients of other parameters are neither clipped nor noised."""
        raise MisuseError(
            "parameters cannot be added to a private optimizer: their gradients would be neither clipped nor noised. "
            "Make it private again with all of them"
        )

    def _refuse_strangers(self) -> None:
        if any(id(parameter) not in self._protected for parameter in _stepped(self)):
            raise MisuseError(
                "the optimizer was given parameters after make_private: it would step them by gradients that are "
                "neither clipped nor noised. Make it private again with all of them. Nothing was released"
            )

    def _refuse_unguarded(self, *_: object) -> None:
        if not self._session.stepping:
            raise MisuseError(
                "the original optimizer was stepped: its gradients are neither clipped nor noised, so nothing would be "
                "private. Step the optimizer that make_private returned"
            )

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise MisuseError(
            "a private optimizer cannot be copied: two runs would use the same noise, which then cancels in the "
            "difference of their models. Use save_checkpoint"
        )

    def __reduce__(self) -> NoReturn:
        raise MisuseError("a private optimizer cannot be pickled: keep its state_dict()")

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.original_optimizer!r})"


def _stepped(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def checked_optimizer(optimizer: Optimizer, module: nn.Module) -> Optimizer:
    """The optimizer itself, if it steps what is trained and nothing else.

    Raises:
        InputError: with what to do instead.
    """
    if isinstance(optimizer, PrivateOptimizer):
        raise InputError("the optimizer is private already: give the one it was made from")
    if isinstance(optimizer, LBFGS):
        raise InputError(
            "LBFGS computes the loss several times a step, and each would have to be paid for. Use SGD or Adam"
        )
    stepped = {id(p) for p in _stepped(optimizer) if p.requires_grad}
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
            "parameters, after ModuleValidator.fix; freeze what is not trained"
        )
    return optimizer
