"""Outputs that watch what is done with them: a loss that couples records is refused where it is computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dpis.engine.session import MisuseError
from dpis.gradients import CouplingError, batches

_WEIGHTED = {
    functional.cross_entropy,
    functional.nll_loss,
    functional.multi_margin_loss,
}


Look = Callable[[Tensor], None]

_MARK = "_output_of_a_private_model"


class WatchedOutput(Tensor):
    """A tensor as any other, until a loss is made of it that couples records.

    Whatever is computed from it with a gradient is watched too; what has none (``loss.detach()``) is a plain tensor.

    Attributes:
        before_backward: looks at a loss before it is differentiated; None: nobody does.
    """

    before_backward: Look | None = None

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at the call, then let it happen."""
        if function in _WEIGHTED:
            _refuse_batch_wide_mean(function, args, kwargs or {})
        if torch.is_grad_enabled():
            _refuse_strangers((args, kwargs or {}))
        look = next((look for look in map(_look_of, batches.tensors(args)) if look), None)
        if function is Tensor.backward and look is not None:
            look(args[0].as_subclass(Tensor))
        result = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            for written in (args[0] if args else None, (kwargs or {}).get("out")):
                _watch_from_now_on(written, look)
            if isinstance(result, WatchedOutput):
                return _passed_on(result, look)
            if isinstance(result, tuple | list):
                return batches.apply(lambda tensor: _passed_on(tensor, look), result)
        return result


def _look_of(tensor: Tensor) -> Look | None:
    return tensor.before_backward if isinstance(tensor, WatchedOutput) else None


def _watch_from_now_on(written: object, look: Look | None) -> None:
    """A plain tensor that outputs were written into (``rows[:] = outputs``) is an output too."""
    if type(written) is Tensor and written.requires_grad and not written.is_leaf:
        written.__class__ = WatchedOutput
        written.before_backward = look  # type: ignore[attr-defined]


def _passed_on(tensor: Tensor, look: Look | None) -> Tensor:
    if not isinstance(tensor, WatchedOutput):
        return tensor
    if not tensor.requires_grad:
        return tensor.as_subclass(Tensor)
    tensor.before_backward = look
    return tensor


def watched_outputs(outputs: Any, before_backward: Look | None = None) -> Any:
    """The same outputs, their tensors watched; copies, so that they may be changed in place as any other output.

    Args:
        outputs: of the model.
        before_backward: to look at a loss of theirs before it is differentiated.
    """

    def watched(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        setattr(tensor, _MARK, True)
        copy = tensor.clone().as_subclass(WatchedOutput)
        copy.before_backward = before_backward
        return copy

    return batches.apply(watched, outputs)


def _refuse_strangers(given: Any) -> None:
    """What is trained beside the model sees records without noise, and shows them to the model in the next step."""
    for tensor in batches.tensors(given):
        if not isinstance(tensor, WatchedOutput) and tensor.requires_grad and _trained(tensor):
            raise MisuseError(
                "a tensor that requires a gradient was combined with outputs of the private model: a head, a loss with "
                "weights of its own, a penalty. Its gradient is neither clipped nor noised, and what it learns reaches "
                "the model. Make one model of all that is trained, leave penalties on weights to the optimizer's "
                "weight_decay, and run a fixed model (a teacher) under torch.no_grad()"
            )


def _trained(tensor: Tensor) -> bool:
    """Whether a gradient of it would arrive anywhere but at outputs of the model."""
    waiting: list[Any] = [tensor.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        arrives_at = getattr(node, "variable", None)
        if arrives_at is not None and not hasattr(arrives_at, _MARK):
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return tensor.is_leaf


def _refuse_batch_wide_mean(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    values = given.arguments
    if values.get("reduction", "mean") != "mean":
        return
    if values.get("weight") is not None and function is not functional.multi_margin_loss:
        raise CouplingError(_DIVIDED.format("class weights", "the sum of the weights"))
    target, ignored = values.get("target"), values.get("ignore_index")
    is_labels = isinstance(target, Tensor) and not target.is_floating_point()
    if is_labels and ignored is not None and bool(torch.any(target == ignored)):
        raise CouplingError(_DIVIDED.format("ignored targets", "how many targets count"))


_DIVIDED = (
    "A mean with {0} divides by {1} in the whole batch: every record's gradient then depends on the others and the "
    "guarantee would not hold. Use reduction='none', average each record's own terms, and take the mean of these"
)
