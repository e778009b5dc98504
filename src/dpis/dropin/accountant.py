"""What a loop that is not ours has spent so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dpis.accounting import (
    AdaptivePlan,
    Composition,
    Entry,
    Event,
    Guard,
    epsilon_by_pld,
    epsilon_by_rdp,
)
from dpis.accounting.events import event_from_json, event_to_json
from dpis.errors import InputError
from dpis.mechanism import Journal, Plan


class EventCounter(Journal):
    """Counts events in memory, in their order, if the guard admits them.

    Args:
        guard: keeps to a plan or a budget; None: nothing is claimed beforehand.
    """

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard
        self._runs: list[tuple[Event, int]] = []

    @property
    def events(self) -> Counter[Event]:
        """Every event and how often it was spent."""
        counted: Counter[Event] = Counter()
        for event, times in self._runs:
            counted[event] += times
        return counted

    def spend(self, entries: Sequence[Entry]) -> None:
        """Count, if the guard admits them."""
        for entry in entries:
            self._spend(entry.event)

    def _spend(self, event: Event) -> None:
        if self._guard is not None:
            self._guard.admit(event)
        if self._runs and self._runs[-1][0] == event:
            self._runs[-1] = event, self._runs[-1][1] + 1
        else:
            self._runs.append((event, 1))

    def state_dict(self) -> list[tuple[Any, int]]:
        """The events in their order, equal ones together."""
        return [(event_to_json(event), times) for event, times in self._runs]

    def load_state_dict(self, state: Sequence[tuple[Any, int]]) -> None:
        """Spend again, in a guard that is new, what was spent before a checkpoint."""
        for event, times in state:
            for _ in range(times):
                self._spend(event_from_json(event))

    def go_to(self, position: int) -> None:
        """Only where it stands: `load_state_dict` comes first."""
        if position != self.position:
            raise InputError(
                f"the checkpoint has gone through {position} events and holds {self.position}: it is damaged"
            )

    def finish(self, model_sha256: str) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """Nothing is open."""

    @property
    def position(self) -> int:
        """How many events there were."""
        return sum(times for _, times in self._runs)

    @property
    def fraction_spent(self) -> float:
        """Of the plan's or the filter's budget; 0 without either."""
        return 0.0 if self._guard is None else float(self._guard.fraction_spent)


class Accountant:
    """What has been spent so far. ``len`` is the number of events."""

    def __init__(self) -> None:
        self.journal = EventCounter()
        self.plan: Plan | None = None

    def start(self, plan: Plan) -> EventCounter:
        """Follow a plan from its beginning."""
        self.plan, self.journal = plan, EventCounter(plan.guard())
        return self.journal

    def get_epsilon(self, delta: float) -> float:
        """Epsilon at ``delta`` for the steps so far.

        Predeclared: by PLD, valid for a stop that was fixed in advance; a stop chosen from what was seen is covered by
        the target that was planned for, not by this number. Adaptive: the claim, at the planned delta.

        Args:
            delta: of the guarantee. Orders and error bounds of other accountants have no meaning here.
        """
        plan = None if self.plan is None else self.plan.accounting
        if isinstance(plan, AdaptivePlan):
            if delta < plan.budget.delta:
                raise InputError(
                    f"the adaptive mode claims epsilon at delta = {plan.budget.delta:g} or larger, found {delta:g}"
                )
            return plan.budget.epsilon
        if not 0 < delta < 1:
            raise InputError(f"delta must lie between 0 and 1, found {delta!r}")
        composition = Composition(tuple(self.journal.events.items()))
        if not composition.events:
            return 0.0
        try:
            return epsilon_by_pld(composition, delta)
        except InputError:  # too small a delta for it
            return epsilon_by_rdp(composition, delta)

    @staticmethod
    def mechanism() -> str:
        """Which accountant this is."""
        return "pld"

    def __len__(self) -> int:
        return self.journal.position
