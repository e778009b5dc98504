"""One run: its folder, its secret key, its mechanism; begun anew, or taken up where it was interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from dpis.accounting import Cadence, CountSource, Entry, Release
from dpis.accounting.workload import COUNT
from dpis.errors import InputError
from dpis.group import Alone, Group
from dpis.mechanism import (
    Config,
    EventCounter,
    GroupJournal,
    Journal,
    LedgerJournal,
    Mechanism,
    RunPlan,
    make_plan,
    plan_with_count,
)
from dpis.mechanism.secret_state import (
    load_secret_state,
    own_state,
    save_group_state,
    save_secret_state,
)
from dpis.randomness import Key
from dpis.runs.folder import FolderLock, RunFolder
from dpis.runs.summary import versions

MakeMechanism = Callable[..., Mechanism]
"""Called as `Mechanism` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What is chosen for a run beside its config.

    Attributes:
        diagnostics: show private values to the operator; marks the run as not for release.
        batch_shaped: the shapes of rows follow the batch; the ledger says so.
        user_level: a record is a user with all of their rows; the ledger says so.
        audited: canaries are planted among the records; marks the run as not for release.
        recipe: whatever the caller needs to build model and data again on resume; public values.
    """

    diagnostics: bool = False
    batch_shaped: bool = False
    user_level: bool = False
    audited: bool = False
    recipe: Mapping[str, Any] | None = None


class Run:
    """An open run. Its folder holds a secret checkpoint and a ledger from the beginning.

    Attributes:
        folder: where it is.
        config: as it was given.
        key: its secret.
        mechanism: its hidden state, and the only way to release anything.
        options: what was chosen beside the config.
        training: the state of training as the last checkpoint has it; None before the first.
        own: what the processes of that checkpoint had of their own, by name.
        fresh: begun here, not resumed.
        group: the processes that take every step together. Rank 0 alone writes ledger, model and summary.
    """

    def __init__(
        self,
        folder: RunFolder,
        lock: FolderLock | None,
        config: Config,
        key: Key,
        options: RunOptions,
        population: int,
        *,
        group: Group,
        fresh: bool,
        training: dict[str, Any] | None = None,
        own: Mapping[str, Tensor] | None = None,
        make_mechanism: MakeMechanism = Mechanism,
    ) -> None:
        self.folder, self.config, self.key, self.options = folder, config, key, options
        self.training, self.own, self.fresh, self.group = training, own or {}, fresh, group
        self._lock = lock
        plan = group.from_first(lambda: make_plan(config))
        first: list[Entry] = []
        if config.release_n and plan.privacy.adapts:
            # What the plan is made from is known before the ledger can be begun; it is used only afterwards.
            first_of_all = make_mechanism(plan, population, key, EventCounter(), group=group)
            noisy = first_of_all.release_count()
            plan, first = (
                plan_with_count(plan, noisy),
                [Entry(COUNT, plan.privacy.release(COUNT).event)],
            )
        self._journal = self._journal_of_group(plan, first)
        self.mechanism = make_mechanism(plan, population, key, self._journal, group=group)
        if config.release_n:
            self.mechanism.release_count()

    @classmethod
    def start(
        cls,
        path: Path,
        config: Config,
        population: int,
        key: Key,
        options: RunOptions,
        group: Group | None = None,
        make_mechanism: MakeMechanism = Mechanism,
    ) -> Run:
        """Make the folder, the secret and the ledger, in this order.

        Args:
            path: the run's folder, new or empty.
            config: what was chosen.
            population: how many records there are. Private.
            key: fresh, unless for tests and research; the same on every rank.
            options: what was chosen beside the config.
            group: the processes of the run; all of them call this.
            make_mechanism: called as `Mechanism` is; what it makes may hide records from the loop.

        Raises:
            InputError: the config cannot be honoured or the folder cannot be used; nothing was written.
        """
        group = group or Alone()
        group.require_same((config_to_json(config), population), "options and number of records")
        folder, locks = RunFolder(path), list[FolderLock]()

        def begin() -> None:
            make_plan(config)  # a plan that cannot be made leaves no folder behind
            locks.append(folder.claim_new())
            save_secret_state(folder.checkpoint, _secret_state(key, config, options, None))

        try:
            group.from_first(begin)
            lock = locks[0] if locks else None
            return cls(
                folder,
                lock,
                config,
                key,
                options,
                population,
                group=group,
                fresh=True,
                make_mechanism=make_mechanism,
            )
        except Exception:
            if locks:
                folder.remove()
                locks[0].release()
            raise

    @classmethod
    def resume(cls, path: Path, population: int, group: Group | None = None) -> Run:
        """Take up an interrupted run: its mechanism stands before the first event, as at the start.

        Args:
            path: the run's folder.
            population: how many records there are.
            group: the processes that go on with it, as many as one likes; all of them call this.
        """
        group, folder = group or Alone(), RunFolder(path)
        locks = list[FolderLock]()
        try:
            group.from_first(lambda: locks.append(folder.claim()))
            with group.together():
                state = load_secret_state(folder.checkpoint, "key", "options")
                own = {} if state["training"] is None else own_state(folder.checkpoint, state)
                key = Key(state["key"], state["seed"])
                config = config_from_json(state["config"])
                options = RunOptions(**state["options"])
                if options.audited:
                    raise InputError(
                        f"{path} is an audit, and what the attack has seen so far is in no checkpoint: audit again, in "
                        "another folder"
                    )
            return cls(
                folder,
                locks[0] if locks else None,
                config,
                key,
                options,
                population,
                group=group,
                fresh=False,
                training=state["training"],
                own=own,
            )
        except Exception:
            if locks:
                locks[0].release()
            raise

    @property
    def batch_shaped(self) -> bool:
        """Whether the last bits of a record's norm may depend on who shares its batch; the ledger says so."""
        return self.options.batch_shaped or self.mechanism.plan.too_small_to_fill

    def save(self, training: dict[str, Any]) -> None:
        """Replace the secret checkpoint. All ranks call this, with the state that they have in common."""
        self.key.require_home()
        self.training = training
        state = _secret_state(self.key, self.config, self.options, training)
        save_group_state(self.folder.checkpoint, state, self.mechanism.own_state(), self.group)

    def finish(self, model_sha256: str) -> None:
        """Close the ledger over the released model. Doing it twice changes nothing."""
        self.key.require_home()
        self._journal.finish(model_sha256)

    def close(self) -> None:
        """Let go of the folder; the run can be resumed."""
        self._journal.close()
        if self._lock is not None:
            self._lock.release()

    def discard(self) -> None:
        """Take back a run that was begun here and of which nothing has left this process.

        With its key its noise is gone for good, so what the ledger has paid for will never be released. In a fork
        the files are the parent's, and stay.
        """
        if self.key.at_home and self.group.leads:
            self.folder.remove()
        self.close()

    def _journal_of_group(self, plan: RunPlan, first: list[Entry]) -> Journal:
        if self.group.size == 1 or plan.claim is None:
            return self._open_journal(plan, first)
        opened = list[Journal]()
        self.group.from_first(lambda: opened.append(self._open_journal(plan, first)))
        return GroupJournal(self.group, opened[0] if opened else None)

    def _open_journal(self, plan: RunPlan, first: list[Entry]) -> Journal:
        if plan.claim is None:
            return EventCounter()
        header = plan.header(
            versions=versions(),
            seeded=self.key.seeded,
            diagnostics=self.options.diagnostics,
            audited=self.options.audited,
            norms_batch_shaped=self.options.batch_shaped or plan.too_small_to_fill,
            user_level=self.options.user_level,
        )
        ledger = self.folder.ledger
        if ledger.exists() and b"\n" in ledger.read_bytes():
            return LedgerJournal.reopen(ledger, header)
        ledger.unlink(missing_ok=True)  # a crash before the header was whole: nothing was released
        try:
            return LedgerJournal.create(ledger, header, first)
        except OSError as error:
            raise InputError(f"cannot write {ledger}: {error.strerror or error}") from None


def _secret_state(
    key: Key, config: Config, options: RunOptions, training: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "key": key.secret,
        "seed": key.seed,
        "config": config_to_json(config),
        "options": {**asdict(options), "recipe": dict(options.recipe or {})},
        "training": training,
    }


def config_to_json(config: Config) -> str:
    """A config as text."""
    values = asdict(config)
    if values["headroom"] == float("inf"):
        values["headroom"] = "inf"
    return json.dumps(values)


def config_from_json(text: str) -> Config:
    """The config that `config_to_json` wrote."""
    values = json.loads(text)
    if unknown := sorted(values.keys() - {field.name for field in fields(Config)}):
        raise InputError(f"the run was begun by another version, with {', '.join(unknown)}")
    values |= {
        "n_public_source": CountSource(values["n_public_source"]),
        "releases": tuple(
            Release(r["label"], r["noise_multiplier"], Cadence(r["cadence"]))
            for r in values["releases"]
        ),
    }
    return Config(**values)
