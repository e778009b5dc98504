"""The wrapped optimizer: its step is the one noisy release of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from dpis.dropin.session import Session
from dpis.errors import InputError, MisuseError

PARTS_OF_A_STEP = frozenset(
    {"grad_samples", "clip_and_accumulate", "add_noise", "scale_grad", "pre_step"}
)
"""What Opacus's optimizers let people do one by one."""


class PrivateOptimizer(Optimizer):
    """Sets every ``p.grad`` to the noisy gradient of the batch, and lets the optimizer it wraps step.

    Groups, state and defaults are those of the wrapped optimizer, so learning rate schedulers work on either. After a
    step ``p.grad`` is its noisy gradient, which may be released, until `zero_grad` or the next step.
    """

    def __init__(self, original: Optimizer, module: nn.Module, session: Session) -> None:
        self.original_optimizer = original
        self._session = session
        self._skip = False
        self._step_hook: Callable[[PrivateOptimizer], Any] | None = None
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
        if name in PARTS_OF_A_STEP:
            raise MisuseError(
                f"a private optimizer has no {name}: gradients of single records are never held, and clipping, noise "
                "and step are one release. Call step(); afterwards p.grad is the noisy gradient"
            )
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
        """``z`` of the steps to come, each of which is charged with the noise it has.

        It may be set by a schedule that was fixed in advance (`dpis.schedulers`); batches that workers have fetched
        already keep theirs. Where an epsilon is promised, to no less than was planned.
        """
        return self._session.mechanism.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, noise_multiplier: float) -> None:
        self._session.mechanism.set_noise_multiplier(noise_multiplier)

    @property
    def max_grad_norm(self) -> float:
        """The clip norm ``C`` of the steps to come. It may be set, not by looking at private values."""
        return self._session.mechanism.clip_norm

    @max_grad_norm.setter
    def max_grad_norm(self, max_grad_norm: float) -> None:
        self._session.mechanism.set_clip_norm(max_grad_norm)

    @property
    def expected_batch_size(self) -> int:
        """``b``, public. How many records are looked at is private, and another number."""
        return self._session.mechanism.plan.workload.batch_size

    @property
    def accumulated_iterations(self) -> int:
        """1: every step is of one draw, in however many parts it comes."""
        return 1

    @property
    def params(self) -> list[nn.Parameter]:
        """What is trained."""
        return list(self._session.gradients.parameters.values())

    def attach_step_hook(self, fn: Callable[[PrivateOptimizer], Any]) -> None:
        """Call ``fn(optimizer)`` in every step, between noise and update: it sees noisy gradients, and may change them.

        One at a time, as in Opacus. Accounting does not hang on it.
        """
        self._step_hook = fn

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """Read by an enabled ``GradScaler`` alone, before it steps."""
        raise MisuseError(
            "an enabled GradScaler cannot step a private optimizer: it leaves out steps whose gradients are not "
            "finite, which tells about the records, and the loss that it scales would clip every gradient. Leave it "
            "out, or make it by GradScaler(enabled=False); bfloat16 needs no scaling. Nothing was released"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that have arrived since the last step, and the noisy ones of that."""
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
        if self._step_hook is not None:
            self._step_hook(self)
        self._session.stepping = True
        try:
            self.original_optimizer.step()
        finally:
            self._session.stepping = False
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
