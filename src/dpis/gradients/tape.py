"""One forward and one backward pass, kept as factors: norms first, weighted sums later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from dpis.gradients.combine import Part, Place, squared_norms, weighted_sum
from dpis.gradients.factors import Dense, Factor
from dpis.gradients.layout import Layout
from dpis.gradients.plan import Beyond, Constant, GeneralRuleError, Placed, Plan
from dpis.gradients.rules.base import HALF, Call, name_of
from dpis.gradients.rules.general import General
from dpis.gradients.watch import Computed, Key, Shown, Use, Watch, names_in

Parts = Mapping[str, tuple[Part, ...]]


class UnplannedCallError(RuntimeError):
    """The forward pass made a call that the plan does not know: plan again."""


@dataclass(frozen=True, eq=False)
class Tape:
    """The gradients of every record of one chunk, as factors.

    Attributes:
        parameters: the trainable parameters by name.
        parts: for each, the factors of parts of it that do not overlap.
        records: how many records the chunk holds.
    """

    parameters: Mapping[str, Tensor]
    parts: Parts
    records: int

    def norms(self) -> Tensor:
        """``||grad_i||`` over all parameters, for every record, in float64."""
        with torch.no_grad(), full_precision(_device(self.parameters)):
            squares = [squared_norms(parts).double() for parts in self.parts.values() if parts]
            return reduce(torch.add, squares).sqrt()

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """``Σ_i weights_i grad_i``, parameter by parameter, in float32 or better.

        Records of weight zero take no part: they cost nothing, and a gradient among them that is
        not finite does no harm.
        """
        if weights.shape != (self.records,):
            raise ValueError(
                f"One weight a record is required: {self.records}; found shape "
                f"{tuple(weights.shape)}."
            )
        kept = weights.nonzero().squeeze(1)
        with torch.no_grad(), full_precision(_device(self.parameters)):
            if len(kept) < self.records:
                weights = weights[kept]
            return {
                name: weighted_sum(_select(parts, kept, self.records), parameter, weights)
                for name, parts, parameter in self._each()
            }

    def _each(self) -> Iterator[tuple[str, tuple[Part, ...], Tensor]]:
        for name, parameter in self.parameters.items():
            yield name, self.parts[name], parameter


def _select(parts: tuple[Part, ...], kept: Tensor, records: int) -> tuple[Part, ...]:
    if len(kept) == records:
        return parts
    return tuple(Part(part.place, part.factor.select(kept)) for part in parts)


def unplanned(watch: Watch, plan: Plan, rows: int) -> list[Key]:
    """The calls of a forward pass that the plan does not cover."""
    changed = [
        key
        for key, shapes in watch.constants.items()
        if not isinstance(known := plan[key], Constant) or shapes not in known.shapes
    ]
    unknown = [
        use.key
        for use in watch.uses
        if not isinstance(plan.get(use.key), Beyond) and layouts_of(use, plan, rows) is None
    ]
    return changed + unknown


def layouts_of(use: Use, plan: Plan, rows: int) -> list[Layout] | None:
    """Where the records are in the watched tensors of a use; None: not as planned."""
    verdict = plan.get(use.key)
    if not isinstance(verdict, Placed) or len(verdict.growths) != len(use.shapes):
        return None
    found = [g.layout(s, rows) for g, s in zip(verdict.growths, use.shapes, strict=True)]
    layouts = [layout for layout in found if layout is not None]
    return layouts if len(layouts) == len(found) else None


def backward(total_loss: Tensor, uses: Iterable[Use]) -> list[list[Tensor | None]]:
    """The gradients of all watched tensors, in one backward pass that computes nothing else."""
    uses = list(uses)
    edges = [edge for use in uses for edge in use.edges]
    if not edges:
        return []
    grads = iter(torch.autograd.grad(total_loss, edges, allow_unused=True))
    return [[next(grads) for _ in use.edges] for use in uses]


def collect(
    watch: Watch, plan: Plan, total_loss: Tensor, records: int, rows: int
) -> dict[str, list[Part]]:
    """The parts of every parameter's gradients, one for each use."""
    uses = [use for use in watch.uses if isinstance(plan[use.key], Placed)]
    parts: dict[str, list[Part]] = defaultdict(list)
    grads_of_uses = backward(total_loss, uses)
    with torch.no_grad():
        for use, grads in zip(uses, grads_of_uses, strict=True):
            if all(grad is None for grad in grads):
                continue
            for tensor, factor in _factors_or_refusal(use, grads, plan, rows):
                folded = factor.fold(factor.records // records)
                for name, part in _attribute(watch, tensor, folded):
                    parts[name].append(part)
    return parts


def beyond(watch: Watch, plan: Plan) -> dict[str, str]:
    """The parameters that need the fallback, with the reason."""
    reasons: dict[str, str] = {}
    for use in watch.uses:
        verdict = plan[use.key]
        if isinstance(verdict, Beyond):
            for source in use.parameters:
                for name in _owners(watch, source.tensor):
                    reasons[name] = f"{name_of(use.key[0])}: {verdict.reason}"
    return reasons


def _factors_or_refusal(
    use: Use, grads: list[Tensor | None], plan: Plan, rows: int
) -> Iterable[tuple[Tensor, Factor]]:
    if not isinstance(use.rule, General):
        return _factors(use, grads, plan, rows)
    try:
        return list(_factors(use, grads, plan, rows))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise GeneralRuleError(use.key) from error


def _factors(
    use: Use, grads: list[Tensor | None], plan: Plan, rows: int
) -> Iterable[tuple[Tensor, Factor]]:
    if use.changed_in_place():
        raise RuntimeError(
            _CHANGED.format(names_in(use.parameters[0].label)[0], name_of(use.key[0]))
        )
    layouts = layouts_of(use, plan, rows)
    if layouts is None:
        raise UnplannedCallError
    saved = use.saved.in_full_precision() if isinstance(use.saved, Call) else use.saved
    filled = []
    for grad, shape in zip(grads, use.shapes, strict=True):
        if grad is None:
            template = next(g for g in grads if g is not None)
            grad = template.new_zeros(shape)
        filled.append(grad.float() if grad.dtype in HALF else grad)
    return use.rule.factors(saved, filled, layouts)


def _attribute(watch: Watch, tensor: Tensor, factor: Factor) -> Iterator[tuple[str, Part]]:
    """To the parameters that the tensor shows, or was computed from."""
    source = watch.source_of(tensor)
    if isinstance(source, Shown):
        yield source.name, Part(source.place, factor)
        return
    assert isinstance(source, Computed)
    gradients = factor.explicit()
    factors = source.rule.pull_back(source.call, gradients) if source.rule is not None else None
    if factors is not None:
        for origin, pulled in factors:
            yield from _attribute(watch, origin, pulled)
        return
    owners = _owners(watch, tensor)
    batched = torch.autograd.grad(
        source.tensor,
        list(owners.values()),
        gradients.to(source.tensor.dtype),
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=True,
    )
    for (name, parameter), explicit in zip(owners.items(), batched, strict=True):
        if explicit is not None:
            explicit = explicit.float() if explicit.dtype in HALF else explicit
            yield name, Part(Place.of(parameter, parameter), Dense(explicit))


def _owners(watch: Watch, tensor: Tensor) -> dict[str, Tensor]:
    """The parameters that a followed tensor comes from."""
    source = watch.source_of(tensor)
    if isinstance(source, Shown):
        return {source.name: source.parameter}
    assert isinstance(source, Computed)
    owners: dict[str, Tensor] = {}
    for argument in source.call.parameters:
        owners |= _owners(watch, argument)
    return owners


def full_precision(device: torch.device) -> torch.autocast:
    """No autocast: norms and sums are computed in float32 or better whatever the forward pass."""
    return torch.autocast(device.type, enabled=False)


def _device(parameters: Mapping[str, Tensor]) -> torch.device:
    return next(iter(parameters.values())).device


_CHANGED = (
    "The input of {1} with parameter {0} was changed in place after it was used, so the gradients "
    "of its records can no longer be computed. Use the out-of-place operation (dpis.fix(module) "
    "turns in-place activations off)."
)
