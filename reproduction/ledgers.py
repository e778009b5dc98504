"""The ledger of every private row: whether it holds, and whether the row says what it says."""

from __future__ import annotations

import hashlib
import lzma
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpis.accounting import (
    Accountant,
    CountSource,
    Mode,
    Verdict,
    epsilon_by_rdp,
    verify_ledger,
)
from dpis.accounting.workload import composition_of
from dpis.errors import DpisError
from dpis.runs.summary import PROTECTS
from reproduction.results import ledger_path, some_rows
from reproduction.rows import Row

_PLANNED_SHARE = 0.98
"""Of the claim, at least, a plan spends by its own accountant; by pld one of rdp spends a tenth less."""


def check_ledgers(folder: Path) -> tuple[int, list[str]]:
    """Verify the ledger of every private row anew: how many rows there are, and what is wrong with which."""
    rows = [row for row in some_rows(folder, with_tuning=True) if row["epsilon"] is not None]
    named = ("table", "dataset", "method", "recipe", "epsilon", "accountant", "seed")
    return len(rows), [
        f"{' '.join(str(row[name]) for name in named)}: {problem}"
        for row in rows
        if (problem := _problem(folder, row)) is not None
    ]


def _problem(folder: Path, row: Row) -> str | None:
    try:
        ledger = lzma.decompress(ledger_path(folder, row).read_bytes())
    except (OSError, lzma.LZMAError) as error:
        return f"its ledger cannot be read: {error}"
    if hashlib.sha256(ledger).hexdigest() != row["ledger_sha256"]:
        return "its ledger is another one"
    with tempfile.TemporaryDirectory() as scratch:
        unpacked = Path(scratch) / "ledger.jsonl"
        unpacked.write_bytes(ledger)
        try:
            verdict = verify_ledger(unpacked)
        except DpisError as error:
            return f"does not hold: {error}"
    return contradiction(row, verdict) or verdict.problem


def contradiction(row: Row, verdict: Verdict) -> str | None:
    """What a private row and its ledger, or its options, say differently; None if they agree."""
    header, claim = verdict.ledger.header, verdict.ledger.header.claim
    if (claim.epsilon, claim.delta) != (row["epsilon"], row["delta"]):
        return f"its ledger claims {claim}, the row ({row['epsilon']}, {row['delta']})"
    in_ledger = {
        "epsilon": claim.epsilon,
        "delta": claim.delta,
        "n_public": header.n_public,
        "n_public_source": header.n_public_source.value,
        "adjacency": header.adjacency.value,
        "mode": header.mode.value,
        "protects": PROTECTS[header.unit],
    }
    in_row = {name: row[name] for name in ("dataset", "method", "seed", "epsilon", "delta")}
    if header.n_public_source is CountSource.GIVEN:
        in_row["n_public"] = header.n_public
    if header.mode is Mode.PREDECLARED:
        in_row["accountant"] = row["accountant"]
    return (
        _difference("its ledger", in_ledger, "the row's claim", row["claim"])
        or _difference("the row", in_row, "its options", row["options"])
        or _other_accountant(row, verdict)
    )


def _difference(
    one: str, values: Mapping[str, Any], other: str, others: Mapping[str, Any]
) -> str | None:
    for name, value in values.items():
        if others.get(name) != value:
            return f"{one} says {name} {value!r}, {other} {others.get(name)!r}"
    return None


def _other_accountant(row: Row, verdict: Verdict) -> str | None:
    """A ledger does not name its accountant: it shows by the noise, which is planned to spend the claim."""
    header, named = verdict.ledger.header, row["accountant"]
    if header.mode is Mode.ADAPTIVE:
        right = named == Accountant.RDP
        return None if right else f"its ledger is of a Renyi filter, the row's accountant {named!r}"
    if named == Accountant.PLD:
        epsilon = verdict.epsilon_claimable
    else:
        epsilon = epsilon_by_rdp(composition_of(header.planned), header.claim.delta)
    if _PLANNED_SHARE <= epsilon / header.claim.epsilon <= 2 - _PLANNED_SHARE:
        return None
    return (
        f"the plan in its ledger was not made by {named!r}, by which it spends epsilon {epsilon:.4g} "
        f"of {header.claim.epsilon:g}"
    )
