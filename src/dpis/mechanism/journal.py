"""A ledger that is followed: what a resumed run does again is compared, what is new is appended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpis.accounting import Entry, Event, Guard, Header, LedgerWriter, Unguarded, read_ledger
from dpis.accounting.events import event_from_json, event_to_json
from dpis.errors import InputError, LedgerError

if TYPE_CHECKING:
    from dpis.group import Group  # which needs torch


class Journal(ABC):
    """Every event of a run passes here before its output is used."""

    @abstractmethod
    def spend(self, entries: Sequence[Entry]) -> None:
        """The next events of the run: on disk when this returns, or refused."""

    @abstractmethod
    def go_to(self, position: int) -> None:
        """Stand where a checkpoint was taken."""

    @abstractmethod
    def finish(self, model_sha256: str) -> None:
        """The model is released: nothing follows."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is open."""

    @property
    @abstractmethod
    def position(self) -> int:
        """How many events the run has gone through."""

    @property
    @abstractmethod
    def fraction_spent(self) -> float:
        """How much of the budget is behind us, from 0 to 1."""


class EventCounter(Journal):
    """Counts events in memory, in their order, if the guard admits them: for a loop that is not ours, and for `sgd`.

    Args:
        guard: keeps to a plan or a budget.
    """

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = Unguarded() if guard is None else guard
        self._runs: list[tuple[Event, int]] = []

    @property
    def events(self) -> Counter[Event]:
        """Every event and how often it was spent."""
        counted: Counter[Event] = Counter()
        for event, times in self._runs:
            counted[event] += times
        return counted

    @property
    def runs(self) -> tuple[tuple[Event, int], ...]:
        """The events in their order, equal ones together."""
        return tuple(self._runs)

    def spend(self, entries: Sequence[Entry]) -> None:
        """Count, if the guard admits them."""
        for entry in entries:
            self._spend(entry.event)

    def _spend(self, event: Event) -> None:
        self._guard.admit(event)
        if self._runs and self._runs[-1][0] == event:
            self._runs[-1] = event, self._runs[-1][1] + 1
        else:
            self._runs.append((event, 1))

    def state_dict(self) -> list[tuple[Any, int]]:
        """`runs`, to be written down."""
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
        """By the guard."""
        return self._guard.fraction_spent


class LedgerJournal(Journal):
    """Follows a ledger from its first event on.

    Up to where the ledger was written, events must be the same as before: a resumed run repeats them with the same
    randomness, and they count once. From there on events are appended.

    Args:
        writer: the ledger, open for appending; None if it is closed for good.
        known: what it holds already.
        guard: what has admitted these events.
        model_sha256: what it was closed over.
    """

    def __init__(
        self,
        writer: LedgerWriter | None,
        guard: Guard,
        known: Sequence[Entry] = (),
        model_sha256: str | None = None,
    ):
        self._writer, self._guard = writer, guard
        self._known = tuple(known)
        self._model_sha256 = model_sha256
        self._position = 0

    @classmethod
    def create(cls, path: Path, header: Header, first: Sequence[Entry] = ()) -> LedgerJournal:
        """A new ledger; ``first`` goes to the disk together with its header."""
        writer = LedgerWriter.create(path, header, first)
        return cls(writer, writer.guard, first)

    @classmethod
    def reopen(cls, path: Path, header: Header) -> LedgerJournal:
        """Go on with the ledger of an interrupted run, if it is that run's."""
        ledger = read_ledger(path)
        if ledger.header != header:
            raise InputError(
                f"{path} has another header than this run would write: the package, torch or dp-accounting changed "
                "since, or, where their number was released, the records. Resume with the data and the versions it "
                "names, or start anew in another folder"
            )
        if ledger.end is not None:
            return cls(None, header.guard(), ledger.entries, ledger.end.model_sha256)
        writer = LedgerWriter.reopen(path)  # holds the lock from here on
        return cls(writer, writer.guard, read_ledger(path).entries)

    def go_to(self, position: int) -> None:
        """Stand where a checkpoint was taken."""
        if position > len(self._known):
            raise LedgerError(
                f"the ledger holds {len(self._known)} events, the checkpoint has gone through {position}: they do not "
                "belong together, or the ledger lost lines. Nothing was released"
            )
        self._position = position

    @property
    def position(self) -> int:
        """How many events the run has gone through."""
        return self._position

    @property
    def fraction_spent(self) -> float:
        """By the ledger's guard: what is written ahead counts."""
        return self._guard.fraction_spent

    def spend(self, entries: Sequence[Entry]) -> None:
        """Compare with what is known, append what is not."""
        known = self._known[self._position : self._position + len(entries)]
        for number, (entry, before) in enumerate(zip(entries, known, strict=False)):
            if entry != before:
                # Its numbers may follow from a release: with the same noise, two of them give away what it hid.
                raise LedgerError(
                    f"event {self._position + number} of the resumed run ({entry.label}) is another than the ledger "
                    f"holds ({before.label}): the run is not the one that was interrupted. Where noise is solved from "
                    "released norms, go on with as many processes as it had, on the same kind of machine: dropout and "
                    "rounding follow them. Nothing was released"
                )
        new = entries[len(known) :]
        if new and self._writer is None:
            raise LedgerError("the ledger is closed: nothing may be added to it")
        if new and self._writer is not None:
            self._writer.record_all(new)
        self._position += len(entries)

    def finish(self, model_sha256: str) -> None:
        """Close the ledger over the released model; one that was closed must have been so over the same."""
        if self._writer is not None:
            self._writer.finish(model_sha256)
        elif self._model_sha256 != model_sha256:
            raise LedgerError(
                "the ledger was closed over another model: this one must not be released, and was not. What is "
                "resumed is not what was finished: put back its checkpoint and the code of its model"
            )

    def close(self) -> None:
        """Let go of the file; the run can be resumed."""
        if self._writer is not None:
            self._writer.close()


class GroupJournal(Journal):
    """The ledger of a group: rank 0 writes it, and no rank goes on before an event is on its disk.

    Args:
        group: the processes of the run.
        ledger: of rank 0; the others have none.
    """

    def __init__(self, group: Group, ledger: Journal | None) -> None:
        self._group, self._ledger = group, ledger
        self._position, self._fraction_spent = group.from_first(self._standing)

    def spend(self, entries: Sequence[Entry]) -> None:
        """On rank 0's disk when this returns, on every rank; or refused on every rank."""

        def spend() -> tuple[int, float]:
            self._here.spend(entries)
            return self._standing()

        self._position, self._fraction_spent = self._group.from_first(spend)

    def go_to(self, position: int) -> None:
        """Stand where a checkpoint was taken."""

        def go() -> tuple[int, float]:
            self._here.go_to(position)
            return self._standing()

        self._position, self._fraction_spent = self._group.from_first(go)

    def finish(self, model_sha256: str) -> None:
        """Rank 0 alone closes the ledger, since it alone writes the model."""
        self._here.finish(model_sha256)

    def close(self) -> None:
        """Let go of the file, where there is one."""
        if self._ledger is not None:
            self._ledger.close()

    @property
    def position(self) -> int:
        """As of rank 0, after the last event."""
        return self._position

    @property
    def fraction_spent(self) -> float:
        """As of rank 0, after the last event."""
        return self._fraction_spent

    @property
    def _here(self) -> Journal:
        assert self._ledger is not None
        return self._ledger

    def _standing(self) -> tuple[int, float]:
        return self._here.position, self._here.fraction_spent
