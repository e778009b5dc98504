"""Whether a row says what its ledger says, and what its own options say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpis.accounting import Accountant, CountSource, Header, Mode, Verdict, epsilon_by_rdp
from dpis.accounting.workload import composition_of
from dpis.runs.summary import PROTECTS
from reproduction.row_types import Row

_PLANNED_SHARE = 0.98
"""Of the claim, at least, a plan spends by its own accountant; by pld one of rdp spends a tenth less."""

_SAID_TWICE = ("dataset", "method", "seed", "epsilon", "delta")
"""In a row, and in its options."""


def contradiction(row: Row, verdict: Verdict) -> str | None:
    """What a private row and its ledger, or its options, say differently; None if they agree."""
    header = verdict.ledger.header
    claim = header.claim
    if (claim.epsilon, claim.delta) != (row["epsilon"], row["delta"]):
        return f"its ledger claims {claim}, the row ({row['epsilon']}, {row['delta']})"
    return (
        _difference("its ledger", _claim_of(header), "the row's claim", row["claim"])
        or _difference("the row", _said_twice(row, header), "its options", row["options"])
        or _other_accountant(row, verdict)
    )


def _difference(
    one: str, values: Mapping[str, Any], other: str, others: Mapping[str, Any]
) -> str | None:
    for name, value in values.items():
        if others.get(name) != value:
            return f"{one} says {name} {value!r}, {other} {others.get(name)!r}"
    return None


def _claim_of(header: Header) -> dict[str, Any]:
    """As the summary of the run says it."""
    return {
        "epsilon": header.claim.epsilon,
        "delta": header.claim.delta,
        "n_public": header.n_public,
        "n_public_source": header.n_public_source.value,
        "adjacency": header.adjacency.value,
        "mode": header.mode.value,
        "protects": PROTECTS[header.unit],
    }


def _said_twice(row: Row, header: Header) -> dict[str, Any]:
    said = {name: row[name] for name in _SAID_TWICE}
    if header.n_public_source is CountSource.GIVEN:
        said["n_public"] = header.n_public
    if header.mode is Mode.PREDECLARED:
        said["accountant"] = row["accountant"]
    return said


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
