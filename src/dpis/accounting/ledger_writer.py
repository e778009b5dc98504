"""Writing a ledger: every event passes its guard and is on disk before its output may be used."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dpis.accounting.events import Event
from dpis.accounting.filter import Guard
from dpis.accounting.header import Header
from dpis.accounting.ledger import (
    CHAIN_ROOT,
    End,
    Entry,
    Ledger,
    complete_lines,
    encode_line,
    end_body,
    entry_body,
    header_body,
    read_ledger,
)
from dpis.errors import DpisError, InputError, LedgerError


class LedgerWriter:
    """Appends events to a ledger, each on disk before `record` returns; only then may its output be used.

    Every event passes the header's guard first, so a ledger never holds more than its claim covers.

    Example:
        >>> from dpis.accounting import *
        >>> plan = plan_predeclared(Budget(1.0, 1e-5), Workload.create(n_public=1000, batch_size=100, epochs=1))
        >>> path = getfixture("tmp_path") / "ledger.jsonl"
        >>> with LedgerWriter.create(path, plan.header(CountSource.GIVEN)) as ledger:
        ...     ledger.record("gradient", plan.runs[0].event)
        >>> len(read_ledger(path).entries)
        1
    """

    def __init__(self, file: BinaryIO, path: Path, header: Header, guard: Guard):
        self.path = path
        self.header = header
        self.guard = guard
        self.recorded = 0
        self._chain = CHAIN_ROOT
        self._file = file

    @classmethod
    def create(cls, path: Path, header: Header, first: Sequence[Entry] = ()) -> LedgerWriter:
        """Begin a new ledger. A file that exists is never written over.

        Args:
            path: Where.
            header: The claim, and what it rests on.
            first: Events that go to the disk together with the header: a released count that the header holds.
        """
        guard = header.guard()
        try:
            file = path.open("xb")
        except FileExistsError:
            raise InputError(
                f"{path} exists already: a ledger is never written over, since it would hide what was spent. "
                "Resume that run, or choose another folder"
            ) from None
        except OSError as error:
            raise InputError(f"cannot write the ledger {path}: {error.strerror}") from None
        _lock(file, path)
        writer = cls(file, path, header, guard)
        for entry in first:
            guard.admit(entry.event)
        writer._append([header_body(header), *(entry_body(i, e) for i, e in enumerate(first))])
        writer.recorded = len(first)
        try:
            sync_folder(path.parent)
        except OSError as error:
            file.close()
            raise LedgerError(f"cannot write the ledger {path}: {error.strerror}") from None
        return writer

    @classmethod
    def reopen(cls, path: Path) -> LedgerWriter:
        """Go on with an unfinished ledger: whatever it holds is spent already.

        A torn last line is cut off first. Its event counts as spent, so the one thing that may follow is that
        same event again, with the same randomness; the guard stands where it stood before it.
        """
        try:
            file = path.open("r+b")
        except OSError as error:
            raise LedgerError(f"cannot open the ledger {path}: {error.strerror}") from None
        _lock(file, path)  # before anything is read: another writer may still be at work
        try:
            ledger = read_ledger(path)
            if ledger.end is not None:
                raise InputError(f"{path} is finished: nothing may be added to it")
            writer = cls(file, path, ledger.header, ledger.guard())
            writer._stand_at_the_end(ledger)
        except DpisError:
            file.close()
            raise
        return writer

    def _stand_at_the_end(self, ledger: Ledger) -> None:
        """Of its last whole line: what is torn is cut off."""
        lines = complete_lines(self.path.read_bytes())
        self.recorded = len(ledger.entries)
        self._chain = json.loads(lines[-1])["chain"]
        self._file.truncate(sum(len(line) + 1 for line in lines))
        self._file.seek(0, os.SEEK_END)

    def record(self, label: str, event: Event) -> None:
        """Spend one event: refused by the guard, or on disk when this returns."""
        self.record_all([Entry(label, event)])

    def record_all(self, entries: Iterable[Entry]) -> None:
        """Spend several events ahead of their releases, with one wait for the disk.

        A crash then leaves a ledger that claims more than was released, never less. If the guard
        refuses one of them, those before it are recorded and the refusal is raised.
        """
        bodies: list[dict[str, Any]] = []
        try:
            for entry in entries:
                body = entry_body(self.recorded + len(bodies), entry)
                self.guard.admit(entry.event)
                bodies.append(body)
        finally:
            self._append(bodies)
            self.recorded += len(bodies)

    def finish(self, model_sha256: str) -> None:
        """Close the ledger over the released model."""
        self._append([end_body(End(self.recorded, model_sha256))])
        self.close()

    def _append(self, bodies: Iterable[dict[str, Any]]) -> None:
        """Chain the lines and write them to the disk itself.

        After a failure the file is closed: no event may follow a torn line.
        """
        if self._file.closed:
            raise LedgerError(
                f"the ledger {self.path} is closed: nothing more can be recorded, so nothing released"
            )
        lines = []
        for body in bodies:
            line, self._chain = encode_line(body, self._chain)
            lines.append(line)
        try:
            write_through(self._file, b"".join(lines))
        except OSError as error:
            with contextlib.suppress(
                OSError
            ):  # what could not be flushed stays torn, and counts as spent
                self._file.close()
            raise LedgerError(
                f"cannot write the ledger {self.path}: {error.strerror}. "
                "The run must stop: the event was not released"
            ) from None

    def close(self) -> None:
        """Let go of the file; an unfinished run can be resumed."""
        self._file.close()

    def __enter__(self) -> LedgerWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_through(file: BinaryIO, data: bytes | memoryview) -> None:
    """To the disk itself, not to what the system keeps for later."""
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _lock(file: BinaryIO, path: Path) -> None:
    """One writer at a time, where the platform has advisory locks."""
    try:
        import fcntl
    except ImportError:  # pragma: no cover - a platform without them
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise InputError(
            f"{path} is being written by another process: wait for it, or stop it"
        ) from None


def sync_folder(folder: Path) -> None:
    """Make the file's name durable too, where the platform can."""
    if not hasattr(os, "O_DIRECTORY"):  # pragma: no cover - a platform without it
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
