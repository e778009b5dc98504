"""What loops that are not ours have spent so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpis.accounting import Composition, Entry, Event, PoissonGaussian, epsilon_of_events
from dpis.accounting.workload import GRADIENT
from dpis.errors import InputError
from dpis.mechanism import EventCounter, RunPlan

Step = tuple[float, float, int]
"""Noise multiplier, sampling rate, and how many consecutive steps had them: a line of Opacus's histories."""


class SpentSoFar:
    """The events of every model that an engine made private, and their epsilon. ``len`` is the number of events.

    Attributes:
        plans: of these models.
        journals: what was spent before the first of them (`load_state_dict`), then their own.
    """

    def __init__(self) -> None:
        self.plans: list[RunPlan] = []
        self.journals = [EventCounter()]

    @property
    def journal(self) -> EventCounter:
        """Of the model that was made private last."""
        return self.journals[-1]

    def journal_for(self, plan: RunPlan) -> EventCounter:
        """A new journal for a plan. Events of several models add up; a promise is made of one alone.

        Raises:
            InputError: if an epsilon was promised and something else is spent beside it.
        """
        promised = any(one.claim is not None for one in (*self.plans, plan))
        if promised and (self.plans or len(self)):
            raise InputError(
                "this engine has spent on the data already, or will on another model, and the target epsilon would be "
                "that of one model: both together cost more. Give the noise to both (make_private): get_epsilon then "
                "tells what both cost. Or take a new PrivacyEngine, and add up their epsilons and deltas"
            )
        return EventCounter(plan.privacy.guard())

    def follow(self, plan: RunPlan, journal: EventCounter) -> None:
        """From now on count what is spent on this plan, too."""
        self.plans.append(plan)
        self.journals.append(journal)

    def get_epsilon(
        self,
        delta: float,
        alphas: Sequence[float] | None = None,
        *,
        eps_error: float | None = None,
        delta_error: float | None = None,
    ) -> float:
        """Epsilon at ``delta`` for the steps so far.

        Predeclared: by PLD, valid for a stop that was fixed in advance; a stop chosen from what was seen is covered by
        the target that was planned for, not by this number. Where the noise was set anew (`PrivateOptimizer`), the same
        holds of its schedule. Adaptive: the claim, at the planned delta.

        Args:
            delta: of the guarantee.
            alphas: orders of other accountants, which have no meaning here.
            eps_error: likewise; the bound that is given is never too small.
            delta_error: likewise.
        """
        spent = Composition(self._runs)
        if not self.plans:
            return epsilon_of_events(spent, delta)
        return max(plan.privacy.epsilon_of(spent, delta) for plan in self.plans)

    @property
    def _runs(self) -> tuple[tuple[Event, int], ...]:
        return tuple(run for journal in self.journals for run in journal.runs)

    @property
    def history(self) -> list[Step]:
        """The events in their order, equal ones together; what was released over all records has rate 1. Public."""
        return [(event.noise_multiplier, _rate(event), times) for event, times in self._runs]

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """The history, under the names of Opacus. For whole checkpoints see ``PrivacyEngine.save_checkpoint``."""
        if any(plan.privacy.adapts or not plan.privacy.planned_noise[0] for plan in self.plans):
            raise InputError(
                "the history of steps alone does not tell what an adaptive run spent, whose noise followed what it "
                "released, nor one without noise: whoever loads it would report too small an epsilon"
            )
        state = {} if destination is None else destination
        state.update(history=self.history, mechanism=self.mechanism())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Count what was spent before, here or by Opacus: right after ``make_private``, or before it.

        Raises:
            InputError: if something was spent since, which would be forgotten, or the state has no history.
            BudgetExceededError: if the plan has no room for it.
        """
        if len(self):
            raise InputError(
                f"{len(self)} events were spent already: to go back would forget them, and epsilon would be too small. "
                "Load right after make_private, with a new PrivacyEngine"
            )
        if not state_dict or "history" not in state_dict:
            raise InputError(
                "the state of an accountant holds its history: take it from its state_dict()"
            )
        for noise_multiplier, rate, times in state_dict["history"]:
            event = PoissonGaussian(sampling_rate=rate, noise_multiplier=noise_multiplier)
            steps = Composition(((event, times),))
            self.journal.spend([Entry(GRADIENT, event)] * steps.events)

    @staticmethod
    def mechanism() -> str:
        """Which accountant this is."""
        return "pld"

    def __len__(self) -> int:
        return sum(journal.position for journal in self.journals)


def _rate(event: Event) -> float:
    return event.sampling_rate if isinstance(event, PoissonGaussian) else 1.0
