"""The ledger: what a run claims and everything it released, one JSON object a line, written before it happens.

A file of lines: a header (the claim and what it rests on), one line for every event in its order, an end line
(how many events, and the sha256 of the released model). Each line carries the hash of all before it. The chain
shows accidents (a lost line, a flipped byte), not a forger: whoever can write the file can also recompute the chain.

There are no times in it, and nothing that depends on the data beyond what the events account for.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dpis.accounting.budget import Adjacency, Budget
from dpis.accounting.events import Event, event_from_json, event_to_json
from dpis.accounting.filter import Guard
from dpis.accounting.header import CountSource, Header, Mode, Norms, Unit
from dpis.accounting.workload import PlannedRun
from dpis.errors import BrokenLedgerError, BudgetExceededError, InputError, LedgerError

FORMAT = "dpis-ledger/1"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_Value = TypeVar("_Value", Header, "Entry", "End")
CHAIN_ROOT = hashlib.sha256(FORMAT.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """One event as the ledger holds it."""

    label: str
    event: Event


@dataclass(frozen=True, slots=True)
class End:
    """The last line of a finished run."""

    events: int
    model_sha256: str

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.model_sha256):
            raise InputError(f"a sha256 has 64 hexadecimal digits, found {self.model_sha256!r}")


@dataclass(frozen=True, slots=True)
class Ledger:
    """A ledger as read from disk: its chain holds and its lines are in order."""

    header: Header
    entries: tuple[Entry, ...]
    end: End | None
    torn: bool
    """The last line is incomplete (a crash while writing it). Its event counts as spent."""

    def guard(self) -> Guard:
        """The header's guard, where it stands after all recorded events.

        Raises:
            BrokenLedgerError: it refuses one of them; names the first such line.
        """
        guard = self.header.guard()
        for number, entry in enumerate(self.entries, start=2):
            try:
                guard.admit(entry.event)
            except BudgetExceededError:
                raise BrokenLedgerError(
                    number,
                    f"{entry.event} is not covered by the claim: beyond the plan, of another kind, or spending more",
                ) from None
        return guard


# ── values as JSON objects ───────────────────────────────────────────────────────────────────────────


def header_body(header: Header) -> dict[str, Any]:
    """The header as a JSON object.

    One shard, and no audit, go without saying: so ledgers from before there were any read on.
    """
    shards = {} if header.shards == 1 else {"shards": header.shards}
    audited = {"audited": True} if header.audited else {}
    return {
        "type": "header",
        "format": FORMAT,
        "claim": {"epsilon": float(header.claim.epsilon), "delta": float(header.claim.delta)},
        "adjacency": header.adjacency.value,
        "n_public": header.n_public,
        "n_public_source": header.n_public_source.value,
        "mode": header.mode.value,
        "planned": [
            {"label": run.label, "event": event_to_json(run.event), "count": run.count}
            for run in header.planned
        ],
        "filter_order": header.filter_order,
        "versions": dict(sorted(header.versions.items())),
        "seeded": header.seeded,
        "diagnostics": header.diagnostics,
        "norms": header.norms.value,
        "unit": header.unit.value,
        **shards,
        **audited,
    }


def entry_body(index: int, entry: Entry) -> dict[str, Any]:
    """An event line as a JSON object."""
    return {
        "type": "event",
        "index": index,
        "label": entry.label,
        "event": event_to_json(entry.event),
    }


def end_body(end: End) -> dict[str, Any]:
    """The end line as a JSON object."""
    return {"type": "end", "events": end.events, "model_sha256": end.model_sha256}


def _header_of(body: Mapping[str, Any]) -> Header:
    claim, order = body["claim"], body["filter_order"]
    return Header(
        claim=Budget(float(claim["epsilon"]), float(claim["delta"])),
        adjacency=Adjacency.parse(body["adjacency"]),
        n_public=int(body["n_public"]),
        n_public_source=CountSource(body["n_public_source"]),
        mode=Mode(body["mode"]),
        planned=tuple(
            PlannedRun(str(run["label"]), event_from_json(run["event"]), int(run["count"]))
            for run in body["planned"]
        ),
        filter_order=None if order is None else int(order),
        versions={str(name): str(version) for name, version in dict(body["versions"]).items()},
        seeded=bool(body["seeded"]),
        diagnostics=bool(body["diagnostics"]),
        norms=Norms(body["norms"]),
        unit=Unit(body["unit"]),
        shards=int(body.get("shards", 1)),
        audited=bool(body.get("audited", False)),
    )


def _entry_of(body: Mapping[str, Any]) -> Entry:
    return Entry(str(body["label"]), event_from_json(body["event"]))


def _end_of(body: Mapping[str, Any]) -> End:
    return End(int(body["events"]), str(body["model_sha256"]))


def _understood(
    body: Mapping[str, Any],
    value_of: Callable[[Mapping[str, Any]], _Value],
    body_of: Callable[[_Value], dict[str, Any]],
) -> _Value:
    """The value of a JSON object that is, character by character, what would be written of it.

    A field more or less, another type or another order of fields: what is not understood is not trusted.
    """
    try:
        value = value_of(body)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(f"a field is missing or of the wrong type ({error})") from None
    except ValueError as error:
        raise InputError(str(error)) from None
    if _text(body_of(value)) != _text(body):
        raise InputError("its fields are not exactly those of this format")
    return value


# ── lines ────────────────────────────────────────────────────────────────────────────────────────────


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _chained_hash(previous: str, text: str) -> str:
    return hashlib.sha256(f"{previous}{text}".encode()).hexdigest()


def encode_line(body: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """One line, and the hash that the next one carries on."""
    chain = _chained_hash(previous, _text(body))
    return _text({**body, "chain": chain}).encode() + b"\n", chain


def complete_lines(data: bytes) -> list[bytes]:
    """The lines that end in a newline: a torn last one is left out."""
    return data.split(b"\n")[:-1]


def _decode_line(number: int, line: bytes, previous: str) -> tuple[dict[str, Any], str]:
    """The line's object and hash; a line that is not what its contents and predecessors give is broken."""
    try:
        body = json.loads(line)
        if not isinstance(body, dict):
            raise ValueError
        body.pop("chain", None)
        expected, chain = encode_line(body, previous)
    except (ValueError, RecursionError):
        raise BrokenLedgerError(number, "not a JSON object: the line was changed") from None
    if expected != line + b"\n":
        raise BrokenLedgerError(
            number, "the hash chain breaks here: a line was changed, lost, added or moved"
        )
    return body, chain


def read_ledger(path: Path) -> Ledger:
    """Read a ledger and check its chain, its order and its end line.

    Raises:
        LedgerError: The file cannot be read, is empty, or is not a ledger of this package.
        BrokenLedgerError: A line was changed, lost, added or moved; names the first bad line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LedgerError(f"cannot read {path}: {error.strerror}") from None
    if not data:
        raise LedgerError(f"{path} is empty: not a ledger")
    lines = complete_lines(data)
    header, chain = _read_header(path, lines)
    entries: list[Entry] = []
    end: End | None = None
    for number, line in enumerate(lines[1:], start=2):
        if end is not None:
            raise BrokenLedgerError(number, "something follows the end line")
        body, chain = _decode_line(number, line, chain)
        item = _read_item(number, body, len(entries))
        if isinstance(item, End):
            end = item
        else:
            entries.append(item)
    torn = not data.endswith(b"\n")
    if torn and end is not None:
        raise BrokenLedgerError(len(lines) + 1, "something follows the end line")
    return Ledger(header, tuple(entries), end, torn)


def _read_header(path: Path, lines: list[bytes]) -> tuple[Header, str]:
    """The header and its hash, if the first line is a header of ours at all."""
    try:
        first = json.loads(lines[0]) if lines else None
    except (ValueError, RecursionError):
        first = None
    if not isinstance(first, dict) or (first.get("type"), first.get("format")) != (
        "header",
        FORMAT,
    ):
        raise LedgerError(
            f"{path} is not a ledger of this package: its first line is no {FORMAT} header"
        )
    body, chain = _decode_line(1, lines[0], CHAIN_ROOT)
    try:
        return _understood(body, _header_of, header_body), chain
    except InputError as error:
        raise LedgerError(f"{path} has a header that says nothing checkable: {error}") from None


def _read_item(number: int, body: Mapping[str, Any], index: int) -> Entry | End:
    """An event or the end; ``index`` events came before it."""
    try:
        if body.get("type") == "event":
            if body.get("index") != index:
                raise InputError(f"event {index} expected, found {body.get('index')}")
            return _understood(body, _entry_of, lambda entry: entry_body(index, entry))
        if body.get("type") == "end":
            if body.get("events") != index:
                raise InputError(f"it counts {body.get('events')} events, the ledger holds {index}")
            return _understood(body, _end_of, end_body)
        raise InputError(f"unknown type of line {body.get('type')!r}")
    except InputError as error:
        raise BrokenLedgerError(number, f"not a line of a ledger: {error}") from None
