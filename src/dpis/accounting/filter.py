"""Guards that admit or refuse an event before it is released.

A guard is asked before every event; what it refuses must not run. `PlannedSequence` follows a predeclared plan,
`RenyiFilter` lets noise and rates depend on what was released, `Unguarded` is for runs that claim nothing beforehand.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

from dpis.accounting.budget import Budget
from dpis.accounting.events import Event
from dpis.accounting.renyi import best_order, renyi_budget, renyi_divergence
from dpis.accounting.workload import PlannedRun, composition_of
from dpis.errors import BudgetExceededError, InputError

LARGEST_ORDER = 100_000


class Guard(ABC):
    """Admits events one by one, as long as the claim holds."""

    @abstractmethod
    def admit(self, event: Event) -> None:
        """Count the event as spent, or raise `BudgetExceededError` and leave everything as it was."""

    @property
    @abstractmethod
    def fraction_spent(self) -> float:
        """How much of the budget is used, from 0 to 1. Depends on public and released values alone."""


class Unguarded(Guard):
    """Admits whatever comes: nothing was claimed that could be broken."""

    def admit(self, event: Event) -> None:
        """Nothing is refused."""

    @property
    def fraction_spent(self) -> float:
        """There is no budget."""
        return 0.0


class RenyiFilter(Guard):
    """A privacy filter at one integer Renyi order, fixed beforehand.

    An event is admitted only if ``spent + ρ_event(α) <= rho_budget``, with ``rho_budget = ε - off(α)``. However the
    noise and the rates were chosen from earlier outputs, all that is ever admitted satisfies the budget
    (docs/soundness.md). The order never changes at run time: a minimum over orders, taken after the fact, would not
    be sound.
    """

    def __init__(self, budget: Budget, order: int):
        if isinstance(order, bool) or not isinstance(order, int) or not 2 <= order <= LARGEST_ORDER:
            raise InputError(
                f"the filter's order must be a whole number from 2 to {LARGEST_ORDER:,}"
            )
        self.order = order
        self.rho_budget = renyi_budget(budget, order)
        if self.rho_budget <= 0:
            raise InputError(
                f"no noise meets epsilon = {budget.epsilon:g} at Renyi order {order}: "
                f"the conversion alone costs {budget.epsilon - self.rho_budget:.4g}"
            )
        self._counts: dict[Event, int] = {}
        self._costs: dict[Event, float] = {}

    def cost(self, event: Event) -> float:
        """``ρ_event(α)`` at the filter's order."""
        if event not in self._costs:
            self._costs[event] = renyi_divergence(event, self.order)
        return self._costs[event]

    @property
    def spent(self) -> float:
        """``Σ ρ`` of everything admitted; the same sum in whichever order the events came."""
        return math.fsum(count * self.cost(event) for event, count in self._counts.items())

    @property
    def left(self) -> float:
        """What may still be spent, not below 0."""
        return max(0.0, self.rho_budget - self.spent)

    @property
    def fraction_spent(self) -> float:
        """``spent / rho_budget``."""
        return self.spent / self.rho_budget

    def admit(self, event: Event) -> None:
        """Spend one event, or refuse it."""
        spent = self.spent
        if not spent + self.cost(event) <= self.rho_budget:
            raise BudgetExceededError(
                f"{event} costs {self.cost(event):.6g} at Renyi order {self.order}, but only "
                f"{self.rho_budget - spent:.6g} of {self.rho_budget:.6g} is left. It was not released; "
                "the claim still holds. Stop here, or plan for fewer or noisier events"
            )
        self._counts[event] = self._counts.get(event, 0) + 1


class PlannedSequence(Guard):
    """Follows a predeclared plan event by event.

    Each event must be the next of the plan, or be dominated by it (same kind, a lower or equal rate, more or
    equal noise): then the whole run spends no more than the plan.
    """

    def __init__(self, runs: Sequence[PlannedRun], delta: float):
        self._runs = tuple(run for run in runs if run.count)
        self._run = 0
        self._within = 0
        self._done = 0
        self._delta = delta

    @property
    def done(self) -> int:
        """How many events were admitted."""
        return self._done

    @property
    def next_planned(self) -> PlannedRun | None:
        """The run the next event belongs to; None at the plan's end."""
        return self._runs[self._run] if self._run < len(self._runs) else None

    @property
    def fraction_spent(self) -> float:
        """The share of the plan's Renyi divergence that is behind us."""
        whole = [cost * run.count for cost, run in zip(self._costs, self._runs, strict=True)]
        begun = [cost * self._within for cost in self._costs[self._run : self._run + 1]]
        return math.fsum(whole[: self._run] + begun) / math.fsum(whole) if whole else 0.0

    @cached_property
    def _costs(self) -> list[float]:
        """Of an event of each run, at the order where the plan spends least."""
        order = best_order(composition_of(self._runs), self._delta)[1]
        return [renyi_divergence(run.event, order) for run in self._runs]

    def admit(self, event: Event) -> None:
        """Spend the next planned event, or refuse."""
        planned = self.next_planned
        if planned is None:
            raise BudgetExceededError(
                f"the plan ended after {self._done} events; one more ({event}) is not covered by the claim. "
                "It was not released. Plan for more epochs from the start"
            )
        if not planned.event.dominates(event):
            raise BudgetExceededError(
                f"event {self._done + 1} of the plan is {planned.event} ({planned.label}), found {event}, "
                "which spends more or is of another kind. It was not released"
            )
        self._done += 1
        self._within += 1
        if self._within == planned.count:
            self._run, self._within = self._run + 1, 0
