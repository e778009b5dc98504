"""One backward pass: from the uses of a forward pass to the gradients of every parameter, as factors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dpis.errors import GradientError
from dpis.gradients.call_plan import GeneralRuleError, layouts_of
from dpis.gradients.evidence import refuse_gradients_of
from dpis.gradients.factors import Dense
from dpis.gradients.layout import Layout
from dpis.gradients.parts import Part, Place
from dpis.gradients.rules.general import General
from dpis.gradients.rules.rule import (
    Call,
    Factors,
    ParameterFactor,
    WatchedGradient,
    name_of,
    widened,
)
from dpis.gradients.sharding import Owners, Sharding
from dpis.gradients.verdicts import Beyond, Placed, Plan
from dpis.gradients.watch import Computed, Shown, Use, Watch, names_in


def run_backward(
    watch: Watch,
    plan: Plan,
    total_loss: Tensor,
    records: int,
    rows: int,
    real: int,
    sharding: Sharding,
    turns: Sequence[Owners],
) -> dict[str, list[Part]]:
    """Run backward, and give every parameter a part for each of its uses.

    Args:
        watch: what the forward pass did, all of it in the plan.
        plan: where the records are.
        total_loss: the sum of the losses of all records.
        records: how many there are.
        rows: how many rows they have together.
        real: only the losses of the first so many records are in the sum.
        sharding: how the model is sharded.
        turns: which sharded modules are gathered once more, one turn after the other, for the rules that read them.
    """
    uses = [use for use in watch.uses if sharding.is_sharded or is_placed(use, plan)]
    parts: dict[str, list[Part]] = defaultdict(list)
    with sharding.ranks.in_a_pass():
        gradients = watch.backward(total_loss, uses)
    needed = [sharding.needed_by(use, watch) for use in uses]
    if not set(needed) <= {(), *turns}:
        raise GradientError(_NO_TURN)  # its part of the gradient would be left out
    for owners in ((), *turns):
        own = [i for i, modules in enumerate(needed) if real and modules == owners]
        with sharding.gathered(owners), torch.no_grad():
            for i in own:
                use, grads = uses[i], gradients[i]
                if all(grad is None for grad in grads) or not is_placed(use, plan):
                    continue  # the loss does not depend on it, or the fallback sees to it
                layouts = layouts_of(use, plan, rows) or ()
                if real < records:
                    refuse_gradients_of(slice(real, None), records, use, grads, layouts)
                for tensor, factor in _factors(use, grads, layouts):
                    folded = factor.fold(factor.records // records)
                    for name, part in _parts(watch, (tensor, folded)):
                        parts[name].append(part)
    return parts


def is_placed(use: Use, plan: Plan) -> bool:
    """Whether the plan knows where the records are in a use."""
    return isinstance(plan.get(use.key), Placed)


def left_to_fallback(watch: Watch, plan: Plan) -> dict[str, str]:
    """The parameters that need the fallback, with the reason."""
    return {
        name: f"{name_of(use.key[0])}: {verdict.reason}"
        for use in watch.uses
        if isinstance(verdict := plan[use.key], Beyond)
        for source in use.parameters
        for name in names_in(source.label)
    }


_NO_TURN = (
    "Sharded modules whose values are read after backward must be known when the forward pass ends, but more are asked "
    "for now: gradients would lack a part, and nothing could be clipped. Leave the model as it is between forward and "
    "backward."
)


def _factors(use: Use, grads: Sequence[Tensor | None], layouts: Sequence[Layout]) -> Factors:
    """What the rule makes of a use, its inputs and gradients in float32 or better."""
    use.require_unchanged()
    saved = use.saved.in_full_precision() if isinstance(use.saved, Call) else use.saved
    known = next(grad for grad in grads if grad is not None)
    watched = [
        WatchedGradient(widened(known.new_zeros(shape) if grad is None else grad), layout)
        for grad, shape, layout in zip(grads, use.shapes, layouts, strict=True)
    ]
    if not isinstance(use.rule, General):
        return use.rule.factors(saved, watched)
    try:
        return list(use.rule.factors(saved, watched))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise GeneralRuleError(use.key) from error


def _parts(watch: Watch, of: ParameterFactor) -> Iterator[tuple[str, Part]]:
    """Give a factor to the parameter its tensor shows, or to all that it was computed from."""
    tensor, factor = of
    source = watch.source_of(tensor)
    if isinstance(source, Shown):
        yield source.name, Part(source.place, factor)
    elif isinstance(source, Computed):
        gradients = factor.explicit()
        pulled = source.rule.pull_back(source.call, gradients) if source.rule else None
        if pulled is None:
            yield from _by_autograd(watch, source, gradients)
        else:
            for origin in pulled:
                yield from _parts(watch, origin)


def _by_autograd(watch: Watch, source: Computed, gradients: Tensor) -> Iterator[tuple[str, Part]]:
    """``Jᵀ g_i`` for every record, where ``J`` is how the tensor depends on its parameters."""
    owners = {name: watch.parameters[name].parameter for name in names_in(source.label)}
    explicit = torch.autograd.grad(
        source.tensor,
        list(owners.values()),
        gradients.to(source.tensor.dtype),
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=True,
    )
    for (name, parameter), gradient in zip(owners.items(), explicit, strict=True):
        if gradient is not None:
            yield name, Part(Place.of(parameter, parameter), Dense(widened(gradient)))
