"""Sees every torch function that touches a trainable parameter while a forward pass runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dpis.errors import CouplingError, GradientError
from dpis.gradients.aligned import as_aligned
from dpis.gradients.parts import Place
from dpis.gradients.rules import RULES
from dpis.gradients.rules.composite import is_composite, opened
from dpis.gradients.rules.general import General
from dpis.gradients.rules.rule import Call, Rule, differentiable, name_of
from dpis.gradients.verdicts import Constant, Key, Placed, Plan, Shapes


@dataclass(frozen=True, eq=False)
class ParameterSource:
    """A tensor made of parameters alone: one of them, or (a subclass) computed from some.

    Attributes:
        tensor: the tensor, held so that its ``id`` stays its own.
        label: the same in every forward pass.
    """

    tensor: Tensor
    label: Hashable


@dataclass(frozen=True, eq=False)
class Shown(ParameterSource):
    """A parameter or a view of it."""

    name: str
    parameter: Tensor
    place: Place


@dataclass(frozen=True, eq=False)
class Computed(ParameterSource):
    """The result of a call that depends on no record: ``2 * scale``, a table of positions."""

    call: Call
    rule: Rule | None

    @property
    def by_autograd(self) -> bool:
        """Whether gradients pass from it to its parameters through autograd's own graph."""
        return self.rule is None or not self.rule.pulls_back


Sources = tuple[ParameterSource, ...]


def shown(parameters: Mapping[str, Tensor]) -> dict[str, Shown]:
    """Whole parameters, by name."""
    return {n: Shown(p, n, n, p, Place.of(p, p)) for n, p in parameters.items()}


@dataclass(frozen=True, eq=False)
class Use:
    """A call whose result depends on the records: what is kept until its gradients are known.

    Attributes:
        key: which call it was.
        rule: what treats it.
        parameters: where the parameters among its arguments come from.
        saved: what ``Rule.factors`` needs.
        held: the tensors in ``saved`` that must not change, each with its version.
        edges: the places of the watched tensors in autograd's graph.
        shapes: the shapes of the watched tensors.
        record_order: as in ``Call``.
        watched: the watched tensors themselves, if their values are of interest.
        bytes_inside: as in ``Ran``.
        batch_shaped: as in ``Ran``.
    """

    key: Key
    rule: Rule
    parameters: Sources
    saved: Any
    held: tuple[tuple[Tensor, int], ...]
    edges: tuple[GradientEdge, ...]
    shapes: Shapes
    record_order: Tensor | None = None
    watched: tuple[Tensor, ...] = ()
    bytes_inside: int = 0
    batch_shaped: bool = False

    def require_unchanged(self) -> None:
        """Every tensor that ``saved`` needs must still hold what the call saw.

        Raises:
            GradientError: if one does not.
        """
        if any(tensor._version != version for tensor, version in self.held):
            name = names_in(self.parameters[0].label)[0]
            raise GradientError(_CHANGED.format(function=name_of(self.key[0]), name=name))


class Watch(TorchFunctionMode):
    """Runs every call as it is, and keeps a ``Use`` of those that touch a parameter.

    Parameters are not detached. Backward is later run to the ``edges`` of the uses alone, so
    autograd skips every weight gradient by itself.

    Args:
        parameters: the trainable parameters, as `shown` gives them.
        plan: what is known of each call. The results of those that depend on no record are followed
            as the parameters are.
        keep_watched: keep the watched tensors too, to look at their values.
        may_run_again: whether parts of the forward pass may be run again on the way back.
    """

    def __init__(
        self,
        parameters: Mapping[str, Shown],
        plan: Plan,
        keep_watched: bool = False,
        may_run_again: bool = True,
    ) -> None:
        super().__init__()
        self.parameters = dict(parameters)
        self.uses: list[Use] = []
        self.ran_again = False
        self._replays = False
        self.constants: dict[Key, Shapes] = {}
        self.record_order: Tensor | None = None
        self._plan = plan
        self._keep_watched, self._may_run_again = keep_watched, may_run_again
        self._seen: Counter[tuple[Callable[..., Any], tuple[Hashable, ...]]] = Counter()
        self._sources: dict[int, ParameterSource] = {
            id(source.tensor): source for source in parameters.values()
        }

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.batch_norm and (kwargs.get("training") or True in args[5:6]):
            raise CouplingError(_BATCH_NORM)
        parameters = tuple(self._among(args, kwargs))
        if not parameters or not torch.is_grad_enabled():
            return as_aligned(function, by_name=bool(kwargs))(*args, **kwargs)
        tensors = tuple(source.tensor for source in parameters)
        call = Call(function, args, kwargs, tensors, self.record_order)
        rule = RULES.get(function)
        if rule is not None and rule.accepts(call):
            return self._run_with_rule(call, parameters, rule)
        if changes_its_argument(function):
            named = ", ".join(dict.fromkeys(n for p in parameters for n in names_in(p.label)))
            raise GradientError(_IN_PLACE.format(name_of(function), named))
        if is_composite(function):
            with self:
                return opened(function)(*args, **kwargs)
        return self._run_without_rule(call, parameters)

    def backward(self, loss: Tensor, uses: Sequence[Use]) -> list[list[Tensor | None]]:
        """The gradients of all watched tensors of some uses, in one backward pass that computes nothing else.

        What a checkpoint runs again on the way must run as it did the first time, so the watch stays on, unless it
        is known that nothing is (``ran_again`` tells).
        """
        edges = [edge for use in uses for edge in use.edges]
        if not edges or not loss.requires_grad:
            return [[None for _ in use.edges] for use in uses]
        self._replays = True
        self._seen.clear()
        try:
            with self if self._may_run_again else nullcontext():
                gradients = iter(opened(torch.autograd.grad)(loss, edges, allow_unused=True))
        except RuntimeError:
            for use in uses:
                use.require_unchanged()  # the likely reason, in plain words
            raise
        return [[next(gradients) for _ in use.edges] for use in uses]

    def know(self, name: str, tensor: Tensor) -> None:
        """From now on, this tensor is (also) the parameter of that name."""
        if id(tensor) not in self._sources:
            self.parameters |= shown({name: tensor})
            self._follow(self.parameters[name])

    def follows(self, tensor: Tensor) -> bool:
        """Whether the tensor is a parameter, or made of parameters alone."""
        return id(tensor) in self._sources

    def source_of(self, tensor: Tensor) -> ParameterSource:
        """Where a tensor that the watch follows comes from."""
        return self._sources[id(tensor)]

    def _among(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[ParameterSource]:
        """The sources among the arguments; lists of tensors are looked into."""
        sources = self._sources
        for argument in (*args, *kwargs.values()) if kwargs else args:
            if id(argument) in sources:
                yield sources[id(argument)]
            elif isinstance(argument, tuple | list):
                yield from (sources[id(item)] for item in argument if id(item) in sources)

    def _run_with_rule(self, call: Call, parameters: Sources, rule: Rule) -> Any:
        key = self._key(call, parameters)
        if isinstance(self._plan.get(key), Constant):
            return self._follow_computed(call.result(), key, call, rule)
        return self._keep_use(key, call, parameters, rule)

    def _run_without_rule(self, call: Call, parameters: Sources) -> Any:
        result = call.result()
        if self._follow_views(result, parameters):
            return result
        key = self._key(call, parameters)
        if isinstance(self._plan.get(key), Constant):
            return self._follow_computed(result, key, call, None)
        return self._keep_use(key, call, parameters, General())

    def _keep_use(self, key: Key, call: Call, parameters: Sources, rule: Rule) -> Any:
        """Run a call that depends on the records, and keep what its factors need."""
        planned = self._plan.get(key)
        if isinstance(planned, Placed) and isinstance(planned.rule, General):
            rule = planned.rule  # it knows which arguments have rows
        ran = rule.run(call)
        if self._replays:
            self.ran_again = True
        elif ran.watched:
            use = Use(
                key,
                rule,
                parameters,
                ran.saved,
                held=tuple((tensor, tensor._version) for tensor in ran.held),
                edges=tuple(get_gradient_edge(tensor) for tensor in ran.watched),
                shapes=tuple(tensor.shape for tensor in ran.watched),
                record_order=self.record_order,
                watched=ran.watched if self._keep_watched else (),
                bytes_inside=ran.bytes_inside,
                batch_shaped=ran.batch_shaped,
            )
            self.uses.append(use)
        return ran.result

    def _key(self, call: Call, parameters: Sources) -> Key:
        signature = (call.function, tuple(source.label for source in parameters))
        self._seen[signature] += 1
        return (*signature, self._seen[signature])

    def _follow(self, source: ParameterSource) -> None:
        self._sources[id(source.tensor)] = source

    def _follow_views(self, result: Any, parameters: Sources) -> bool:
        """Follow views of a parameter; whether nothing else in the result has a gradient."""
        tensors = differentiable(result)
        if not tensors:
            return True  # a shape, a type, a detached copy: no gradient passes here
        shown = parameters[0]
        if not isinstance(shown, Shown) or len(parameters) != 1:
            return all(id(tensor) in self._sources for tensor in tensors)
        owner = shown.parameter
        views = [(t, Place.of(t, owner)) for t in tensors if t is not owner and t._base is owner]
        odd = any(place.repeats or view.dtype != owner.dtype for view, place in views)
        if odd or not all(t is owner or t._base is owner for t in tensors):
            return False
        for view, place in views:
            self._follow(Shown(view, (shown.name, place), shown.name, owner, place))
        return True

    def _follow_computed(self, result: Any, key: Key, call: Call, rule: Rule | None) -> Any:
        """Follow what a call made of parameters alone, and hand it on."""
        tensors = differentiable(result)
        self.constants[key] = tuple(tensor.shape for tensor in tensors)
        for index, tensor in enumerate(tensors):
            self._follow(Computed(tensor, (key, index), call, rule))
        return result


def names_in(label: Any) -> list[str]:
    """The parameters that a label speaks of."""
    if isinstance(label, str):
        return [label]
    if isinstance(label[0], str):
        return [label[0]]  # a view
    _, labels, _ = label[0]  # the key of the call that made it
    return list(dict.fromkeys(name for part in labels for name in names_in(part)))


def made_of(label: Any) -> Iterator[Hashable]:
    """A label, and those of all that its tensor was computed from."""
    yield label
    if not isinstance(label, str) and not isinstance(label[0], str):
        for part in label[0][1]:
            yield from made_of(part)


def changes_its_argument(function: Callable[..., Any]) -> bool:
    """Whether a function works in place, by its name: ``mul_``, ``__imul__``, ``__setitem__``."""
    name = name_of(function)
    return name in _IN_PLACE_OPERATORS if name.startswith("__") else name.endswith("_")


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "matmul", "pow", "mod")
_IN_PLACE_OPERATORS = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS)}
_BATCH_NORM = (
    "Batch normalisation in training mode normalises by statistics of the whole batch: records then influence one "
    "another and the privacy guarantee does not hold. Use group_norm, or dpis.fix(module) where it is a layer."
)
_CHANGED = (
    "The input of a layer must stay as it was, but that of {function} with parameter {name} was changed in place after "
    "it was used: the gradients of its records can no longer be computed, so nothing could be clipped. Use the "
    "out-of-place operation (dpis.fix(module) turns in-place activations off)."
)
_IN_PLACE = (
    "Parameters must not be used in place, but {0} changes a tensor in place with parameter {1}: where gradients pass "
    "can then not be followed, so nothing could be clipped and no privacy promised. Write it out of place: "
    "h = h * scale instead of h *= scale."
)
