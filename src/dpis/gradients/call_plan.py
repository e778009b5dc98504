"""What to do with every call that touches a parameter: found out once, on a few records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpis import batches
from dpis.batches import Batch
from dpis.coupling.neighbours import refuse_coupled_losses, with_one_changed
from dpis.errors import GradientError, InputError
from dpis.gradients.evidence import Trace, gradients_of, narrow
from dpis.gradients.layout import Growth, Layout, find_growth
from dpis.gradients.rules.general import General, arguments
from dpis.gradients.rules.rule import name_of
from dpis.gradients.sharding import Sharding
from dpis.gradients.verdicts import Beyond, Constant, Key, Placed, Plan, Verdict
from dpis.gradients.watch import Use, Watch, names_in
from dpis.group import Group


class GeneralRuleError(RuntimeError):
    """The general rule cannot treat a call. The recorder then leaves its parameters to the fallback."""

    def __init__(self, key: Key) -> None:
        super().__init__(f"torch.func cannot treat {key[0]} by itself")
        self.key = key
        self.names = ", ".join(name for label in key[1] for name in names_in(label))


@dataclass(frozen=True)
class Findings:
    """What a few forward passes tell about a model.

    Attributes:
        plan: what to do with every call.
        bytes_per_record: what the uses of one record hold.
        batch_shaped: whether sizes inside the model follow the values of the batch.
        ran_again: whether parts of the forward pass run again on the way back.
    """

    plan: Plan
    bytes_per_record: int
    batch_shaped: bool
    ran_again: bool


# Each round follows one more link in chains of calls that depend on no record.
MOST_ROUNDS = 50

# Runs the model and the loss under a watch: the loss of every row (or one for all).
WatchedLosses = Callable[[Watch, Batch], Tensor]


def make_plan(
    losses: WatchedLosses,
    new_watch: Callable[[Plan], Watch],
    batch: Batch,
    K: int,
    sharding: Sharding,
) -> Findings:
    """Judge every call from a few forward passes on two and three records.

    Two records against three show which dimensions grow with the batch: sizes are never guessed.
    Then each of the three is changed in turn, which shows whose entries move with it: where a model
    flattened records and positions into one dimension, and whether records couple.

    Args:
        losses: runs the model and the loss under a watch.
        new_watch: makes a watch that follows a plan.
        batch: at least three records.
        K: rows of a record.
        sharding: how the model is sharded. If it is, all ranks run equally many passes.

    Raises:
        CouplingError: if changing one record changes another's loss or activations.
        GradientError: if a parameter is computed by too many calls in a row.
    """

    def traced(plan: Plan, batch: Batch) -> Trace:
        watch = new_watch(plan)
        with torch.random.fork_rng():
            torch.manual_seed(0)  # the same dropout every time
            found = losses(watch, batch)
        if not isinstance(found, Tensor):
            raise InputError(_NO_TENSOR.format(type(found).__name__))
        return Trace(watch, {use.key: use for use in watch.uses}, watch.constants, found)

    device = batches.device(batch)
    two, three = (
        batches.take(batch, batches.rows_of_records(torch.arange(n, device=device), K))
        for n in (2, 3)
    )
    constants, judged, more = _follow_constants(traced, two, three, K, sharding.ranks)
    batch_shaped = any(use.batch_shaped for use in more.uses.values())
    ran_again = False
    for record in range(3):
        try:
            in_order = sharding.ranks.size > 1  # a pass that fails on one rank cannot be repeated
            moved = traced(constants, with_one_changed(three, record, K, keep_order=in_order))
        except RuntimeError:  # the model may want its records in some order
            if in_order:
                raise
            moved = traced(constants, with_one_changed(three, record, K, keep_order=True))
        refuse_coupled_losses(more.losses, moved.losses, record, K)
        batch_shaped |= _sizes(moved) != _sizes(more)
        judged = _narrowed(judged, more, moved, record, K, sharding.ranks)
        ran_again |= moved.watch.ran_again
        del moved  # before the next: a pass holds the model's activations
    for key, verdict in judged.items():
        if isinstance(verdict, Placed) and not all(growth.settled for growth in verdict.growths):
            judged[key] = Beyond("records and positions share a dimension in an unknown order")
    return Findings(constants | judged, _bytes(more) // 3, batch_shaped, ran_again)


def _narrowed(judged: Plan, before: Trace, moved: Trace, record: int, K: int, ranks: Group) -> Plan:
    """The verdicts, without the orders that contradict what moved when one record was changed."""
    gradients = gradients_of(moved, record, K, ranks)
    narrowed = dict(judged)
    for key, verdict in judged.items():
        if isinstance(verdict, Placed):
            after, own = moved.uses.get(key), gradients.get(key, [])
            growths = narrow(verdict.growths, before.uses[key], after, own, record, K)
            narrowed[key] = replace(verdict, growths=growths)
    return narrowed


def _follow_constants(
    traced: Callable[[Plan, Batch], Trace], two: Batch, three: Batch, K: int, ranks: Group
) -> tuple[Plan, Plan, Trace]:
    """Follow the calls that depend on no record, link by link, until a round shows no other.

    Returns:
        These calls; the verdicts on all others; and the pass on three records that shows them.
    """
    constants: Plan = {}
    for _ in range(MOST_ROUNDS):
        few, more = traced(constants, two), traced(constants, three)
        judged = {key: _judge(few.uses.get(key), use, K) for key, use in more.uses.items()}
        found = _constants(few, more, judged)
        if not ranks.any(found.keys() != constants.keys()):
            return constants, judged, more
        constants = found
        del few, more  # before the next two
    raise GradientError(_TOO_LONG_A_CHAIN)


def _constants(few: Trace, more: Trace, judged: Plan) -> Plan:
    """The calls that depend on no record, as far as one round tells.

    To follow the result of one such call may show others, and may change the keys of those that use
    it: what no longer holds is dropped, and a further round decides.
    """
    known: Plan = {
        key: Constant(frozenset({shapes}))
        for key, shapes in more.constants.items()
        if few.constants.get(key) == shapes
    }
    return known | {key: found for key, found in judged.items() if isinstance(found, Constant)}


def merge(old: Plan, new: Plan) -> Plan:
    """The new plan, without forgetting the shapes that constants had before."""
    merged = old | new
    for key, verdict in new.items():
        before = old.get(key)
        if isinstance(verdict, Constant) and isinstance(before, Constant):
            merged[key] = Constant(before.shapes | verdict.shapes)
    return merged


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


def general(plan: Plan) -> dict[str, str]:
    """What the plan leaves to the general rule, with the function that has none of its own."""
    return {
        name: f"{name_of(key[0])}: no rule of its own"
        for key, verdict in plan.items()
        if isinstance(verdict, Placed) and isinstance(verdict.rule, General)
        for label in key[1]
        for name in names_in(label)
    }


def _bytes(trace: Trace) -> int:
    """What the uses keep until the factors are made: their inputs and output gradients."""
    uses = trace.uses.values()
    held = {id(tensor): tensor for use in uses for tensor, _ in use.held}
    kept = [*held.values(), *(tensor for use in uses for tensor in use.watched)]
    inside = sum(use.bytes_inside for use in uses)
    return inside + sum(tensor.numel() * tensor.element_size() for tensor in kept)


def _sizes(trace: Trace) -> dict[Key, list[torch.Size]]:
    """Those of all tensors that the uses know."""
    return {
        key: [*use.shapes, *(tensor.shape for tensor, _ in use.held)]
        for key, use in trace.uses.items()
    }


def _judge(few: Use | None, more: Use, K: int) -> Verdict:
    """Which dimensions grew from two records to three."""
    if few is None or len(few.shapes) != len(more.shapes):
        return Beyond("it is called for some batch sizes only")
    if few.shapes == more.shapes:
        return Constant(frozenset({more.shapes}))
    growths = [find_growth(a, b, K) for a, b in zip(few.shapes, more.shapes, strict=True)]
    if any(growth is None for growth in growths):
        return Beyond("no single dimension of its result grows with the batch")
    placed = tuple(growth for growth in growths if growth is not None)
    if isinstance(more.rule, General):
        return _judge_general(few, more, placed, K)
    return Placed(more.rule, placed)


def _judge_general(few: Use, more: Use, growths: tuple[Growth, ...], K: int) -> Verdict:
    """A function without a rule: possible if each argument has plain rows or none."""
    name = name_of(more.key[0])
    if len(growths) != 1 or growths[0].merged or (name.endswith("_") and name[-2:] != "__"):
        return Beyond("it changes its argument, flattens records, or has several results")
    two, three = arguments(few.saved), arguments(more.saved)
    if len(two) != len(three):
        return Beyond("the number of its arguments grows with the batch")
    rows_of: list[int | None] = []
    for a, b in zip(two, three, strict=True):
        growth = find_growth(a.shape, b.shape, K)
        if a.shape != b.shape and (growth is None or growth.merged):
            return Beyond("records and positions share a dimension of its argument")
        rows_of.append(None if growth is None else growth.dim)
    return Placed(General(tuple(rows_of)), growths)


_NO_TENSOR = (
    "One loss a row is required, as a tensor; found a value of type {}. Without the losses of single records nothing "
    "can be clipped. Return the losses as torch computed them, shape [rows]."
)
_TOO_LONG_A_CHAIN = (
    f"A parameter may pass through at most {MOST_ROUNDS} calls before it meets a record; found more (or calls that "
    "change from pass to pass). Where its gradients pass could not be followed, so nothing could be clipped and no "
    "privacy promised. Compute it in fewer steps, outside of the model if it is fixed, or freeze the parameter."
)
