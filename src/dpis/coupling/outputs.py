"""Outputs that watch what is done with them: a loss that couples records is refused where it is computed.

They are tensors of a class of their own, as torch offers it: whatever is computed from them is of this class too, and
passes through `WatchedOutput.__torch_function__`. Nothing is hung on tensors; which belong to a step is kept beside
them, for as long as they live. Classes are changed where nothing else would do: of a plain tensor that outputs were
written into, of one that the loop begins to train, and at the end of a step of what has no gradient, so that a figure
that a loop keeps is a plain tensor.

A `TorchFunctionMode` from the forward pass to the step would need no class, and would see less. It belongs to the
thread that entered it, and a loss may be computed in another. It would be left elsewhere than it was entered, among
modes that the loop enters and leaves in between (``with torch.device(...)``), each of which takes the topmost away. And
after an error in the loop it would go on to watch all that the process does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dpis import batches
from dpis.coupling.loss_watch import LossWatch
from dpis.coupling.weight_penalty import refuse_penalty
from dpis.errors import MisuseError

_LEAVES: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
"""Where gradients of outputs arrive."""
_WATCHES: MutableMapping[Tensor, weakref.ref[LossWatch]] = WeakTensorKeyDictionary()
"""A weak reference to the watch of a watched tensor, for as long as its step lasts."""


def watched_outputs(outputs: Any, watch: LossWatch | None = None) -> Any:
    """The same outputs, their tensors watched; copies, so that they may be changed in place as any other output.

    Args:
        outputs: of the model, leaves where they are open to gradients.
        watch: is told what is made of them; None: nobody is.
    """

    def watched(leaf: Tensor) -> Tensor:
        if not leaf.requires_grad:
            return leaf
        _LEAVES[leaf] = True
        copy = leaf.clone().as_subclass(WatchedOutput)
        if watch is not None:
            _WATCHES[copy] = weakref.ref(watch)
            watch.begin(copy, leaf)
        return copy

    return batches.apply(watched, outputs)


def unwatch(watch: LossWatch) -> None:
    """The step is taken: nothing is written down from now on, and what has no gradient is a plain tensor again."""
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in watch.close():
            if isinstance(tensor, WatchedOutput) and not tensor.requires_grad:
                tensor.__class__ = Tensor  # type: ignore[assignment]


class WatchedOutput(Tensor):
    """A tensor as any other, until a loss is made of it that couples records.

    Whatever is computed from it with a gradient is watched too; what has none (``loss.detach()``) is a plain tensor,
    unless there is a tape: then it is watched until the step.
    """

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
        if function in _TELL_NO_NUMBERS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            given = list(batches.tensors((args, kwargs)))
            watch = next((watch for watch in map(_watch_of, given) if watch), None)
            if torch.is_grad_enabled():
                _refuse_strangers(function, given)
        own = None if watch is None else _own_mean(watch, function, args, kwargs)
        if own is not None:
            return own
        if function is Tensor.backward and watch is not None:
            return _backward(watch, *args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if watch is not None:
                watch.scaled(function, args)
            tape = watch.tape if watch is not None else None
            tape = tape if tape is not None and tape.open else None
            call = None if tape is None else tape.before(function, args, kwargs)
        result = super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            for written in (args[0] if args else None, kwargs.get("out")):
                _reconsider(written, watch)
            if watch is not None:
                watch.refuse_rounded(result)
                watch.follow(function, args, kwargs, result)
            if isinstance(result, WatchedOutput):
                result = _passed_on(result, watch)
            elif isinstance(result, tuple | list):
                result = batches.apply(lambda tensor: _passed_on(tensor, watch), result)
            if tape is not None and call is not None:
                tape.after(call, result)
        return result


def _own_mean(
    watch: LossWatch, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """What stands for a mean, watched: step by step where it is written down, else as a whole."""
    if watch.tape is not None and watch.tape.open:
        return watch.own_mean(function, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        own = watch.own_mean(function, args, kwargs)
        if own is None:
            return None
        watch.refuse_rounded(own)
        return _passed_on(own.as_subclass(WatchedOutput), watch)


def _backward(
    watch: LossWatch, loss: Tensor, gradient: Tensor | None = None, *args: Any, **kwargs: Any
) -> None:
    """``loss.backward(gradient, ...)``, begun as the watch says."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient = watch.before_backward(loss, gradient)
        with watch.differentiating():
            loss.backward(gradient, *args, **kwargs)  # type: ignore[no-untyped-call]


def _watch_of(tensor: Tensor) -> LossWatch | None:
    known = _WATCHES.get(tensor)
    return None if known is None else known()


def _reconsider(written: object, watch: LossWatch | None) -> None:
    """A plain tensor that outputs were written into (``rows[:] = outputs``) is an output too.

    What was made of outputs and then opened to gradients of its own (``scale.requires_grad_()``) is none.
    """
    if not isinstance(written, Tensor) or not written.requires_grad:
        return
    if type(written) is Tensor and not written.is_leaf:
        written.__class__ = WatchedOutput
        _passed_on(written, watch)
    elif isinstance(written, WatchedOutput) and written.is_leaf:
        written.__class__ = Tensor  # type: ignore[assignment]


def _passed_on(tensor: Tensor, watch: LossWatch | None) -> Tensor:
    if not isinstance(tensor, WatchedOutput):
        return tensor
    taped = watch is not None and watch.tape is not None and watch.tape.open
    if not tensor.requires_grad and not taped:
        return tensor.as_subclass(Tensor)
    if watch is not None:
        _WATCHES[tensor] = weakref.ref(watch)
    return tensor


def _refuse_strangers(function: Callable[..., Any], given: Sequence[Tensor]) -> None:
    """What is trained beside the model sees records without noise, and shows them to the model in the next step.

    Raises:
        MisuseError: if any is among the tensors that a function is given with outputs.
    """
    if not any(isinstance(tensor, WatchedOutput) and tensor.requires_grad for tensor in given):
        return
    for tensor in given:
        if isinstance(tensor, WatchedOutput) or not tensor.requires_grad:
            continue
        leads_to = list(_trained_by(tensor))
        if leads_to:
            refuse_penalty(function, tensor, leads_to)
            raise MisuseError(_TRAINED_BESIDE)


def _trained_by(tensor: Tensor) -> Iterator[Tensor]:
    """Where a gradient of it would arrive, but for outputs of the model."""
    if tensor.is_leaf:
        if tensor not in _LEAVES:
            yield tensor
        return
    waiting: list[Any] = [tensor.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        arrives_at = getattr(node, "variable", None)
        if arrives_at is not None and arrives_at not in _LEAVES:
            yield arrives_at
        waiting.extend(following for following, _ in node.next_functions)


_ATTRIBUTES = "shape", "ndim", "dtype", "device", "requires_grad", "is_leaf", "_version"
_METHODS = "size", "dim", "numel", "is_floating_point", "__len__"
_TELL_NO_NUMBERS: frozenset[Any] = frozenset(
    {*(getattr(Tensor, name) for name in _METHODS)}
    | {getattr(Tensor, name).__get__ for name in _ATTRIBUTES}
)
"""What a loop asks of a tensor all the time, and what nothing is computed from."""

_TRAINED_BESIDE = (
    "a tensor that requires a gradient was combined with outputs of the private model: a head, a loss with weights of "
    "its own, a penalty that is no plain sum of squared weights added to the loss. Its gradient is neither clipped nor "
    "noised, and what it learns reaches the model. Make one model of all that is trained, leave penalties on weights "
    "to the optimizer's weight_decay (lambda * sum of squares is weight_decay=2*lambda), and run a fixed model (a "
    "teacher) under torch.no_grad()"
)
