"""Outputs that watch what is done with them: a loss that couples records is refused where it is computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from dpis.gradients import CouplingError, batches

_WEIGHTED = {
    functional.cross_entropy,
    functional.nll_loss,
    functional.multi_margin_loss,
}


class WatchedOutput(Tensor):
    """A tensor as any other, until a loss is made of it that couples records.

    Attributes:
        before_backward: looks at a loss before it is differentiated.
    """

    before_backward: ClassVar[Callable[[Tensor], None] | None] = None

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
        if function is Tensor.backward and cls.before_backward is not None:
            cls.before_backward(args[0].as_subclass(Tensor))
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def watched_outputs(outputs: Any, before_backward: Callable[[Tensor], None] | None = None) -> Any:
    """The same outputs, their tensors watched; copies, so that they may be changed in place as any other output.

    Args:
        outputs: of the model.
        before_backward: to look at a loss of theirs before it is differentiated.
    """
    kind: type[Tensor] = WatchedOutput
    if before_backward is not None:
        kind = type("WatchedOutput", (WatchedOutput,), {"before_backward": before_backward})
    return batches.apply(lambda t: t.clone().as_subclass(kind) if t.requires_grad else t, outputs)


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
