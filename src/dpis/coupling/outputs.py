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
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dpis import batches
from dpis.coupling.loss import refuse_batch_wide_mean
from dpis.coupling.loss_tape import LossTape
from dpis.errors import MisuseError

_LEAVES: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
"""Where gradients of outputs arrive."""
_TAPES: MutableMapping[Tensor, weakref.ref[LossTape]] = WeakTensorKeyDictionary()
"""A weak reference to the tape of a watched tensor, where there is one."""


def watched_outputs(outputs: Any, tape: LossTape | None = None) -> Any:
    """The same outputs, their tensors watched; copies, so that they may be changed in place as any other output.

    Args:
        outputs: of the model, leaves where they are open to gradients.
        tape: writes down what is made of them, and looks at a loss before it is differentiated; None: nobody does.
    """

    def watched(leaf: Tensor) -> Tensor:
        if not leaf.requires_grad:
            return leaf
        _LEAVES[leaf] = True
        copy = leaf.clone().as_subclass(WatchedOutput)
        if tape is not None:
            _TAPES[copy] = weakref.ref(tape)
            tape.begin(copy, leaf)
        return copy

    return batches.apply(watched, outputs)


def unwatch(tape: LossTape) -> None:
    """The step is taken: nothing is written down from now on, and what has no gradient is a plain tensor again."""
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tape.close():
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
        refuse_batch_wide_mean(function, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            given = list(batches.tensors((args, kwargs)))
            if torch.is_grad_enabled():
                _refuse_strangers(given)
            tape = next((tape for tape in map(_open_tape_of, given) if tape), None)
            if function is Tensor.backward and tape is not None:
                tape.look(tape, args[0], args[1] if len(args) > 1 else kwargs.get("gradient"))
            call = None if tape is None else tape.before(function, args, kwargs)
        result = super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            for written in (args[0] if args else None, kwargs.get("out")):
                _reconsider(written, tape)
            if isinstance(result, WatchedOutput):
                result = _passed_on(result, tape)
            elif isinstance(result, tuple | list):
                result = batches.apply(lambda tensor: _passed_on(tensor, tape), result)
            if tape is not None and call is not None:
                tape.after(call, result)
        return result


def _open_tape_of(tensor: Tensor) -> LossTape | None:
    known = _TAPES.get(tensor)
    tape = None if known is None else known()
    return tape if tape is not None and tape.open else None


def _reconsider(written: object, tape: LossTape | None) -> None:
    """A plain tensor that outputs were written into (``rows[:] = outputs``) is an output too.

    What was made of outputs and then opened to gradients of its own (``scale.requires_grad_()``) is none.
    """
    if not isinstance(written, Tensor) or not written.requires_grad:
        return
    if type(written) is Tensor and not written.is_leaf:
        written.__class__ = WatchedOutput
        _passed_on(written, tape)
    elif isinstance(written, WatchedOutput) and written.is_leaf:
        written.__class__ = Tensor  # type: ignore[assignment]


def _passed_on(tensor: Tensor, tape: LossTape | None) -> Tensor:
    if not isinstance(tensor, WatchedOutput):
        return tensor
    if tape is not None:
        _TAPES[tensor] = weakref.ref(tape)
    elif not tensor.requires_grad:
        return tensor.as_subclass(Tensor)
    return tensor


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
        if arrives_at is not None and arrives_at not in _LEAVES:
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return tensor.is_leaf
