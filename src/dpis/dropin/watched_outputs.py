"""Outputs that watch what is done with them: a loss that couples records is refused where it is computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dpis import batches
from dpis.coupling.loss_tape import LossTape
from dpis.errors import CouplingError, MisuseError

_WEIGHTED = {
    functional.cross_entropy,
    functional.nll_loss,
    functional.multi_margin_loss,
}


_MARK = "_output_of_a_private_model"


class WatchedOutput(Tensor):
    """A tensor as any other, until a loss is made of it that couples records.

    Whatever is computed from it with a gradient is watched too; what has none (``loss.detach()``) is a plain tensor,
    unless there is a tape: then it is watched until the step.

    Attributes:
        tape: writes down what is done with it, and looks at a loss before it is differentiated; None: nobody does.
    """

    tape: LossTape | None = None

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at the call, then let it happen."""
        kwargs = kwargs or {}
        if function in _WEIGHTED:
            _refuse_batch_wide_mean(function, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            given = list(batches.tensors((args, kwargs)))
            if torch.is_grad_enabled():
                _refuse_strangers(given)
            tape = next((tape for tape in map(_tape_of, given) if tape), None)
            if function is Tensor.backward and tape is not None:
                tape.look(tape, args[0], args[1] if len(args) > 1 else kwargs.get("gradient"))
            call = None if tape is None else tape.before(function, args, kwargs)
        result = super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            for written in (args[0] if args else None, kwargs.get("out")):
                _watch_from_now_on(written, tape)
            if isinstance(result, WatchedOutput):
                result = _passed_on(result, tape)
            elif isinstance(result, tuple | list):
                result = batches.apply(lambda tensor: _passed_on(tensor, tape), result)
            if tape is not None and call is not None:
                tape.after(call, result)
        return result


def _tape_of(tensor: Tensor) -> LossTape | None:
    tape = tensor.tape if isinstance(tensor, WatchedOutput) else None
    return tape if tape is not None and tape.open else None


def _watch_from_now_on(written: object, tape: LossTape | None) -> None:
    """A plain tensor that outputs were written into (``rows[:] = outputs``) is an output too."""
    if type(written) is Tensor and written.requires_grad and not written.is_leaf:
        written.__class__ = WatchedOutput
        written.tape = tape  # type: ignore[attr-defined]


def _passed_on(tensor: Tensor, tape: LossTape | None) -> Tensor:
    if not isinstance(tensor, WatchedOutput):
        return tensor
    if not tensor.requires_grad and tape is None:
        return tensor.as_subclass(Tensor)
    tensor.tape = tape
    return tensor


def watched_outputs(outputs: Any, tape: LossTape | None = None) -> Any:
    """The same outputs, their tensors watched; copies, so that they may be changed in place as any other output.

    Args:
        outputs: of the model.
        tape: to write down what is made of them.
    """

    def watched(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        setattr(tensor, _MARK, True)
        copy = tensor.clone().as_subclass(WatchedOutput)
        copy.tape = tape
        if tape is not None:
            tape.begin(copy, tensor)
        return copy

    return batches.apply(watched, outputs)


def _refuse_strangers(given: Sequence[Tensor]) -> None:
    """What is trained beside the model sees records without noise, and shows them to the model in the next step."""
    if not any(isinstance(tensor, WatchedOutput) and tensor.requires_grad for tensor in given):
        return
    for tensor in given:
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
