"""Check a finished run's claim from its ledger alone.

Nothing here uses the code that made the plan: epsilon is recomputed by dp-accounting, from the events.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import dp_accounting
from dp_accounting import pld, rdp

from dpis.accounting.events import Composition, Event, Gaussian
from dpis.accounting.filter import LARGEST_ORDER
from dpis.accounting.header import CountSource, Mode
from dpis.accounting.ledger import Ledger, read_ledger
from dpis.accounting.pld import delta_to_ask_for
from dpis.accounting.workload import COUNT, composition_of
from dpis.errors import BrokenLedgerError, InputError, LedgerError

_ROUNDING = 1e-9
"""Relative slack for the same sum taken in another order."""

_INTERVALS = tuple(1e-4 / 4**i for i in range(6))

LARGEST_GRID = 10**7
"""Points of a privacy loss distribution, some 3 GB. What only a finer grid could show is not shown to hold: whoever
wrote a ledger must not decide how much memory its reader needs."""

_TRUNCATED = math.exp(-50)
"""dp-accounting keeps no loss beyond what has this probability."""


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
        flags = {
            "seeded": header.seeded,
            "diagnostics": header.diagnostics,
            "audit": header.audited,
        }
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
        spent = claimable = _Bound(_check_adaptive(ledger))
    problem, worse = None, max(spent, claimable, key=lambda bound: bound.epsilon)
    if not worse.epsilon <= header.claim.epsilon * (1 + _ROUNDING):
        problem = f"line 1: claims epsilon = {header.claim.epsilon:g}, {worse}"
    elif ledger.end is None:
        problem = _unfinished(ledger)
    elif model is not None and _sha256(model) != ledger.end.model_sha256:
        problem = (
            f"line {len(ledger.entries) + 2}: {model} is not the model this ledger was closed over"
        )
    return Verdict(ledger, spent.epsilon, claimable.epsilon, problem)


@dataclass(frozen=True, slots=True)
class _Bound:
    """An upper bound on epsilon; ``tight``: whether a finer grid would lower it by nothing that matters."""

    epsilon: float
    tight: bool = True

    def __str__(self) -> str:
        if self.tight:
            return f"but its events cost {self.epsilon:.6g}"
        return (
            f"which cannot be shown: the bound on what its events cost is {self.epsilon:.6g}, and no lower one was "
            f"found on grids of up to {LARGEST_GRID:,} points"
        )


def _unfinished(ledger: Ledger) -> str:
    line = len(ledger.entries) + 2
    if ledger.torn:
        return f"line {line}: torn by a crash, its event counts as spent; the run is unfinished"
    return f"line {line}: no end line, the run is unfinished"


def _check_predeclared(ledger: Ledger) -> tuple[_Bound, _Bound]:
    """The plan covers every event. Returns epsilon of what was recorded, and of the plan."""
    ledger.guard()
    claim, whole = ledger.header.claim, composition_of(ledger.header.planned)
    recorded = Composition.of(*(entry.event for entry in ledger.entries))
    if ledger.torn:
        planned = (run.event for run in ledger.header.planned for _ in range(run.count))
        recorded += Composition.of(*islice(planned, recorded.events, recorded.events + 1))
    claimable = _epsilon(whole, claim.delta, claim.epsilon)
    as_planned = dict(recorded) == dict(whole)
    spent = claimable if as_planned else _epsilon(recorded, claim.delta, claim.epsilon)
    return spent, claimable


def _check_adaptive(ledger: Ledger) -> float:
    """The filter's invariant at every line: epsilon at its one order never passes the claim."""
    claim, order = ledger.header.claim, ledger.header.filter_order
    if order is None or not 2 <= order <= LARGEST_ORDER:
        raise BrokenLedgerError(1, f"a filter needs one integer order from 2 to {LARGEST_ORDER:,}")
    if ledger.header.n_public_source is CountSource.RELEASED:
        _require_charged_count(ledger)
    costs: dict[Event, float] = {}
    total, epsilon = 0.0, 0.0
    for number, entry in enumerate(ledger.entries, start=2):
        if entry.event not in costs:
            accountant = rdp.RdpAccountant([order])
            accountant.compose(entry.event.to_dp_accounting())
            costs[entry.event] = max(0.0, _or_infinite(accountant.rdp[0]))
        total += costs[entry.event]
        epsilon = _or_infinite(rdp.compute_epsilon([order], [total], claim.delta)[0])
        if not epsilon <= claim.epsilon * (1 + _ROUNDING):
            raise BrokenLedgerError(
                number,
                f"the filter was overrun: epsilon {epsilon:.6g} at order {order}, above the claim {claim.epsilon:g}",
            )
    # A torn event had passed the filter before it was written: the claim covers it, its cost is not known.
    return claim.epsilon if ledger.torn else epsilon


def _require_charged_count(ledger: Ledger) -> None:
    """A released number of records is itself an event, before whatever depends on it."""
    first = ledger.entries[0] if ledger.entries else None
    if first is not None and not (first.label == COUNT and isinstance(first.event, Gaussian)):
        raise BrokenLedgerError(
            2, f"n_public was released, so the first event must be its Gaussian, labelled {COUNT!r}"
        )


def _epsilon(composition: Composition, delta: float, claim: float) -> _Bound:
    """The smallest upper bound found: Renyi first, then PLD, ever finer until it settles above or below the claim."""
    if not composition.events:
        return _Bound(0.0)
    event = composition.to_dp_accounting()
    by_renyi = rdp.RdpAccountant()
    with _without_remarks():
        by_renyi.compose(event)
    best = _or_infinite(by_renyi.get_epsilon(delta))
    reach = _or_infinite(by_renyi.get_epsilon(_TRUNCATED))
    try:
        asked = delta_to_ask_for(delta, composition.events)
    except InputError:
        return _Bound(best, tight=False)  # too small a delta for PLD: Renyi alone can prove it
    before = math.inf
    for interval in _INTERVALS:
        if not reach <= LARGEST_GRID * interval:
            break
        now = _pld_epsilon(event, asked, interval)
        best = min(best, now)
        gain_to_come = (before - now) / 15 if math.isfinite(before) else math.inf
        if now - gain_to_come > claim * (1 + _ROUNDING):
            return _Bound(best)
        if best <= claim or math.isinf(now):
            break
        before = now
    return _Bound(best, tight=False)


@contextmanager
def _without_remarks() -> Iterator[None]:
    """dp-accounting warns of every fractional order that it leaves out; the bound holds without those orders."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _pld_epsilon(event: dp_accounting.DpEvent, delta: float, interval: float) -> float:
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    accountant.compose(event)
    return _or_infinite(accountant.get_epsilon(delta))


def _or_infinite(value: float) -> float:
    """What could not be computed proves nothing."""
    return math.inf if math.isnan(value) else float(value)


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise LedgerError(f"cannot read the model {path}: {error.strerror}") from None
