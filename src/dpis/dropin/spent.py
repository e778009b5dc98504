"""What a loop that is not ours has spent so far."""

from __future__ import annotations

from dpis.accounting import Composition
from dpis.mechanism import EventCounter, RunPlan


class SpentSoFar:
    """The events of a run and their epsilon. ``len`` is the number of events."""

    def __init__(self) -> None:
        self.journal = EventCounter()
        self.plan: RunPlan | None = None

    def start(self, plan: RunPlan) -> EventCounter:
        """Follow a plan from its beginning."""
        self.plan, self.journal = plan, EventCounter(plan.privacy.guard())
        return self.journal

    def get_epsilon(self, delta: float) -> float:
        """Epsilon at ``delta`` for the steps so far.

        Predeclared: by PLD, valid for a stop that was fixed in advance; a stop chosen from what was seen is covered by
        the target that was planned for, not by this number. Adaptive: the claim, at the planned delta.

        Args:
            delta: of the guarantee. Orders and error bounds of other accountants have no meaning here.
        """
        if self.plan is None:
            return 0.0
        spent = Composition(tuple(self.journal.events.items()))
        return self.plan.privacy.epsilon_of(spent, delta)

    @staticmethod
    def mechanism() -> str:
        """Which accountant this is."""
        return "pld"

    def __len__(self) -> int:
        return self.journal.position
