"""One model that an engine made private: what its checkpoints hold, and how they are taken up."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any

import torch

from dpis.dropin.session import Session
from dpis.errors import InputError
from dpis.mechanism import EventCounter
from dpis.mechanism.secret_state import (
    load_secret_state,
    own_state,
    save_group_state,
    shared_key,
)
from dpis.mechanism.sharded_state import put_together

Place = str | PathLike[str] | IO[bytes]
"""A path, or a file that is open in binary mode."""


@dataclass(eq=False)
class PrivateRun:
    """A private loop, and the journal of its events.

    Attributes:
        session: of the loop.
        journal: what it has spent.
        seed: of its key; None: it has none.
        population: how many records there are. Private.
    """

    session: Session
    journal: EventCounter
    seed: int | None
    population: int

    def save(self, place: Place, state: dict[str, Any]) -> None:
        """Write what is needed to go on, and the states of module, optimizer and whatever belongs to them."""
        mechanism = self.session.mechanism
        mechanism.group.arrive("save_checkpoint")
        own = mechanism.own_state()
        whole = {
            "plan": self._fingerprint,
            "seed": self.seed,
            "events": self.journal.state_dict(),
            "mechanism": mechanism.state_dict(),
            "torch_random": torch.get_rng_state(),
            **state,
        }
        save_group_state(_opened(place), whole, own, mechanism.group)

    def load(self, place: Place) -> dict[str, Any]:
        """Stand where that run stood; returns its whole state.

        Raises:
            InputError: the file is of another run, or this one has begun. Nothing was changed.
        """
        if self.journal.position:
            raise InputError(
                f"{self.journal.position} events were spent by this engine already: to go back would forget them, and "
                "epsilon would be too small. Load right after make_private, with a new PrivacyEngine; to go back to "
                "older weights, load them by module.load_state_dict"
            )
        opened, mechanism = _opened(place), self.session.mechanism
        mechanism.group.arrive("load_checkpoint")
        with mechanism.group.together():
            state = load_secret_state(opened, "plan")
            if state["plan"] != self._fingerprint:
                raise InputError(
                    f"{place} is of a run with other arguments or another number of records: {state['plan']}; these "
                    f"are {self._fingerprint}. What was spent then would not fit the plan now. Make it private with "
                    "the same arguments"
                )
            own = own_state(opened, state)
        self.seed = state["seed"]
        self.journal.load_state_dict(state["events"])
        key = shared_key(self.seed, mechanism.group)
        mechanism.take_up(key, state["mechanism"], own)
        state = dict(put_together(state, own, self.session.gradients.module))
        if mechanism.group.size == 1:
            torch.set_rng_state(state["torch_random"])
        return state

    @property
    def _fingerprint(self) -> str:
        """What must be the same for a checkpoint to fit."""
        plan = self.session.mechanism.plan
        return f"{plan.config}, noise={plan.privacy.planned_noise[0]!r}, records={self.population}"


def _opened(place: Place) -> Path | IO[bytes]:
    return Path(place) if isinstance(place, str | PathLike) else place
