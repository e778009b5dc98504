"""What to do with every call that touches a parameter: found out once, on a few records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpis.gradients import batches
from dpis.gradients.batches import Batch
from dpis.gradients.layout import Growth, find_growth
from dpis.gradients.rules.base import Call, CouplingError, Rule
from dpis.gradients.rules.general import General, arguments
from dpis.gradients.watch import Key, Shapes, Use, Watch, names_in


@dataclass(frozen=True)
class Constant:
    """The call depends on no record: its result is followed as a parameter is.

    Attributes:
        shapes: those its results were seen to have, whatever the number of records.
    """

    shapes: frozenset[Shapes]


@dataclass(frozen=True)
class Placed:
    """The records' places in the watched tensors are known; the rule does the rest."""

    rule: Rule
    growths: tuple[Growth, ...]


@dataclass(frozen=True)
class Beyond:
    """No rule covers the call: its parameters need the fallback over the whole model."""

    reason: str


class GeneralRuleError(RuntimeError):
    """The general rule cannot treat a call: its parameters need the fallback."""

    def __init__(self, key: Key) -> None:
        super().__init__(f"torch.func cannot treat {key[0]} by itself")
        self.key = key


# Each round follows one more link in chains of calls that depend on no record.
MOST_ROUNDS = 50

Verdict = Constant | Placed | Beyond
Plan = dict[Key, Verdict]
# Runs the model under a watch and returns the loss of every row (or one for all).
Forward = Callable[[Watch, Batch], Tensor]


@dataclass(frozen=True, eq=False)
class _Trace:
    """One forward pass on a few records."""

    uses: dict[Key, Use]
    constants: dict[Key, Shapes]
    losses: Tensor


def make_plan(
    forward: Forward, new_watch: Callable[[Plan], Watch], batch: Batch, K: int
) -> tuple[Plan, int]:
    """Judge every call from three small forward passes.

    The passes on two and on three records show which dimensions grow with the batch: sizes are
    never guessed. The pass with the middle record changed shows whose entries move: where a model
    flattened records and positions into one dimension, and whether records couple.

    Args:
        forward: runs the model and the loss under a watch.
        new_watch: makes a watch that follows a plan.
        batch: at least three records.
        K: rows of a record.

    Returns:
        The plan, and how many bytes the uses of one record hold.

    Raises:
        CouplingError: if changing one record changes another's loss or activations.
    """
    device = batches.device(batch)
    small, large = (
        batches.take(batch, batches.rows_of_records(torch.arange(n, device=device), K))
        for n in (2, 3)
    )
    plan: Plan = {}
    for _ in range(MOST_ROUNDS):
        few, more = (_trace(forward, new_watch(plan), b) for b in (small, large))
        judged = {key: _judge(few.uses.get(key), use, K) for key, use in more.uses.items()}
        constants = _constants(few, more, judged)
        if constants.keys() == plan.keys():
            break
        plan = constants
    else:
        raise RuntimeError("Which calls depend on no record did not settle: a fault in dpis.plan.")
    moved = _trace(forward, new_watch(plan), _middle_changed(large, K))
    _refuse_coupled_losses(more.losses, moved.losses, K)
    gradients = _gradients_of_middle(more, K)
    for key, verdict in judged.items():
        if isinstance(verdict, Placed):
            after = moved.uses.get(key)
            judged[key] = _resolve(verdict, more.uses[key], after, gradients[key], K)
    return plan | judged, _bytes(more) // 3


def _constants(few: _Trace, more: _Trace, judged: Plan) -> Plan:
    """The calls that depend on no record, as far as this round tells.

    To follow the result of one such call may show others, and may change the keys of those that use
    it: what no longer holds is dropped, and a further round decides.
    """
    new: Plan = {key: verdict for key, verdict in judged.items() if isinstance(verdict, Constant)}
    known: Plan = {
        key: Constant(frozenset({shapes}))
        for key, shapes in more.constants.items()
        if few.constants.get(key) == shapes
    }
    return known | new


def merge(old: Plan, new: Plan) -> Plan:
    """The new plan, without forgetting the shapes that constants had before."""
    merged = old | new
    for key, verdict in new.items():
        before = old.get(key)
        if isinstance(verdict, Constant) and isinstance(before, Constant):
            merged[key] = Constant(before.shapes | verdict.shapes)
    return merged


def general(plan: Plan) -> dict[str, str]:
    """What the plan leaves to the general rule, with the function that has none of its own."""
    return {
        name: f"{name_of(key[0])}: no rule of its own"
        for key, verdict in plan.items()
        if isinstance(verdict, Placed) and isinstance(verdict.rule, General)
        for label in key[1]
        for name in names_in(label)
    }


def name_of(function: Callable[..., object]) -> str:
    """A function's name, for messages."""
    return getattr(function, "__name__", str(function))


def _trace(forward: Forward, watch: Watch, batch: Batch) -> _Trace:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same dropout every time
        losses = forward(watch, batch)
    return _Trace({use.key: use for use in watch.uses}, watch.constants, losses)


def _bytes(trace: _Trace) -> int:
    """What the uses keep until the factors are made: their inputs and output gradients."""
    uses = trace.uses.values()
    held = {id(tensor): tensor for use in uses for tensor, _ in use.held}
    kept = [*held.values(), *(tensor for use in uses for tensor in use.watched)]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)


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
    if not isinstance(more.rule, General):
        return Placed(more.rule, placed)
    return _judge_general(few, more, placed, K)


def _judge_general(few: Use, more: Use, growths: tuple[Growth, ...], K: int) -> Verdict:
    """A function without a rule: possible if each argument has plain rows or none."""
    name = name_of(more.key[0])
    if len(growths) != 1 or growths[0].merged or (name.endswith("_") and name[-2:] != "__"):
        return Beyond("it changes its argument, flattens records, or has several results")
    pairs = zip(_argument_shapes(few.saved), _argument_shapes(more.saved), strict=True)
    rows_of: list[int | None] = []
    for a, b in pairs:
        growth = find_growth(a, b, K) if a != b else None
        if a != b and (growth is None or growth.merged):
            return Beyond("records and positions share a dimension of its argument")
        rows_of.append(None if growth is None else growth.dim)
    return Placed(General(tuple(rows_of)), growths)


def _argument_shapes(call: Call) -> list[torch.Size]:
    return [tensor.shape for tensor in arguments(call)]


def _middle_changed(batch: Batch, K: int) -> Batch:
    """Three records, the middle one replaced; every value stays one that its tensor allows."""

    def change(tensor: Tensor) -> Tensor:
        first, middle, last = torch.split(tensor, K)
        if tensor.is_floating_point():
            noise = torch.rand_like(middle) - 0.5
            return torch.cat([first, middle + (0.1 + middle.abs()) * noise, last])
        other = last if torch.equal(first, middle) else first
        return torch.cat([first, other.flip(tuple(range(1, tensor.ndim))), last])

    with torch.random.fork_rng():
        torch.manual_seed(1)
        return batches.apply(change, batch)


def _refuse_coupled_losses(before: Tensor, after: Tensor, K: int) -> None:
    """The losses of the first and the last record may not move with the middle one."""
    if before.ndim == 0:
        return  # one loss for all: losses.py asks whether it is a sum or a mean
    others = torch.cat([torch.arange(K), torch.arange(2 * K, 3 * K)]).to(before.device)
    if not _same(before.detach()[others], after.detach()[others]).all():
        raise CouplingError(_COUPLED.format("the loss of another record changed"))


def _gradients_of_middle(trace: _Trace, K: int) -> dict[Key, Sequence[Tensor | None]]:
    """How the middle record's loss depends on each watched tensor."""
    edges = [edge for use in trace.uses.values() for edge in use.edges]
    none: Sequence[Tensor | None] = [None] * len(edges)
    if edges and trace.losses.ndim and trace.losses.requires_grad:
        own = trace.losses[K : 2 * K].sum()
        none = torch.autograd.grad(own, edges, allow_unused=True)
    remaining = iter(none)
    return {key: [next(remaining) for _ in use.edges] for key, use in trace.uses.items()}


def _resolve(
    placed: Placed, before: Use, after: Use | None, gradients: Sequence[Tensor | None], K: int
) -> Verdict:
    """Settle the order of flattened dimensions; refuse entries that move with another record."""
    resolved = []
    moved = before.watched if after is None else after.watched
    values = zip(placed.growths, before.watched, moved, gradients, strict=True)
    for growth, old, new, gradient in values:
        belongs = _entries_of_middle(growth.dim, old, new, gradient)
        if before.record_order is not None:  # entry j of a packed batch is not record j
            belongs = belongs[before.record_order.argsort()]
        fitting = [
            order for order in growth.orders() if not belongs[~order.middle(K, belongs)].any()
        ]
        if not fitting:
            raise CouplingError(_COUPLED.format(_where(before)))
        if len(fitting) > 1:
            return Beyond("records and positions share a dimension in an order that did not show")
        resolved.append(fitting[0])
    return Placed(placed.rule, tuple(resolved))


def _entries_of_middle(dim: int, old: Tensor, new: Tensor, gradient: Tensor | None) -> Tensor:
    """Which entries along a dimension moved with the middle record, or move its loss."""
    entries = torch.zeros_like(old, dtype=torch.bool)
    if old.shape == new.shape:
        entries |= ~_same(old.detach(), new.detach())
    if gradient is not None:
        entries |= (gradient != 0) & gradient.isfinite()
    return entries.movedim(dim, 0).flatten(1).any(1)


def _same(a: Tensor, b: Tensor) -> Tensor:
    return torch.isclose(a.double(), b.double(), rtol=1e-4, atol=1e-6, equal_nan=True)


def _where(use: Use) -> str:
    names = ", ".join(names_in(use.parameters[0].label))
    return f"activations of another record changed in {name_of(use.key[0])} with {names}"


_COUPLED = (
    "Records must not depend on one another, but after one record of three was changed, {}. "
    "A record's influence would then pass through the gradients of others, which are clipped by "
    "themselves: the privacy guarantee would not hold. Remove what mixes records (batch "
    "statistics, a loss normalised over the batch, attention between records)."
)
