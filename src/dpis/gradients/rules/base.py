"""What a rule is: how one torch function treats the gradients of its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dpis.gradients.factors.base import Factor
from dpis.gradients.layout import Layout


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

    def wants(self, tensor: Any) -> bool:
        """Whether this argument is a parameter whose gradients are asked for."""
        return any(tensor is parameter for parameter in self.parameters)


@dataclass(frozen=True)
class Ran:
    """What running a call gave.

    Attributes:
        result: what the caller of the torch function receives.
        watched: tensors of the autograd graph, each of which requires a gradient; the rule is handed
            their gradients. Mostly the result itself. The engine runs backward only as far as the
            earliest watched tensor: no weight gradient is computed, nor an input gradient of
            the first layer, even though the parameters are not detached.
        saved: what ``Rule.factors`` needs from the forward pass.
        held: the tensors in ``saved`` that must not be changed in place before ``factors`` is called.
    """

    result: Any
    watched: tuple[Tensor, ...]
    saved: Any
    held: tuple[Tensor, ...] = ()


# The tensor of ``Call.parameters`` and the gradients of all rows with respect to it.
ParameterFactor = tuple[Tensor, Factor]


class Rule(ABC):
    """How the gradients of all records follow from one call and the gradients of its output.

    A rule is stateless: all it knows travels through ``saved``.
    """

    def run(self, call: Call) -> Ran:
        """Run the forward pass of the call and say what to keep.

        A rule overrides this only where the gradients it needs are not those of the function's
        output. Recurrence does: it watches the pre-activations of the gates.
        """
        result = call.function(*call.args, **call.kwargs)
        return Ran(result, watched=(result,), saved=call, held=self.held(call))

    def held(self, call: Call) -> tuple[Tensor, ...]:
        """The arguments whose values ``factors`` will read."""
        return tuple(argument for argument in call.args[:1] if isinstance(argument, Tensor))

    @abstractmethod
    def factors(
        self, saved: Any, grads: Sequence[Tensor], layouts: Sequence[Layout]
    ) -> Iterable[ParameterFactor]:
        """The factors of every parameter the call wants. Pure.

        Args:
            saved: what ``run`` put into ``Ran.saved`` (the ``Call``, unless overridden).
            grads: the gradients of the summed loss with respect to the watched tensors.
            layouts: where the records are in each watched tensor.

        Returns:
            Pairs of a parameter and its factor. The factor's records are the *rows* that
            ``Layout.rows_first`` puts in front; the caller folds the rows of one record together.
        """
