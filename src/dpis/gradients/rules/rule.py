"""What a rule is: how one torch function treats the gradients of its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpis.gradients.factors import Factor
from dpis.gradients.layout import Layout

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Call:
    """One call of a torch function that has trainable parameters among its arguments.

    Attributes:
        function: the torch function.
        args: its positional arguments, as given: parameters are the real ones, not detached.
        kwargs: its keyword arguments, as given.
        parameters: the tensors among the arguments (lists included) that are trainable parameters,
            views of some, or computed from parameters alone. Only these need factors.
        record_order: only for packed sequences that were sorted: entry ``j`` is the record that
            stands at place ``j`` of the packed batch. None means that records stand in order.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    parameters: tuple[Tensor, ...] = ()
    record_order: Tensor | None = None

    def result(self) -> Any:
        """What the function returns."""
        return self.function(*self.args, **self.kwargs)

    def wants(self, tensor: Any) -> bool:
        """Whether this argument is a parameter whose gradients are asked for."""
        return any(tensor is parameter for parameter in self.parameters)

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments that are not parameters."""
        values = (*self.args, *self.kwargs.values())
        return tuple(v for v in values if isinstance(v, Tensor) and not self.wants(v))

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument of the function, given by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def in_full_precision(self) -> Call:
        """The same call with half-precision arguments in float32 (parameters stay themselves)."""
        if not any(value.dtype in HALF for value in self.inputs()):
            return self

        def wide(argument: Any) -> Any:
            known = not isinstance(argument, Tensor) or self.wants(argument)
            return argument if known else widened(argument)

        kwargs = {name: wide(argument) for name, argument in self.kwargs.items()}
        return replace(self, args=tuple(map(wide, self.args)), kwargs=kwargs)


@dataclass(frozen=True)
class Ran:
    """What running a call gave.

    Attributes:
        result: what the caller of the torch function receives.
        watched: tensors of the autograd graph, each of which requires a gradient; the rule is
            handed their gradients. Mostly the result itself. Backward runs only as far as the
            earliest watched tensor: no weight gradient is computed, nor an input gradient of
            the first layer, even though the parameters are not detached.
        saved: what ``Rule.factors`` needs from the forward pass.
        held: the tensors in ``saved`` that must not change in place before ``factors`` is called.
        bytes_inside: what is kept for the backward pass besides ``held`` and ``watched``.
        batch_shaped: sizes inside follow the values of the batch (the lengths of its records), so that the last bits
            of a record's result may depend on who shares its batch.
    """

    result: Any
    watched: tuple[Tensor, ...]
    saved: Any
    held: tuple[Tensor, ...] = ()
    bytes_inside: int = 0
    batch_shaped: bool = False


class WatchedGradient(NamedTuple):
    """The gradient of the summed loss by a watched tensor, and where the records are in it."""

    grad: Tensor
    """In float32 or better."""
    layout: Layout


Watched = Sequence[WatchedGradient]
# The tensor of ``Call.parameters`` and the gradients of all rows with respect to it.
ParameterFactor = tuple[Tensor, Factor]
Factors = Iterable[ParameterFactor]


class Rule(ABC):
    """How the gradients of all records follow from one call and the gradients of its output.

    A rule is stateless: all it knows travels through ``saved``.
    """

    @property
    def reads_parameters(self) -> bool:
        """Whether `factors` reads the values of parameters, not their shapes alone.

        A sharded model has freed them by then, and must gather them once more.
        """
        return True

    def run(self, call: Call) -> Ran:
        """Run the forward pass of the call and say what to keep.

        A rule overrides this only where the gradients it needs are not those of the function's
        output. Recurrence does: it watches the pre-activations of the gates.
        """
        result = self.compute(call)
        return Ran(result, watched=(result,), saved=call, held=call.inputs())

    def compute(self, call: Call) -> Any:
        """What the function returns, to the last few bits."""
        return call.result()

    def accepts(self, call: Call) -> bool:
        """Whether the rule covers this call; the general fallback takes those it does not."""
        return True

    def pull_back(self, call: Call, grads: Tensor) -> Factors | None:
        """Factors of a call that does not depend on the batch, such as a table of positions.

        Args:
            call: the call, which all records share.
            grads: each record's gradient of the call's result, ``[records, *result.shape]``.

        Returns:
            Factors over records; None leaves it to autograd, which is right for every function.
        """
        return None

    @property
    def pulls_back(self) -> bool:
        """Whether `pull_back` needs no help from autograd."""
        return type(self).pull_back is not Rule.pull_back

    @abstractmethod
    def factors(self, saved: Any, watched: Watched) -> Factors:
        """The factors of every parameter the call wants. Pure.

        Args:
            saved: what ``run`` put into ``Ran.saved`` (the ``Call``, unless overridden). The inputs
                of a ``Call`` arrive in float32 or better.
            watched: the gradients of the watched tensors, in their order.

        Returns:
            Pairs of a parameter and its factor. The factor's records are the *rows* that
            ``Layout.rows_first`` puts in front; the caller folds the rows of one record together.
        """


RuleTable = dict[Callable[..., Any], Rule]


def differentiable(result: Any) -> tuple[Tensor, ...]:
    """The tensors of a result through which gradients pass."""
    tensors = result if isinstance(result, tuple | list) else (result,)
    return tuple(t for t in tensors if isinstance(t, Tensor) and t.requires_grad)


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float32 if it is in half precision."""
    return tensor.float() if tensor.dtype in HALF else tensor


def name_of(function: Callable[..., Any]) -> str:
    """A function's name, for messages."""
    return getattr(function, "__name__", str(function))
