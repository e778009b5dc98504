"""Check a finished run's claim from its ledger alone.

Nothing here uses the code that made the plan: epsilon is recomputed by dp-accounting, from the events.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import dp_accounting
from dp_accounting import pld, rdp

from dpis.accounting.events import Composition, Event
from dpis.accounting.ledger import Header, Ledger, Mode, read_ledger
from dpis.errors import BrokenLedgerError, LedgerError

_ROUNDING = 1e-9
"""Relative slack for the same sum taken in another order."""

_INTERVALS = tuple(1e-4 / 4**i for i in range(6))
_SMALLEST_PLD_DELTA = 1e-9


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a ledger proves."""

    ledger: Ledger
    epsilon_spent: float
    """Recomputed for what was recorded (in adaptive mode: at the filter's order)."""
    epsilon_claimable: float
    """Recomputed for what the claim must cover: the whole plan, or in adaptive mode what was recorded."""
    problem: str | None
    """Why the claim does not hold; None if it does."""

    @property
    def holds(self) -> bool:
        """Whether the run is finished and its claim is proven."""
        return self.problem is None

    @property
    def not_for_release(self) -> tuple[str, ...]:
        """Reasons why the model must not leave the house although the numbers are right."""
        header = self.ledger.header
        flags = {"seeded": header.seeded, "diagnostics": header.diagnostics}
        return tuple(name for name, set_ in flags.items() if set_)


def verify_ledger(path: Path, model: Path | None = None) -> Verdict:
    """Recompute epsilon from a ledger and check it against the claim.

    Args:
        path: The ledger.
        model: The released model file, to compare with the end line; optional.

    Raises:
        LedgerError: Not a readable ledger of this package.
        BrokenLedgerError: The ledger contradicts itself or its claim; names the first bad line.
    """
    ledger = read_ledger(path)
    header = ledger.header
    if header.mode is Mode.PREDECLARED:
        spent, claimable = _check_predeclared(ledger)
    else:
        spent = claimable = _check_adaptive(ledger)
    problem = None
    if claimable > header.claim.epsilon * (1 + _ROUNDING):
        problem = f"line 1: claims epsilon = {header.claim.epsilon:g}, but its events cost {claimable:.6g}"
    elif ledger.end is None:
        problem = _unfinished(ledger)
    elif model is not None and _sha256(model) != ledger.end.model_sha256:
        problem = (
            f"line {len(ledger.entries) + 2}: {model} is not the model this ledger was closed over"
        )
    return Verdict(ledger, spent, claimable, problem)


def _unfinished(ledger: Ledger) -> str:
    line = len(ledger.entries) + 2
    if ledger.torn:
        return f"line {line}: torn by a crash, its event counts as spent; the run is unfinished"
    return f"line {line}: no end line, the run is unfinished"


def _check_predeclared(ledger: Ledger) -> tuple[float, float]:
    """Each event is the plan's next, or dominated by it. Returns epsilon of what was recorded, and of the plan."""
    planned = _planned_events(ledger.header)
    recorded: list[Event] = []
    for number, entry in enumerate(ledger.entries, start=2):
        expected = next(planned, None)
        if expected is None:
            raise BrokenLedgerError(
                number, "an event beyond the plan's end: the claim does not cover it"
            )
        if not expected.dominates(entry.event):
            raise BrokenLedgerError(
                number, f"{entry.event} is not covered by the plan's {expected}"
            )
        recorded.append(entry.event)
    if ledger.torn and (lost := next(planned, None)) is not None:
        recorded.append(lost)
    claim = ledger.header.claim
    whole = list(_planned_events(ledger.header))
    claimable = _epsilon(whole, claim.delta, claim.epsilon)
    if recorded == whole:
        return claimable, claimable
    return min(claimable, _epsilon(recorded, claim.delta, claim.epsilon)), claimable


def _planned_events(header: Header) -> Iterator[Event]:
    return (run.event for run in header.planned for _ in range(run.count))


def _check_adaptive(ledger: Ledger) -> float:
    """The filter's invariant at every line: epsilon at its one order never passes the claim."""
    claim, order = ledger.header.claim, ledger.header.filter_order
    if order is None or order != int(order) or order < 2:
        raise BrokenLedgerError(1, f"a filter needs one integer order >= 2, found {order!r}")
    costs: dict[Event, float] = {}
    spent: list[float] = []
    total, epsilon = 0.0, 0.0
    for number, entry in enumerate(ledger.entries, start=2):
        if entry.event not in costs:
            accountant = rdp.RdpAccountant([order])
            accountant.compose(entry.event.to_dp_accounting())
            costs[entry.event] = max(0.0, float(accountant.rdp[0]))
        spent.append(costs[entry.event])
        total += spent[-1]
        epsilon = float(rdp.compute_epsilon([order], [total], claim.delta)[0])
        if not epsilon <= claim.epsilon * (1 + _ROUNDING):
            raise BrokenLedgerError(
                number,
                f"the filter was overrun: epsilon {epsilon:.6g} at order {order}, above the claim {claim.epsilon:g}",
            )
    # A torn event had passed the filter before it was written: the claim covers it, its cost is not known.
    return claim.epsilon if ledger.torn else epsilon


def _epsilon(events: Sequence[Event], delta: float, claim: float) -> float:
    """The smallest upper bound found: Renyi first, then PLD, ever finer until it settles above or below the claim."""
    if not events:
        return 0.0
    event = Composition.of(*events).to_dp_accounting()
    by_renyi = rdp.RdpAccountant()
    by_renyi.compose(event)
    best = float(by_renyi.get_epsilon(delta))
    if delta < _SMALLEST_PLD_DELTA:
        return best
    before = math.inf
    for interval in _INTERVALS:
        now = _pld_epsilon(event, delta, interval)
        best = min(best, now)
        gain_to_come = (before - now) / 15 if math.isfinite(before) else math.inf
        if best <= claim or now - gain_to_come > claim * (1 + _ROUNDING):
            break
        before = now
    return best


def _pld_epsilon(event: dp_accounting.DpEvent, delta: float, interval: float) -> float:
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    accountant.compose(event)
    epsilon = float(accountant.get_epsilon(delta))
    return math.inf if math.isnan(epsilon) else epsilon


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise LedgerError(f"cannot read the model {path}: {error.strerror}") from None
