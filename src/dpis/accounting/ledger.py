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
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from dpis.accounting.budget import Adjacency, Budget
from dpis.accounting.events import Event, event_from_json, event_to_json
from dpis.accounting.filter import Guard, PlannedSequence, RenyiFilter
from dpis.accounting.workload import MOST_RECORDS, PlannedRun
from dpis.errors import BrokenLedgerError, InputError, LedgerError

FORMAT = "dpis-ledger/1"
_SHA256 = re.compile(r"[0-9a-f]{64}")
CHAIN_ROOT = hashlib.sha256(FORMAT.encode()).hexdigest()


class Mode(StrEnum):
    """What a claim rests on."""

    PREDECLARED = "predeclared"
    """Every event was fixed beforehand; the claim is the plan's, also after an early stop."""

    ADAPTIVE = "adaptive"
    """A Renyi filter admitted every event."""


class CountSource(StrEnum):
    """Where ``n_public`` comes from."""

    GIVEN = "given"
    DATASET_LENGTH = "dataset-length"
    RELEASED = "released"


class Norms(StrEnum):
    """In what shape gradient norms were computed."""

    FIXED_SHAPE = "fixed-shape"
    """One shape throughout: a record's norm does not depend on who shares its batch."""

    BATCH_SHAPED = "batch-shaped"
    """The shapes followed the batches (a padding to the longest, a loop that is not ours): rounding may differ.

    And more than rounding, if the model saw how far a record was padded: then records coupled, and no claim holds.
    `dpis.train` tries that out on some records; in a loop that is not ours nobody does.
    """


class Unit(StrEnum):
    """Who is protected: what two adjacent data sets differ in."""

    RECORD = "record"
    """One row of the data."""

    USER = "user"
    """One user with all of their rows; one row more or less of a user who stays is another matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line: the claim, and what a reader needs to check it."""

    claim: Budget
    adjacency: Adjacency
    n_public: int
    n_public_source: CountSource
    mode: Mode
    planned: tuple[PlannedRun, ...] = ()
    """Every event of a predeclared run; empty in adaptive mode."""
    filter_order: int | None = None
    """The Renyi order of an adaptive run's filter."""
    versions: Mapping[str, str] = field(default_factory=dict)
    seeded: bool = False
    """A fixed seed makes the randomness reproducible, so the claim does not hold: not for release."""
    diagnostics: bool = False
    """Private values were shown to the operator: not for release."""
    norms: Norms = Norms.FIXED_SHAPE
    """Rule 19: whether the rounding of a norm can depend on other records."""
    unit: Unit = Unit.RECORD
    """Who is protected; n_public counts these."""

    def __post_init__(self) -> None:
        adaptive, released = (
            self.mode is Mode.ADAPTIVE,
            self.n_public_source is CountSource.RELEASED,
        )
        if adaptive and (self.filter_order is None or self.planned):
            raise InputError("an adaptive run's header needs the filter's Renyi order, and no plan")
        if not adaptive and (not self.planned or self.filter_order is not None):
            raise InputError("a predeclared run's header needs the planned events, and no filter")
        if not 1 <= self.n_public <= MOST_RECORDS:
            raise InputError(f"n_public must lie in 1..{MOST_RECORDS:,}, found {self.n_public}")
        if released and not adaptive:
            raise InputError(
                "a plan that rests on a released count of records is not predeclared: use the adaptive mode"
            )
        read = self.n_public_source is CountSource.DATASET_LENGTH
        if read and self.adjacency is not Adjacency.ZERO_OUT:
            raise InputError(
                "n_public read from the data set makes the number of records public: adjacency must be zero-out"
            )

    def guard(self) -> Guard:
        """The guard that every event of this run must pass."""
        if self.mode is Mode.ADAPTIVE:
            assert self.filter_order is not None
            return RenyiFilter(self.claim, self.filter_order)
        return PlannedSequence(self.planned, self.claim.delta)


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


@dataclass(frozen=True, slots=True)
class Ledger:
    """A ledger as read from disk: its chain holds and its lines are in order."""

    header: Header
    entries: tuple[Entry, ...]
    end: End | None
    torn: bool
    """The last line is incomplete (a crash while writing it). Its event counts as spent."""


# ── lines ────────────────────────────────────────────────────────────────────────────────────────────


def _chained_hash(previous: str, text: str) -> str:
    return hashlib.sha256(f"{previous}{text}".encode()).hexdigest()


def encode_line(body: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """One line, and the hash that the next one carries on."""
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    chain = _chained_hash(previous, text)
    line = json.dumps({**body, "chain": chain}, separators=(",", ":"), ensure_ascii=True)
    return line.encode() + b"\n", chain


def header_body(header: Header) -> dict[str, Any]:
    """The header as a JSON object."""
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
    }


_HEADER_FIELDS: dict[str, type | tuple[type, ...]] = {
    "type": str,
    "format": str,
    "claim": dict,
    "adjacency": str,
    "n_public": int,
    "n_public_source": str,
    "mode": str,
    "planned": list,
    "filter_order": (int, type(None)),
    "versions": dict,
    "seeded": bool,
    "diagnostics": bool,
    "norms": str,
    "unit": str,
}
_EVENT_FIELDS: dict[str, type | tuple[type, ...]] = {
    "type": str,
    "index": int,
    "label": str,
    "event": dict,
}
_END_FIELDS: dict[str, type | tuple[type, ...]] = {"type": str, "events": int, "model_sha256": str}
_RUN_FIELDS: dict[str, type | tuple[type, ...]] = {"label": str, "event": dict, "count": int}
_CLAIM_FIELDS: dict[str, type | tuple[type, ...]] = {"epsilon": float, "delta": float}


def _fields(body: object, expected: Mapping[str, type | tuple[type, ...]]) -> Mapping[str, Any]:
    """The object itself, if it has exactly these fields of these types: what is not understood is not trusted."""
    if not isinstance(body, Mapping) or set(body) - {"chain"} != set(expected):
        raise InputError(f"exactly the fields {sorted(expected)} are required")
    for name, kind in expected.items():
        value = body[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InputError(f"field {name!r} has the wrong type: {type(value).__name__}")
    return body


def _header_from_body(body: Mapping[str, Any]) -> Header:
    body = _fields(body, _HEADER_FIELDS)
    claim = _fields(body["claim"], _CLAIM_FIELDS)
    runs = [_fields(run, _RUN_FIELDS) for run in body["planned"]]
    return Header(
        claim=Budget(claim["epsilon"], claim["delta"]),
        adjacency=Adjacency.parse(body["adjacency"]),
        n_public=body["n_public"],
        n_public_source=CountSource(body["n_public_source"]),
        mode=Mode(body["mode"]),
        planned=tuple(
            PlannedRun(run["label"], event_from_json(run["event"]), run["count"]) for run in runs
        ),
        filter_order=body["filter_order"],
        versions={str(name): str(version) for name, version in body["versions"].items()},
        seeded=body["seeded"],
        diagnostics=body["diagnostics"],
        norms=Norms(body["norms"]),
        unit=Unit(body["unit"]),
    )


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


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────


def complete_lines(data: bytes) -> list[bytes]:
    """The lines that end in a newline: a torn last one is left out."""
    return data.split(b"\n")[:-1]


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
    chain = _check_header_line(path, lines)
    header = _read_header(path, json.loads(lines[0]))
    entries: list[Entry] = []
    end: End | None = None
    for number, line in enumerate(lines[1:], start=2):
        if end is not None:
            raise BrokenLedgerError(number, "something follows the end line")
        chain = _checked_chain(number, line, chain)
        item = _read_line(number, json.loads(line), len(entries))
        if isinstance(item, End):
            end = item
        else:
            entries.append(item)
    torn = not data.endswith(b"\n")
    if torn and end is not None:
        raise BrokenLedgerError(len(lines) + 1, "something follows the end line")
    return Ledger(header, tuple(entries), end, torn)


def _check_header_line(path: Path, lines: list[bytes]) -> str:
    """The header's hash, if the first line is a header of ours at all."""
    try:
        body = json.loads(lines[0]) if lines else None
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or body.get("type") != "header" or body.get("format") != FORMAT:
        raise LedgerError(
            f"{path} is not a ledger of this package: its first line is no {FORMAT} header"
        )
    return _checked_chain(1, lines[0], CHAIN_ROOT)


def _read_header(path: Path, body: Mapping[str, Any]) -> Header:
    try:
        return _header_from_body(body)
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path} has a header that says nothing checkable: {error}") from None


def _checked_chain(number: int, line: bytes, previous: str) -> str:
    """The line's hash; a line that is not, byte for byte, what its contents and predecessors give is broken."""
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
    return chain


def _read_line(number: int, body: Mapping[str, Any], index: int) -> Entry | End:
    kind = body.get("type")
    if kind not in ("event", "end"):
        raise BrokenLedgerError(number, f"unknown type of line {kind!r}")
    try:
        if kind == "event":
            fields = _fields(body, _EVENT_FIELDS)
            found, item = fields["index"], Entry(fields["label"], event_from_json(fields["event"]))
            if found != index:
                raise InputError(f"event {index} expected, found {found}")
            return item
        fields = _fields(body, _END_FIELDS)
        if fields["events"] != index:
            raise InputError(f"it counts {fields['events']} events, the ledger holds {index}")
        return End(index, checked_sha256(fields["model_sha256"]))
    except InputError as error:
        raise BrokenLedgerError(number, f"not a line of a ledger: {error}") from None


def checked_sha256(digest: str) -> str:
    """The digest itself, if it has the form of one."""
    if not _SHA256.fullmatch(digest):
        raise InputError(f"a sha256 has 64 hexadecimal digits, found {digest!r}")
    return digest
